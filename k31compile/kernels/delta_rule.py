"""The gated delta rule in plain torch, token by token and chunk by chunk (K3.1 spec 2.4 and 2.5).

Both take query, key [B, T, H, K], value [B, T, H, V], log decay [B, T, H, K], beta [B, T, H] and a state
[B, H, K, V], all of one dtype, and return the output [B, T, H, V] and the last state.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch

from k31compile.kernels.checks import accumulation_dtype
from k31compile.kernels.delta_checks import VALUE_FIRST, check_delta_rule, state_shape

_CHUNK = 16
_BLOCK_ELEMENTS = 1 << 22

Form = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def by_token(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    gate: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decay, predict, write, read: one token after the other."""
    output = torch.empty_like(value)
    for t in range(query.shape[1]):
        state = gate[:, t].exp()[..., None] * state
        predicted = _read(state, key[:, t])
        update = beta[:, t, :, None] * (value[:, t] - predicted)
        state = state + key[:, t, :, :, None] * update[:, :, None, :]
        output[:, t] = _read(state, query[:, t])
    return output, state


def by_chunk(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    gate: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same function; only the state passes from one chunk to the next."""
    output = torch.empty_like(value)
    # The pairwise decays are the large intermediate: heads are taken in groups that bound it.
    batch, _, heads, width = query.shape
    step = max(1, _BLOCK_ELEMENTS // max(1, batch * _CHUNK * _CHUNK * width))
    last = torch.empty_like(state)
    for first in range(0, heads, step):
        group = slice(first, first + step)
        carried = state[:, group]
        for start in range(0, query.shape[1], _CHUNK):
            block = (slice(None), slice(start, start + _CHUNK), group)
            operands = (x[block].transpose(1, 2) for x in (query, key, value, gate, beta))
            read, carried = _advance(carried, *operands)
            output[block] = read.transpose(1, 2)
        last[:, group] = carried
    return output, last


def _advance(
    state: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    gate: torch.Tensor,
    beta: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One chunk, heads first: state [B, H, K, V], query, key, gate [B, H, C, K], value [B, H, C, V], beta [B, H, C].

    Every decay is the exponential of a sum of gates, never of a difference of two sums: a gate of -inf forgets its
    channel and no more.
    """
    between, from_start = _decay_between(gate), gate.cumsum(-2).exp()
    decayed = between * key[:, :, None]
    overlap, readout = (decayed @ torch.stack((key, query), -1)).unbind(-1)
    # (I + strict_lower(beta * overlap)) update = beta * (value - what the old state predicts)
    predicted = (from_start * key) @ state
    right = beta[..., None] * (value - predicted)
    lower = (beta[..., None] * overlap).tril(-1)
    update = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)
    output = (from_start * query) @ state + readout.tril() @ update
    return output, from_start[..., -1, :, None] * state + decayed[:, :, -1].mT @ update


def _decay_between(gate: torch.Tensor) -> torch.Tensor:
    """exp of the sum of the gates after token j up to token i, 0 where i < j: [..., C, K] -> [..., C, C, K]."""
    count = gate.shape[-2]
    later = torch.ones(count, count, dtype=torch.bool, device=gate.device).tril(-1)[..., None]
    summed = gate[..., :, None, :].masked_fill(~later, 0).cumsum(-3)
    return summed.masked_fill(later.transpose(0, 1), -torch.inf).exp()


def _read(state: torch.Tensor, address: torch.Tensor) -> torch.Tensor:
    """state^T address: [B, H, K, V], [B, H, K] -> [B, H, V]."""
    return (address[..., None, :] @ state)[..., 0, :]


def run_form(
    form: Form,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    gate: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    scale: float,
    state_layout: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Check, convert to the accumulation dtype, run one form on every sequence, and scale what was read."""
    check_delta_rule(query, key, value, gate, beta, initial_state, cu_seqlens, state_layout)
    operands = (query, key, value, gate, beta)
    dtype = accumulation_dtype(*operands, initial_state)
    shape = state_shape(query, value, cu_seqlens, state_layout)
    if initial_state is None:
        initial_state = torch.zeros(shape, dtype=dtype, device=query.device)
    last = torch.empty(shape, dtype=dtype, device=query.device)
    first_state, last_state = (x.mT if state_layout == VALUE_FIRST else x for x in (initial_state.to(dtype), last))
    converted = [x.to(dtype) for x in operands]
    with torch.autocast(query.device.type, enabled=False):
        if cu_seqlens is None:
            output, last_state[:] = form(*converted, first_state)
        else:
            output = torch.empty(value.shape, dtype=dtype, device=query.device)
            limits = cu_seqlens.tolist()
            for n, (start, end) in enumerate(pairwise(limits)):
                pieces = [x[:, start:end] for x in converted]
                output[:, start:end], last_state[n : n + 1] = form(*pieces, first_state[n : n + 1])
    return (output * scale).contiguous(), last
