"""``k31::sparse_flash_attention``: attention over the cache rows that an index list names (K3.1 spec 2.9).

    out[b, t, h] = softmax_j((query . key[idx_j] + query_rope . key_rope[idx_j]) * scale_value) . value[idx_j]

over the slots j with 0 <= idx_j < visible(b, t) that no mask hides; a row with no such slot gives exact zeros. A float
mask is added to the logits at idx_j.
"""

from __future__ import annotations

import torch

from k31compile.errors import OperatorError
from k31compile.kernels import paging
from k31compile.kernels.checks import check_attention, check_attention_words
from k31compile.kernels.cpu.sparse_flash_attention import attention_provider
from k31compile.kernels.library import register_operator
from k31compile.kernels.visibility import check_lengths, check_mask, masked_out, visible_lengths

SCHEMA = (
    "sparse_flash_attention(Tensor query, Tensor key, Tensor value, Tensor sparse_indices, float scale_value, "
    "*, Tensor? block_table=None, Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_kv=None, "
    "Tensor? query_rope=None, Tensor? key_rope=None, int sparse_block_size=1, str layout_query='BSND', "
    "str layout_kv='BSND', int sparse_mode=3, int attention_mode=2, Tensor? mask=None) -> Tensor"
)
_BLOCK_ELEMENTS = 1 << 22


def sparse_flash_attention_fake(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sparse_indices: torch.Tensor,
    scale_value: float,
    *,
    block_table: torch.Tensor | None = None,
    actual_seq_lengths_query: torch.Tensor | None = None,
    actual_seq_lengths_kv: torch.Tensor | None = None,
    query_rope: torch.Tensor | None = None,
    key_rope: torch.Tensor | None = None,
    sparse_block_size: int = 1,
    layout_query: str = "BSND",
    layout_kv: str = "BSND",
    sparse_mode: int = 3,
    attention_mode: int = 2,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Shape and dtype of the result, [B, T, H, Dv] in query's dtype; sizes may be symbolic and stay so."""
    if query.dim() != 4:
        raise OperatorError(f"query must be [B, T, H, D], not {query.dim()}-dimensional")
    if value.dim() != 4:
        raise OperatorError(f"value must have 4 dimensions, not {value.dim()}")
    check_attention_words(layout_query, sparse_block_size, attention_mode)
    return query.new_empty((*query.shape[:3], value.shape[3]))


def check_range(sparse_indices: torch.Tensor, limit: int) -> None:
    """Refuse an index that lies beyond the cache (-1 and below mean nothing and are fine)."""
    if sparse_indices.numel():
        top = int(sparse_indices.max())
        if top >= limit:
            raise OperatorError(f"sparse_indices holds {top}, but the cache has {limit} positions")


def sparse_flash_attention_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sparse_indices: torch.Tensor,
    scale_value: float,
    *,
    block_table: torch.Tensor | None = None,
    actual_seq_lengths_query: torch.Tensor | None = None,
    actual_seq_lengths_kv: torch.Tensor | None = None,
    query_rope: torch.Tensor | None = None,
    key_rope: torch.Tensor | None = None,
    sparse_block_size: int = 1,
    layout_query: str = "BSND",
    layout_kv: str = "BSND",
    sparse_mode: int = 3,
    attention_mode: int = 2,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend to the named rows; the definition of the operator, in row blocks.

    Args:
        query: [B, T, H, D]; key: [B, S, N, D]; value: [B, S, N, Dv], or pages [blocks, page, N, .] with
            `layout_kv='PA_BSND'` and a block_table [B, max_blocks]; N divides H, and is 1 in mode 2.
        sparse_indices: integers [B, T, 1, K]; a negative one names nothing, one beyond the cache is an error.
        query_rope, key_rope: [B, T, H, R] and [B, S, N, R] (or pages), added to the logits.
        actual_seq_lengths_query: integers [B]; actual_seq_lengths_kv: integers [B] or [B, T] (visibility.py).
        mask: boolean (True is visible) or float (added), [B, T, S] or 1 for any of these (visibility.py).

    Softmax runs in float32 (float64 for float64 tensors). Returns [B, T, H, Dv] in query's dtype. Raises
    OperatorError on anything outside this contract.
    """
    check_attention_words(layout_query, sparse_block_size, attention_mode)
    check_attention(query, key, value, sparse_indices, block_table, query_rope, key_rope, layout_kv, attention_mode)
    batch, rows, heads, _ = query.shape
    check_lengths((batch, rows), actual_seq_lengths_query, actual_seq_lengths_kv, sparse_mode)
    limit = paging.positions(key, block_table)
    check_range(sparse_indices, limit)
    check_mask(mask, (batch, rows, limit), query.device)
    visible = visible_lengths(
        (batch, rows), limit, actual_seq_lengths_query, actual_seq_lengths_kv, sparse_mode, query.device
    )
    result = query.new_empty((batch, rows, heads, value.shape[3]))
    if query_rope is not None and key_rope is not None:
        query = torch.cat((query, query_rope), dim=-1)
    width = sparse_indices.shape[3] * key.shape[2] * (query.shape[3] + value.shape[3])
    step = max(1, _BLOCK_ELEMENTS // max(1, width))
    for request in range(batch):
        for start in range(0, rows, step):
            block = (request, slice(start, start + step))
            index = sparse_indices[block][:, 0].to(torch.int64)
            used = (index >= 0) & (index < visible[block][:, None])
            bias = None
            if mask is not None:
                part = mask.expand(batch, rows, limit)[block].gather(1, torch.where(used, index, 0))
                used, bias = used & ~masked_out(part), None if part.dtype == torch.bool else part
            caches = (key, value) if key_rope is None else (key, value, key_rope)
            read = [paging.slots(cache, block_table, request, index, used) for cache in caches]
            keys = read[0] if key_rope is None else torch.cat((read[0], read[2]), dim=-1)
            result[block] = _attend(query[block], keys, read[1], used, scale_value, bias)
    return result


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    used: torch.Tensor,
    scale: float,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of [t, H, D] over gathered rows [t, K, N, .] where `used` [t, K]; `bias` [t, K] is added."""
    wide = torch.float64 in (query.dtype, keys.dtype, values.dtype)
    dtype = torch.float64 if wide else torch.float32
    heads, groups = query.shape[1], keys.shape[2]
    with torch.autocast(query.device.type, enabled=False):
        grouped = query.to(dtype).reshape(query.shape[0], groups, heads // groups, -1)
        logits = torch.einsum("tngd,tknd->tngk", grouped, keys.to(dtype)) * scale
        if bias is not None:
            logits = logits + bias.to(dtype)[:, None, None, :]
        logits = logits.masked_fill(~used[:, None, None, :], -torch.inf)
        top = logits.amax(-1, keepdim=True) if used.shape[1] else logits.new_zeros((*logits.shape[:3], 1))
        weight = torch.exp(logits - top.masked_fill(top == -torch.inf, 0))
        total = weight.sum(-1, keepdim=True)
        mixed = torch.einsum("tngk,tknd->tngd", weight, values.to(dtype))
        return (mixed / total.masked_fill(total == 0, 1)).flatten(1, 2)


OPERATOR = register_operator(
    SCHEMA,
    fake=sparse_flash_attention_fake,
    reference=sparse_flash_attention_reference,
    providers=(attention_provider(),),
)
