"""What the delta-rule operators demand of their tensors, and the sizes and dtypes that follow from them."""

from __future__ import annotations

import torch

from k31compile.errors import OperatorError
from k31compile.kernels.checks import check_floats, check_shape
from k31compile.kernels.visibility import check_integers

KEY_FIRST = "KV"
VALUE_FIRST = "VK"


def check_ranks(query: torch.Tensor, value: torch.Tensor, gate: torch.Tensor, state_layout: str) -> None:
    """Check what can be told without sizes: ranks, and the word for the state's layout."""
    for name, tensor, meaning in (("query", query, "K"), ("value", value, "V"), ("gate", gate, "K")):
        if tensor.dim() != 4:
            raise OperatorError(f"{name} must be [B, T, H, {meaning}], not {list(tensor.shape)}")
    if state_layout not in (KEY_FIRST, VALUE_FIRST):
        raise OperatorError(f"state_layout must be 'KV' or 'VK', not {state_layout!r}")


def check_scalar_gate(gate: torch.Tensor) -> None:
    """Check the rank of a gate that has one number for all channels of a head."""
    if gate.dim() != 3:
        raise OperatorError(f"gate must be [B, T, H], not {list(gate.shape)}")


def check_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    gate: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    state_layout: str,
) -> None:
    """Check the tensors of a delta-rule operator against each other, the sequences' limits included."""
    check_ranks(query, value, gate, state_layout)
    named = [("query", query), ("key", key), ("value", value), ("gate", gate), ("beta", beta)]
    check_floats(*named)
    rows = tuple(query.shape[:3])
    check_shape("key", key, tuple(query.shape))
    check_shape("value", value, (*rows, value.shape[3]))
    if tuple(gate.shape[:3]) != rows:  # its last size may be ours, repeated from one number a head
        raise OperatorError(f"gate must begin with [B, T, H] = {list(rows)}, not {list(gate.shape[:3])}")
    check_shape("gate", gate, tuple(query.shape))
    check_shape("beta", beta, rows)
    if cu_seqlens is not None:
        _check_limits(cu_seqlens, rows[0], rows[1])
    if initial_state is not None:
        check_floats(("query", query), ("initial_state", initial_state))
        check_shape("initial_state", initial_state, state_shape(query, value, cu_seqlens, state_layout))


def state_shape(
    query: torch.Tensor, value: torch.Tensor, cu_seqlens: torch.Tensor | None, state_layout: str
) -> tuple[int, int, int, int]:
    """Sizes of the states: [B or N, H, K, V], the last two exchanged in layout 'VK'."""
    sequences = query.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    width, depth = query.shape[3], value.shape[3]
    inner = (width, depth) if state_layout == KEY_FIRST else (depth, width)
    return (sequences, query.shape[2], *inner)


def _check_limits(cu_seqlens: torch.Tensor, batch: int, tokens: int) -> None:
    check_integers("cu_seqlens", cu_seqlens)
    if cu_seqlens.dim() != 1 or not cu_seqlens.numel():
        raise OperatorError(f"cu_seqlens must have shape [N + 1], not {list(cu_seqlens.shape)}")
    if batch != 1:
        raise OperatorError(f"cu_seqlens divides one row of tokens, but the batch is {batch}")
    limits = cu_seqlens.tolist()
    if limits[0] != 0 or limits[-1] != tokens or limits != sorted(limits):
        raise OperatorError(f"cu_seqlens must ascend from 0 to {tokens}, not {limits}")
