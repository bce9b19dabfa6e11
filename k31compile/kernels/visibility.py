"""Which cache positions a query row may see: shared by the indexer and the sparse attention (K3.1 spec 2.8, 2.9).

Position s of request b is visible to row i when s < visible(b, i), with len_b the request's length in the cache and
q_b its number of query rows:

    sparse_mode 0:  visible = len_b
    sparse_mode 3:  visible = len_b - q_b + 1 + i      (causal, aligned to the lower right corner)

A row i >= q_b is padding and sees nothing. Lengths of shape [B, T] give each row its own length (sparse_mode 0 only).

A mask, [B, T, S] or 1 for any of these, takes out more: as in torch's scaled_dot_product_attention a boolean one shows
a position where it is True and a float one is added to the score; there a number of at most -1e30 hides the position.
It is exact for any content, left-padded batches of unequal prompts among them. The operators of Ascend know lengths and
no mask: a target for them has to make of such a batch one first position and one length a request, or refuse the call.
"""

from __future__ import annotations

import torch

from k31compile.errors import OperatorError

FULL = 0
CAUSAL = 3
HIDES = -1e30
INTEGERS = frozenset((torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8))


def check_lengths(
    rows: tuple[int, int],
    lengths_query: torch.Tensor | None,
    lengths_key: torch.Tensor | None,
    sparse_mode: int,
) -> None:
    """Check mode, dtypes and shapes of the lengths against `rows` = (batch, query rows)."""
    if sparse_mode not in (FULL, CAUSAL):
        raise OperatorError(f"sparse_mode must be 0 or 3, not {sparse_mode}")
    if lengths_query is not None:
        check_integers("actual_seq_lengths_query", lengths_query)
        if lengths_query.shape != rows[:1]:
            raise OperatorError(
                f"actual_seq_lengths_query must have shape [{rows[0]}], not {list(lengths_query.shape)}"
            )
    if lengths_key is None:
        return
    check_integers("the key lengths", lengths_key)
    if lengths_key.shape not in (rows[:1], rows):
        expected = f"[{rows[0]}] or {list(rows)}"
        raise OperatorError(f"the key lengths must have shape {expected}, not {list(lengths_key.shape)}")
    if lengths_key.dim() == 2 and sparse_mode != FULL:
        raise OperatorError("key lengths of shape [B, T] already say what each row sees: use sparse_mode=0 with them")


def visible_lengths(
    rows: tuple[int, int],
    positions: int,
    lengths_query: torch.Tensor | None,
    lengths_key: torch.Tensor | None,
    sparse_mode: int,
    device: torch.device,
) -> torch.Tensor:
    """How many leading positions each row sees: int64 [B, T] in [0, positions].

    `rows` is (B, T), `positions` the size S of the cache; what exceeds the cache is clamped.
    """
    batch, count = rows
    if lengths_key is None:
        length = torch.full((batch, 1), positions, dtype=torch.int64, device=device)
    else:
        length = lengths_key.to(device=device, dtype=torch.int64)
        length = length[:, None] if length.dim() == 1 else length
    queries = torch.full((batch, 1), count, dtype=torch.int64, device=device)
    if lengths_query is not None:
        queries = lengths_query.to(device=device, dtype=torch.int64).clamp(0, count)[:, None]
    row = torch.arange(count, device=device)[None, :]
    # Clamped last: a padded chunk at the end of a cache has a length beyond it, and its first rows are real.
    visible = (length if sparse_mode == FULL else length - queries + 1 + row).clamp(0, positions)
    return torch.where(row < queries, visible, 0).contiguous()


def check_mask(mask: torch.Tensor | None, sizes: tuple[int, int, int], device: torch.device) -> None:
    """Check dtype, device and shape of a mask against `sizes` = (batch, query rows, positions)."""
    if mask is None:
        return
    if mask.dtype != torch.bool and not mask.dtype.is_floating_point:
        raise OperatorError(f"mask must be boolean or floating point, not {mask.dtype}")
    if mask.device != device:
        raise OperatorError(f"mask is on {mask.device}, query on {device}")
    if mask.dim() != 3 or any(size not in (1, full) for size, full in zip(mask.shape, sizes, strict=True)):
        raise OperatorError(f"mask must have shape {list(sizes)} or 1 for any of these, not {list(mask.shape)}")


def masked_out(mask: torch.Tensor) -> torch.Tensor:
    """Where a mask, or a part of one, hides: boolean, in its shape."""
    if mask.dtype == torch.bool:
        return ~mask
    # Not in bfloat16, which would round the bound.
    return mask.to(torch.promote_types(mask.dtype, torch.float32)) <= HIDES


def check_integers(name: str, tensor: torch.Tensor) -> None:
    """Raise OperatorError unless a tensor holds integers of any width."""
    if tensor.dtype not in INTEGERS:
        raise OperatorError(f"{name} must hold integers, not {tensor.dtype}")
