"""What the operators demand of real tensors, checked by every provider before a pointer leaves Python.

Each function raises OperatorError with the argument's name and what was expected of it.
"""

from __future__ import annotations

import torch

from k31compile.kernels import paging
from k31compile.kernels.errors import require

ORDINARY = 0
ABSORBED = 2
_INDEX_DTYPES = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)


def check_indexer_words(layout_query: str, order: str, tail: str) -> None:
    """Check the arguments of lightning_indexer that are words."""
    require(layout_query == "BSND", f"layout_query must be 'BSND', not {layout_query!r}")
    require(order in ("position", "score"), f"order must be 'position' or 'score', not {order!r}")
    require(tail in ("minus_one", "lowest"), f"tail must be 'minus_one' or 'lowest', not {tail!r}")


def check_indexer(
    query: torch.Tensor,
    key: torch.Tensor,
    weights: torch.Tensor,
    block_table: torch.Tensor | None,
    layout_key: str,
    sparse_count: int,
    tail: str,
) -> None:
    """Check the tensors of lightning_indexer against each other."""
    require(query.dim() == 4, f"query must be [B, T, H, D], not {list(query.shape)}")
    batch, rows, heads, width = query.shape
    _check_floats(query, {"query": query, "key": key, "weights": weights})
    paging.check_cache("key", key, batch, block_table, layout_key, "layout_key")
    require(key.shape[2] == 1, f"key must have one head, not {key.shape[2]}")
    require(key.shape[3] == width, f"key has {key.shape[3]} features, query {width}")
    expected = (batch, rows, heads)
    require(weights.shape == expected, f"weights must have shape {list(expected)}, not {list(weights.shape)}")
    require(sparse_count >= 0, f"sparse_count must not be negative, is {sparse_count}")
    limit = paging.positions(key, block_table)
    require(
        tail == "minus_one" or sparse_count <= limit,
        f"tail='lowest' fills with positions, but sparse_count {sparse_count} exceeds the {limit} positions",
    )


def check_attention_words(layout_query: str, sparse_block_size: int, attention_mode: int) -> None:
    """Check the arguments of sparse_flash_attention that choose a variant."""
    require(layout_query == "BSND", f"layout_query must be 'BSND', not {layout_query!r}")
    require(
        sparse_block_size == 1, f"sparse_block_size must be 1 (token granularity), not {sparse_block_size}"
    )
    require(attention_mode in (ORDINARY, ABSORBED), f"attention_mode must be 0 or 2, not {attention_mode}")


def check_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sparse_indices: torch.Tensor,
    block_table: torch.Tensor | None,
    query_rope: torch.Tensor | None,
    key_rope: torch.Tensor | None,
    layout_kv: str,
    attention_mode: int,
) -> None:
    """Check the tensors of sparse_flash_attention against each other (not the range of the indices)."""
    require(query.dim() == 4, f"query must be [B, T, H, D], not {list(query.shape)}")
    batch, _rows, heads, width = query.shape
    _check_floats(query, {"query": query, "key": key, "value": value})
    paging.check_cache("key", key, batch, block_table, layout_kv, "layout_kv")
    _check_companion("value", value, key, None)
    groups = key.shape[2]
    require(groups > 0 and heads % groups == 0, f"{groups} key heads do not divide {heads} query heads")
    require(attention_mode == ORDINARY or groups == 1, f"attention_mode 2 has one key head, not {groups}")
    require(key.shape[3] == width, f"key has {key.shape[3]} features, query {width}")
    _check_indices(sparse_indices, query)
    require((query_rope is None) == (key_rope is None), "query_rope and key_rope come together or not at all")
    if query_rope is not None and key_rope is not None:
        _check_floats(query, {"query_rope": query_rope, "key_rope": key_rope})
        _check_companion("query_rope", query_rope, query, None)
        _check_companion("key_rope", key_rope, key, query_rope.shape[3])


def _check_indices(sparse_indices: torch.Tensor, query: torch.Tensor) -> None:
    require(
        sparse_indices.dtype in _INDEX_DTYPES,
        f"sparse_indices must hold integers, not {sparse_indices.dtype}",
    )
    batch, rows = query.shape[:2]
    require(
        sparse_indices.dim() == 4 and sparse_indices.shape[:3] == (batch, rows, 1),
        f"sparse_indices must have shape [{batch}, {rows}, 1, K], not {list(sparse_indices.shape)}",
    )
    require(
        sparse_indices.device == query.device,
        f"sparse_indices is on {sparse_indices.device}, query on {query.device}",
    )


def _check_companion(name: str, tensor: torch.Tensor, other: torch.Tensor, width: int | None) -> None:
    """`tensor` has the first three sizes of `other`, and `width` numbers when that is given."""
    fits = tensor.dim() == 4 and tensor.shape[:3] == other.shape[:3] and width in (None, tensor.shape[3])
    expected = [*other.shape[:3], "any" if width is None else width]
    require(fits, f"{name} must have shape {expected}, not {list(tensor.shape)}")


def _check_floats(query: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        require(tensor.dtype.is_floating_point, f"{name} must be floating point, not {tensor.dtype}")
        require(tensor.device == query.device, f"{name} is on {tensor.device}, query on {query.device}")
