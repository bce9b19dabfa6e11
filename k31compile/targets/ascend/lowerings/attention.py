"""Lightning indexer and sparse attention (K3.1 spec 2.8, 2.9): torch_npu's operators, or plain ones over pages."""

from typing import Any

import torch
from torch import Tensor

from k31compile.kernels.checks import accumulation_dtype
from k31compile.kernels.visibility import masked_out, visible_lengths
from k31compile.targets.ascend.constraints import (
    WEIGHT_PARTS,
    indexer_heads,
    lightning_indexer_objections,
    sparse_flash_attention_objections,
    split_heads,
    takes_indexer_weights,
)
from k31compile.targets.ascend.lowerings.registry import FORMULA, TORCH_NPU, known, lowers
from k31compile.targets.ascend.profiles import Profile
from k31compile.targets.ascend.providers import CANN_OPS_TRANSFORMER


@lowers("lightning_indexer", TORCH_NPU, lightning_indexer_objections, calls="npu_lightning_indexer")
def index_by_torch_npu(
    profile: Profile,
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    *,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_key: Tensor | None = None,
    block_table: Tensor | None = None,
    sparse_count: int = 2048,
    sparse_mode: int = 3,
    **_: Any,
) -> Tensor:
    """npu_lightning_indexer, every row a request of its own with the length that it sees."""
    batch, rows = query.shape[:2]
    query, weights = _heads_of_the_product(profile, query, weights)
    lengths, tables = _rows_as_requests(
        query, key, block_table, actual_seq_lengths_query, actual_seq_lengths_key, sparse_mode
    )
    indices, _ = torch.ops.npu.npu_lightning_indexer(
        query.reshape(batch * rows, 1, *query.shape[2:]), key, weights.reshape(batch * rows, 1, -1),
        actual_seq_lengths_key=lengths, block_table=tables, layout_query="BSND", layout_key="PA_BSND",
        sparse_count=sparse_count, sparse_mode=0,
    )  # fmt: skip
    shaped: Tensor = indices.view(batch, rows, 1, sparse_count)
    return shaped


@lowers("lightning_indexer", FORMULA)
def index_by_formula(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    *,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_key: Tensor | None = None,
    block_table: Tensor | None = None,
    sparse_count: int = 2048,
    sparse_mode: int = 3,
    mask: Tensor | None = None,
    order: str = "position",
    tail: str = "minus_one",
    **_: Any,
) -> Tensor:
    """Scores of every position, and the places of the best; equal scores go to whichever the device's top-k takes."""
    batch, rows = query.shape[:2]
    keys = _by_request(key, block_table)[:, :, 0]
    dtype = torch.float64 if torch.float64 in (query.dtype, key.dtype) else torch.float32
    dots = torch.relu(torch.einsum("bthd,bsd->bths", query.to(dtype), keys.to(dtype)))
    scores = (weights.to(dtype)[..., None] * dots).sum(2)
    limit = keys.shape[1]
    visible = visible_lengths(
        (batch, rows), limit, actual_seq_lengths_query, actual_seq_lengths_key, sparse_mode, query.device
    )
    hidden = torch.arange(limit, device=query.device) >= visible[..., None]
    if mask is not None:
        hidden = hidden | masked_out(mask)
        scores = scores if mask.dtype == torch.bool else scores + mask.to(dtype)
    ranked = scores.masked_fill(hidden, -torch.inf).topk(min(sparse_count, limit), dim=-1).indices
    places = ranked.masked_fill(hidden.gather(-1, ranked), limit)
    if order == "position":
        places = places.sort(dim=-1).values
    rest = torch.full_like(places, -1) if tail == "minus_one" else _lowest_hidden(hidden, places.shape[-1])
    places = torch.where(places == limit, rest, places).to(torch.int32)
    missing = sparse_count - places.shape[-1]
    if missing > 0:
        places = torch.cat((places, places.new_full((batch, rows, missing), -1)), dim=-1)
    return places[:, :, None]


def _lowest_hidden(hidden: Tensor, count: int) -> Tensor:
    """[B, T, count]: behind as many slots as a row sees positions, those that it does not see, ascending."""
    limit = hidden.shape[-1]
    place, slot = torch.arange(limit, device=hidden.device), torch.arange(count, device=hidden.device)
    seen = ~hidden
    hidden_first = torch.remainder((place + seen.to(torch.int64) * limit).sort(dim=-1).values, limit)
    behind = slot - seen.to(torch.int64).sum(-1, keepdim=True)
    return hidden_first.gather(-1, behind.clamp(0, limit - 1))


@lowers("sparse_flash_attention", TORCH_NPU, sparse_flash_attention_objections, calls="npu_sparse_flash_attention")
def attend_by_torch_npu(
    profile: Profile,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sparse_indices: Tensor,
    scale_value: float,
    *,
    block_table: Tensor | None = None,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_kv: Tensor | None = None,
    query_rope: Tensor,
    key_rope: Tensor,
    sparse_mode: int = 3,
    **_: Any,
) -> Tensor:
    """npu_sparse_flash_attention, every row a request; heads in groups that the product takes."""
    batch, rows, heads, width = query.shape
    lengths, tables = _rows_as_requests(
        query, key, block_table, actual_seq_lengths_query, actual_seq_lengths_kv, sparse_mode
    )
    indices = sparse_indices.reshape(batch * rows, 1, 1, -1)
    flat, rope = (x.reshape(batch * rows, 1, heads, -1) for x in (query, query_rope))
    groups = split_heads(profile, heads)
    parts = [
        torch.ops.npu.npu_sparse_flash_attention(
            part, key, value, indices, scale_value, block_table=tables, actual_seq_lengths_kv=lengths,
            query_rope=part_rope, key_rope=key_rope, sparse_block_size=1, layout_query="BSND", layout_kv="PA_BSND",
            sparse_mode=0, attention_mode=2,
        )[0]
        for part, part_rope in zip(flat.split(groups, dim=2), rope.split(groups, dim=2), strict=True)
    ]  # fmt: skip
    joined = torch.cat(parts, dim=2) if len(parts) > 1 else parts[0]
    return joined.view(batch, rows, heads, width)


