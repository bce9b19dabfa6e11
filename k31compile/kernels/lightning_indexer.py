"""``k31::lightning_indexer``: the best `sparse_count` cache positions of every query row (K3.1 spec 2.8).

    score[b, t, s] = sum_h weights[b, t, h] * relu(query[b, t, h] . key[b, s])  (+ mask[b, t, s] of a float mask)

The result is a set: a larger score wins, equal scores go to the lower position, NaN counts as the largest.
"""

from __future__ import annotations

import torch

from k31compile.errors import OperatorError
from k31compile.kernels import paging
from k31compile.kernels.checks import check_indexer, check_indexer_words
from k31compile.kernels.cpu.lightning_indexer import indexer_provider
from k31compile.kernels.library import register_operator
from k31compile.kernels.visibility import check_lengths, check_mask, masked_out, visible_lengths

SCHEMA = (
    "lightning_indexer(Tensor query, Tensor key, Tensor weights, *, Tensor? actual_seq_lengths_query=None, "
    "Tensor? actual_seq_lengths_key=None, Tensor? block_table=None, str layout_query='BSND', "
    "str layout_key='BSND', SymInt sparse_count=2048, int sparse_mode=3, str order='position', "
    "str tail='minus_one', Tensor? mask=None) -> Tensor"
)
_BLOCK_ELEMENTS = 1 << 22


def lightning_indexer_fake(
    query: torch.Tensor,
    key: torch.Tensor,
    weights: torch.Tensor,
    *,
    actual_seq_lengths_query: torch.Tensor | None = None,
    actual_seq_lengths_key: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    layout_query: str = "BSND",
    layout_key: str = "BSND",
    sparse_count: int = 2048,
    sparse_mode: int = 3,
    order: str = "position",
    tail: str = "minus_one",
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Shape and dtype of the result, int32 [B, T, 1, sparse_count]; sizes may be symbolic and stay so."""
    if query.dim() != 4:
        raise OperatorError(f"query must be [B, T, H, D], not {query.dim()}-dimensional")
    check_indexer_words(layout_query, order, tail)
    return query.new_empty((query.shape[0], query.shape[1], 1, sparse_count), dtype=torch.int32)


def lightning_indexer_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    weights: torch.Tensor,
    *,
    actual_seq_lengths_query: torch.Tensor | None = None,
    actual_seq_lengths_key: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    layout_query: str = "BSND",
    layout_key: str = "BSND",
    sparse_count: int = 2048,
    sparse_mode: int = 3,
    order: str = "position",
    tail: str = "minus_one",
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Select positions; the definition of the operator, in row blocks.

    Args:
        query: [B, T, H, D]; key: [B, S, 1, D], or pages [blocks, page, 1, D] with `layout_key='PA_BSND'`.
        weights: [B, T, H]. Any mix of float dtypes; scores are float64 when query or key is, else float32.
        actual_seq_lengths_query: integers [B]; actual_seq_lengths_key: integers [B] or [B, T] (visibility.py).
        block_table: integers [B, max_blocks].
        order: "position" lists the selected ascending, "score" by descending score.
        tail: what follows them in a row that sees fewer than `sparse_count`: -1 ("minus_one") or the lowest
            positions that were not selected, ascending ("lowest").
        mask: boolean (True is visible) or float (added), [B, T, S] or 1 for any of these (visibility.py).

    Returns int32 [B, T, 1, sparse_count]. Raises OperatorError on anything outside this contract.
    """
    check_indexer_words(layout_query, order, tail)
    check_indexer(query, key, weights, block_table, layout_key, sparse_count, tail)
    batch, rows, heads, _ = query.shape
    check_lengths((batch, rows), actual_seq_lengths_query, actual_seq_lengths_key, sparse_mode)
    limit = paging.positions(key, block_table)
    check_mask(mask, (batch, rows, limit), query.device)
    visible = visible_lengths(
        (batch, rows), limit, actual_seq_lengths_query, actual_seq_lengths_key, sparse_mode, query.device
    )
    result = torch.empty((batch, rows, 1, sparse_count), dtype=torch.int32, device=query.device)
    step = max(1, _BLOCK_ELEMENTS // max(1, heads * limit))
    place = torch.arange(limit, device=query.device)
    for request in range(batch):
        seen = place < visible[request].max() if rows else place < 0
        keys = paging.slots(key, block_table, request, place, seen)[:, 0]
        for start in range(0, rows, step):
            block = (request, slice(start, start + step))
            scores = _scores(query[block], keys, weights[block])
            hidden = place >= visible[block][:, None]
            if mask is not None:
                part = mask.expand(batch, rows, limit)[block]
                hidden = hidden | masked_out(part)
                scores = scores if part.dtype == torch.bool else scores + part.to(scores.dtype)
            result[block] = _select(scores, hidden, sparse_count, order, tail)[:, None]
    return result


def _scores(query: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    wide = torch.float64 in (query.dtype, keys.dtype)
    dtype = torch.float64 if wide else torch.float32
    with torch.autocast(query.device.type, enabled=False):
        dots = torch.relu(query.to(dtype) @ keys.to(dtype).T)
        return (weights.to(dtype)[..., None] * dots).sum(1)


def _select(scores: torch.Tensor, hidden: torch.Tensor, count: int, order: str, tail: str) -> torch.Tensor:
    limit = scores.shape[1]
    visible = (~hidden).sum(1, keepdim=True)
    # Stable and descending: NaN first, ties by position; hidden positions lose even against a visible -inf.
    ranked = torch.sort(scores.masked_fill(hidden, -torch.inf), dim=1, stable=True, descending=True).indices
    ranked = ranked.gather(1, torch.sort(hidden.gather(1, ranked).to(torch.int8), dim=1, stable=True).indices)
    ranked = torch.nn.functional.pad(ranked[:, :count], (0, max(0, count - limit)))
    slot = torch.arange(count, device=scores.device)
    empty = slot >= visible
    if order == "position":
        ranked = ranked.masked_fill(empty, limit).sort(dim=1).values
    filler = torch.full_like(ranked, -1)
    if tail == "lowest":
        # A row with a tail selected all that it sees, so what was not selected is what is hidden.
        rest = torch.sort((~hidden).to(torch.int8), dim=1, stable=True).indices
        filler = rest.gather(1, (slot - visible).clamp(0, max(limit - 1, 0))) if limit else filler
    return torch.where(empty, filler, ranked).to(torch.int32)


OPERATOR = register_operator(
    SCHEMA,
    fake=lightning_indexer_fake,
    reference=lightning_indexer_reference,
    providers=(indexer_provider(),),
)
