"""What the operators demand of real tensors, checked by every provider before a pointer leaves Python.

Each function raises OperatorError with the argument's name and what was expected of it.
"""

from __future__ import annotations

import torch

from k31compile.errors import OperatorError
from k31compile.kernels import paging
from k31compile.kernels.visibility import check_integers

ORDINARY = 0
ABSORBED = 2
FLOATS = frozenset((torch.float32, torch.bfloat16, torch.float64, torch.float16))


def check_indexer_words(layout_query: str, order: str, tail: str) -> None:
    """Check the arguments of lightning_indexer that are words."""
    if layout_query != "BSND":
        raise OperatorError(f"layout_query must be 'BSND', not {layout_query!r}")
    if order not in ("position", "score"):
        raise OperatorError(f"order must be 'position' or 'score', not {order!r}")
    if tail not in ("minus_one", "lowest"):
        raise OperatorError(f"tail must be 'minus_one' or 'lowest', not {tail!r}")


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
    if query.dim() != 4:
        raise OperatorError(f"query must be [B, T, H, D], not {list(query.shape)}")
    batch, _, _, width = query.shape
    check_floats(("query", query), ("key", key), ("weights", weights))
    paging.check_cache("key", key, batch, block_table, layout_key, "layout_key")
    if key.shape[2] != 1:
        raise OperatorError(f"key must have one head, not {key.shape[2]}")
    if key.shape[3] != width:
        raise OperatorError(f"key has {key.shape[3]} features, query {width}")
    if weights.shape != query.shape[:3]:
        raise OperatorError(f"weights must have shape {[*query.shape[:3]]}, not {list(weights.shape)}")
    if sparse_count < 0:
        raise OperatorError(f"sparse_count must not be negative, is {sparse_count}")
    if tail == "lowest" and sparse_count > paging.positions(key, block_table):
        limit = paging.positions(key, block_table)
        raise OperatorError(
            f"tail='lowest' fills with positions, but sparse_count {sparse_count} exceeds the {limit} positions"
        )


def check_attention_words(layout_query: str, sparse_block_size: int, attention_mode: int) -> None:
    """Check the arguments of sparse_flash_attention that choose a variant."""
    if layout_query != "BSND":
        raise OperatorError(f"layout_query must be 'BSND', not {layout_query!r}")
    if sparse_block_size != 1:
        raise OperatorError(f"sparse_block_size must be 1 (token granularity), not {sparse_block_size}")
    if attention_mode not in (ORDINARY, ABSORBED):
        raise OperatorError(f"attention_mode must be 0 or 2, not {attention_mode}")


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
    if query.dim() != 4:
        raise OperatorError(f"query must be [B, T, H, D], not {list(query.shape)}")
    batch, _, heads, width = query.shape
    check_floats(("query", query), ("key", key), ("value", value))
    paging.check_cache("key", key, batch, block_table, layout_kv, "layout_kv")
    _check_companion("value", value, key, None)
    groups = key.shape[2]
    if groups == 0 or heads % groups:
        raise OperatorError(f"{groups} key heads do not divide {heads} query heads")
    if attention_mode == ABSORBED and groups != 1:
        raise OperatorError(f"attention_mode 2 has one key head, not {groups}")
    if key.shape[3] != width:
        raise OperatorError(f"key has {key.shape[3]} features, query {width}")
    _check_indices(sparse_indices, query)
    if query_rope is not None and key_rope is not None:
        check_floats(("query", query), ("query_rope", query_rope), ("key_rope", key_rope))
        _check_companion("query_rope", query_rope, query, None)
        _check_companion("key_rope", key_rope, key, query_rope.shape[3])
    elif query_rope is not key_rope:
        raise OperatorError("query_rope and key_rope come together or not at all")


def _check_indices(sparse_indices: torch.Tensor, query: torch.Tensor) -> None:
    check_integers("sparse_indices", sparse_indices)
    expected = (*query.shape[:2], 1)
    if sparse_indices.dim() != 4 or sparse_indices.shape[:3] != expected:
        raise OperatorError(f"sparse_indices must have shape {[*expected, 'K']}, not {list(sparse_indices.shape)}")
    if sparse_indices.device != query.device:
        raise OperatorError(f"sparse_indices is on {sparse_indices.device}, query on {query.device}")


def _check_companion(name: str, tensor: torch.Tensor, other: torch.Tensor, width: int | None) -> None:
    """Demand the first three sizes of `other`, and `width` numbers when that is given."""
    if tensor.dim() != 4 or tensor.shape[:3] != other.shape[:3] or width not in (None, tensor.shape[3]):
        expected = [*other.shape[:3], "any" if width is None else width]
        raise OperatorError(f"{name} must have shape {expected}, not {list(tensor.shape)}")


def check_floats(*named: tuple[str, torch.Tensor]) -> None:
    """Demand floating point of 16 bits and up, and for all the device of the first one."""
    first, anchor = named[0]
    for name, tensor in named:
        if tensor.dtype not in FLOATS:
            raise OperatorError(f"{name} must be floating point (16 bits and up), not {tensor.dtype}")
        if tensor.device != anchor.device:
            raise OperatorError(f"{name} is on {tensor.device}, {first} on {anchor.device}")


def check_shape(name: str, tensor: torch.Tensor, expected: tuple[int, ...]) -> None:
    """Demand exactly these sizes."""
    if tensor.shape != expected:
        raise OperatorError(f"{name} must have shape {list(expected)}, not {list(tensor.shape)}")


def check_word(name: str, word: str, allowed: tuple[str, ...]) -> None:
    """Demand one of the allowed words."""
    if word not in allowed:
        raise OperatorError(f"{name} must be {' or '.join(map(repr, allowed))}, not {word!r}")


def accumulation_dtype(*tensors: torch.Tensor | None) -> torch.dtype:
    """Dtype of sums, norms and softmax: float64 when a tensor has it, else float32 (K3.1 spec 2.19)."""
    wide = any(tensor is not None and tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if wide else torch.float32