@lowers("sparse_flash_attention", FORMULA)
def attend_by_formula(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sparse_indices: Tensor,
    scale_value: float,
    *,
    block_table: Tensor | None = None,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_kv: Tensor | None = None,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    sparse_mode: int = 3,
    mask: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Attention over gathered rows; a row that names nothing gives zeros."""
    batch, rows, heads, _width = query.shape
    wide = accumulation_dtype(query, key, value, query_rope, key_rope)
    keys, values = (_by_request(cache, block_table) for cache in (key, value))
    if query_rope is not None and key_rope is not None:
        query = torch.cat((query, query_rope), dim=-1)
        keys = torch.cat((keys, _by_request(key_rope, block_table)), dim=-1)
    limit, groups = keys.shape[1], keys.shape[2]
    visible = visible_lengths(
        (batch, rows), limit, actual_seq_lengths_query, actual_seq_lengths_kv, sparse_mode, query.device
    )
    index = sparse_indices[:, :, 0].to(torch.int64)
    used = (index >= 0) & (index < visible[..., None])
    index = torch.where(used, index, torch.zeros_like(index))
    grouped = query.to(wide).unflatten(2, (groups, heads // groups))
    logits = torch.einsum("btnhd,btknd->btnhk", grouped, _rows_of(keys, index).to(wide)) * scale_value
    if mask is not None:
        part = mask.expand(batch, rows, limit).gather(2, index)
        used = used & ~masked_out(part)
        logits = logits if mask.dtype == torch.bool else logits + part.to(wide)[:, :, None, None]
    open_slots = used[:, :, None, None]
    weights = torch.softmax(logits.masked_fill(~open_slots, torch.finfo(wide).min), dim=-1)
    weights = torch.where(open_slots, weights, torch.zeros_like(weights))
    read = torch.where(used[..., None, None], _rows_of(values, index).to(wide), 0)
    return torch.einsum("btnhk,btknd->btnhd", weights, read).flatten(2, 3).to(query.dtype)


def _heads_of_the_product(profile: Profile, query: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Query and weights with as many heads, and of a dtype, as the product's indexer takes."""
    heads = indexer_heads(profile, query.shape[2], weights.dtype)
    if not takes_indexer_weights(profile, weights.dtype):
        parts = [weights.to(torch.bfloat16)] if profile.may_round else bfloat16_parts(weights)
        weights = torch.cat(parts, dim=2) if len(parts) > 1 else parts[0]
        query = torch.cat([query] * len(parts), dim=2) if len(parts) > 1 else query
    assert heads is not None
    missing = heads - query.shape[2]
    if missing:
        query = torch.cat((query, query.new_zeros((*query.shape[:2], missing, query.shape[3]))), dim=2)
        weights = torch.cat((weights, weights.new_zeros((*weights.shape[:2], missing))), dim=2)
    return query, weights


def bfloat16_parts(x: Tensor) -> list[Tensor]:
    """Three bfloat16 tensors whose sum is a float32 one: each is what the ones before it leave, rounded.

    Exact down to the smallest numbers: what is below 2^-133 is rounded away.
    """
    parts: list[Tensor] = []
    rest = x
    for _ in range(WEIGHT_PARTS):
        parts.append(rest.to(torch.bfloat16))
        rest = rest - parts[-1].to(x.dtype)
    return parts


def _rows_as_requests(
    query: Tensor,
    key: Tensor,
    block_table: Tensor | None,
    lengths_query: Tensor | None,
    lengths_key: Tensor | None,
    sparse_mode: int,
) -> tuple[Tensor, Tensor]:
    """Lengths int32 [B T] and block tables [B T, blocks]: each query row as a request with the length that it sees."""
    assert block_table is not None
    batch, rows = query.shape[:2]
    limit = block_table.shape[1] * key.shape[1]
    visible = visible_lengths((batch, rows), limit, lengths_query, lengths_key, sparse_mode, query.device)
    tables = block_table.to(torch.int32)
    if rows > 1:
        tables = tables[:, None].expand(batch, rows, -1).reshape(batch * rows, -1)
    return visible.reshape(-1).to(torch.int32), tables


def _by_request(cache: Tensor, block_table: Tensor | None) -> Tensor:
    """[B, S, N, D] of pages [blocks, page, N, D] and a block table; a cache without one is that already."""
    if block_table is None:
        return cache
    pages = cache.index_select(0, block_table.reshape(-1).to(torch.int64).clamp(min=0))
    return pages.view(block_table.shape[0], -1, *cache.shape[2:])


def _rows_of(cache: Tensor, index: Tensor) -> Tensor:
    """[B, T, K, N, D]: the rows of [B, S, N, D] that an index [B, T, K] names."""
    batch, rows, count = index.shape
    flat = cache.flatten(2)
    named = index.view(batch, -1, 1).expand(batch, rows * count, flat.shape[2])
    return flat.gather(1, named).view(batch, rows, count, *cache.shape[2:])


known(
    "lightning_indexer", CANN_OPS_TRANSFORMER, "lightning_indexer",
    "its limits were not found written anywhere, and torch_npu has the operator",
)  # fmt: skip
