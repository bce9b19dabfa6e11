"""The delta-rule operators by the C++ kernel: check, describe, call."""

from __future__ import annotations

import math

import torch

from k31compile.kernels.cpu import calls, loader
from k31compile.kernels.delta_checks import VALUE_FIRST, check_delta_rule, state_shape
from k31compile.kernels.registry import Provider

# A thread holds one head's state and sixteen of its keys and values in scratch, in less than 2 MiB.
_STATE_LIMIT = 1 << 18
_SIDE_LIMIT = 1 << 10


def recurrent_provider(variant: str = "fast") -> Provider:
    """The provider of kda_recurrent that runs one build variant of the kernel."""

    def run(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        gate: torch.Tensor,
        beta: torch.Tensor,
        initial_state: torch.Tensor,
        *,
        scale: float = 1.0,
        state_layout: str = "KV",
    ) -> tuple[torch.Tensor, torch.Tensor]:
        operands = (query, key, value, gate, beta)
        return _run(variant, operands, initial_state, None, scale, state_layout, by_chunk=False)

    return Provider(f"cpu-{variant}", lambda: loader.available(variant), run, _declines)


def chunk_provider(variant: str = "fast") -> Provider:
    """The provider of kda_chunk that runs one build variant of the kernel."""

    def run(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        gate: torch.Tensor,
        beta: torch.Tensor,
        initial_state: torch.Tensor | None = None,
        *,
        cu_seqlens: torch.Tensor | None = None,
        scale: float = 1.0,
        state_layout: str = "KV",
    ) -> tuple[torch.Tensor, torch.Tensor]:
        operands = (query, key, value, gate, beta)
        return _run(variant, operands, initial_state, cu_seqlens, scale, state_layout, by_chunk=True)

    return Provider(f"cpu-{variant}", lambda: loader.available(variant), run, _declines)


def _run(
    variant: str,
    operands: tuple[torch.Tensor, ...],
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    scale: float,
    state_layout: str,
    *,
    by_chunk: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    query, key, value, gate, beta = operands
    check_delta_rule(query, key, value, gate, beta, initial_state, cu_seqlens, state_layout)
    output = torch.empty(value.shape, dtype=torch.float32, device=query.device)
    shape = state_shape(query, value, cu_seqlens, state_layout)
    last = torch.empty(shape, dtype=torch.float32, device=query.device)
    query, key, value = calls.readable(query), calls.readable(key), calls.readable(value)
    scalar_gate = gate.stride(-1) == 0
    gate = gate if scalar_gate else calls.readable(gate)
    # Held until the call returns: the kernel gets addresses.
    limits = calls.integers(cu_seqlens)
    state = None if initial_state is None else calls.readable(initial_state)
    arguments = calls.DeltaCall(
        *(calls.operand(x) for x in (query, key, value, gate, beta)),
        calls.operand(None if state is None else state.transpose(1, 2)),
        0 if limits is None else limits.data_ptr(),
        shape[0],
        *query.shape[1:],
        value.shape[3],
        scalar_gate,
        state_layout == VALUE_FIRST,
        by_chunk,
        scale,
        torch.get_num_threads(),
        output.data_ptr(),
        last.data_ptr(),
    )
    loader.call(variant, "k31_delta_rule", arguments, 0)
    return output, last


def _declines(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    gate: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    **_options: object,
) -> str | None:
    named = {"query": query, "key": key, "value": value, "gate": gate, "beta": beta, "initial_state": initial_state}
    for name, tensor in named.items():
        if tensor is not None and tensor.dtype not in calls.DTYPES:
            return f"{name} is {tensor.dtype}; the kernel reads float32 and bfloat16"
    return beyond_scratch(*key.shape[-1:], *value.shape[-1:])


def beyond_scratch(*sides: int) -> str | None:
    """Why the kernels do not take a state of these sides, [K, V] or [V, K]; None when they do."""
    if math.prod(sides) > _STATE_LIMIT or any(side > _SIDE_LIMIT for side in sides):
        return f"a head's state of {' x '.join(map(str, sides))} does not fit the kernel's scratch"
    return None
