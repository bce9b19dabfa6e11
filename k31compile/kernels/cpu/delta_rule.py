"""The delta-rule operators by the C++ kernel: check, describe, call."""

from __future__ import annotations

import math
from typing import Any

import torch

from k31compile.kernels.checks import check_shape
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


def recurrent_in_place_provider(variant: str = "fast") -> Provider:
    """The provider of kda_recurrent_ that runs one build variant of the kernel."""

    def run(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        gate: torch.Tensor,
        beta: torch.Tensor,
        state: torch.Tensor,
        *,
        rows: torch.Tensor | None = None,
        scale: float = 1.0,
        state_layout: str = "KV",
    ) -> torch.Tensor:
        check_delta_rule(query, key, value, gate, beta, None, None, state_layout)
        shape = state_shape(query, value, None, state_layout)
        check_shape("state", state, shape if rows is None else (state.shape[0], *shape[1:]))
        # Held until the call returns: the kernel gets addresses.
        places = calls.places(rows, shape[0], state.shape[0])
        output = torch.empty(value.shape, dtype=torch.float32, device=query.device)
        where = (output.data_ptr(), 0, 0 if places is None else places.data_ptr())
        _call(variant, (query, key, value, gate, beta), state, None, (scale, state_layout), where, by_chunk=False)
        return output

    def declines(*args: torch.Tensor, rows: torch.Tensor | None = None, **options: Any) -> str | None:
        return not_written(args[5], rows) or _declines(*args, **options)

    return Provider(f"cpu-{variant}", lambda: loader.available(variant), run, declines)


def not_written(state: torch.Tensor, rows: torch.Tensor | None) -> str | None:
    """Why the kernels do not write into states [R, H, row, number] where they lie; None when they do."""
    if state.dtype != torch.float32:
        return f"state is {state.dtype}; the kernel writes float32"
    if calls.readable(state) is not state or 0 in state.stride():
        return "the numbers of state do not lie side by side, each in its own place"
    return "rows names one state twice" if calls.is_repeated(rows, state.shape[0]) else None


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
    where = (output.data_ptr(), last.data_ptr(), 0)
    _call(variant, operands, initial_state, cu_seqlens, (scale, state_layout), where, by_chunk=by_chunk)
    return output, last


def _call(
    variant: str,
    operands: tuple[torch.Tensor, ...],
    state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    rule: tuple[float, str],
    where: tuple[int, int, int],
    *,
    by_chunk: bool,
) -> None:
    """Run the kernel on checked tensors; `rule` is scale and layout, `where` the addresses of output, last, places."""
    query, key, value = (calls.readable(x) for x in operands[:3])
    gate, beta = operands[3:]
    scale, state_layout = rule
    scalar_gate = gate.stride(-1) == 0
    gate = gate if scalar_gate else calls.readable(gate)
    # Held until the call returns: the kernel gets addresses.
    limits = calls.integers(cu_seqlens)
    state = None if state is None else calls.readable(state)
    arguments = calls.DeltaCall(
        *(calls.operand(x) for x in (query, key, value, gate, beta)),
        calls.operand(None if state is None else state.transpose(1, 2)),
        0 if limits is None else limits.data_ptr(),
        query.shape[0] if limits is None else limits.numel() - 1,
        *query.shape[1:],
        value.shape[3],
        scalar_gate,
        state_layout == VALUE_FIRST,
        by_chunk,
        scale,
        torch.get_num_threads(),
        *where,
    )
    loader.call(variant, "k31_delta_rule", arguments, 0)


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
