"""`k31::mega_kda` by the C++ kernel: describe, call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from k31compile.kernels.arguments import taking
from k31compile.kernels.cpu import calls, loader
from k31compile.kernels.cpu.delta_rule import beyond_scratch, not_written
from k31compile.kernels.cpu.short_conv import too_many_taps
from k31compile.kernels.delta_checks import VALUE_FIRST
from k31compile.kernels.mega_kda_arguments import MegaKda, Results
from k31compile.kernels.registry import Provider


def mega_kda_provider(variant: str = "fast") -> Provider:
    """The provider that runs one build variant of the kernel."""

    @taking(MegaKda)
    def run(call: MegaKda) -> Results:
        result, kept, last = call.new_results()
        _call(variant, call, result, kept, last.data_ptr(), 0)
        return result, kept, last

    return Provider(f"cpu-{variant}", lambda: loader.available(variant), run, _declines)


def mega_kda_in_place_provider(variant: str = "fast") -> Provider:
    """The provider of mega_kda_ that runs one build variant of the kernel."""

    def run(*args: Any, rows: torch.Tensor | None = None, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        call = MegaKda(*args, **options)
        call.check_words()
        call.check(None if rows is None else call.state.shape[0])
        # Held until the call returns: the kernel gets addresses.
        places = calls.places(rows, call.raw_gate.shape[0], call.state.shape[0])
        result, kept = call.new_outputs()
        _call(variant, call, result, kept, 0, 0 if places is None else places.data_ptr())
        return result, kept

    def declines(*args: Any, rows: torch.Tensor | None = None, **options: Any) -> str | None:
        return not_written(args[7], rows) or _declines(*args, **options)

    return Provider(f"cpu-{variant}", lambda: loader.available(variant), run, declines)


def _call(variant: str, call: MegaKda, result: torch.Tensor, kept: torch.Tensor, last: int, places: int) -> None:
    """Run the kernel on checked arguments; `last` and `places` are addresses, 0 for in place and for no places."""
    batch, tokens, heads, width = call.raw_gate.shape
    depth = call.out_gate.shape[3]
    # Held until the call returns: the kernel gets addresses.
    raw_gate, state, out_gate = (calls.readable(x) for x in (call.raw_gate, call.state, call.out_gate))
    norm_weight = calls.readable(call.norm_weight)
    dt_bias = None if call.dt_bias is None else calls.readable(call.dt_bias)
    arguments = calls.MegaKdaCall(
        _streams(call.x, 2, (heads, width, depth)),
        _streams([weight[None] for weight in call.conv_weight], 1, (heads, width, depth)),
        _streams(call.conv_state, 2, (heads, width, depth)),
        calls.operand(raw_gate),
        calls.number_operand(call.a_log),
        calls.row_operand(dt_bias),
        calls.operand(call.raw_beta),
        calls.operand(state.transpose(1, 2)),
        calls.operand(out_gate),
        calls.row_operand(norm_weight),
        *(batch, tokens, heads, width, depth, call.conv_weight[0].shape[1]),
        call.lower_bound is None,
        call.state_layout == VALUE_FIRST,
        *(calls.DTYPES[dtype or torch.float32] for dtype in (call.beta_dtype, call.core_dtype)),
        calls.ACTIVATIONS[call.norm_activation],
        not call.norm_before_gate,
        calls.WEIGHT_CASTS[call.weight_cast],
        *(call.lower_bound or 0.0, call.l2_eps, call.beta_factor, call.scale, call.norm_eps),
        torch.get_num_threads(),
        result.data_ptr(),
        calls.DTYPES[result.dtype],
        kept.data_ptr(),
        calls.DTYPES[kept.dtype],
        last,
        places,
    )
    loader.call(variant, "k31_mega_kda", arguments, 0)


def _streams(tensors: Sequence[torch.Tensor] | None, dim: int, sizes: tuple[int, int, int]) -> Any:
    """Where the channels of query, key and value lie, be they in one tensor or in three."""
    if tensors is None:
        return (calls.Operand * 3)()
    heads, width, depth = sizes
    if len(tensors) == 1:
        tensors = tensors[0].split([heads * width, heads * width, heads * depth], dim)
    return (calls.Operand * 3)(*(calls.operand(tensor) for tensor in tensors))


def _declines(
    x: Sequence[torch.Tensor],
    conv_weight: Sequence[torch.Tensor],
    conv_state: Sequence[torch.Tensor] | None = None,
    raw_gate: torch.Tensor | None = None,
    a_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    raw_beta: torch.Tensor | None = None,
    state: torch.Tensor | None = None,
    out_gate: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    **options: Any,
) -> str | None:
    for name, tensors in (("x", x), ("conv_weight", conv_weight), ("conv_state", conv_state)):
        for tensor in () if tensors is None else tensors:
            if unread := calls.unread(**{name: tensor}):
                return unread
    named = {"raw_gate": raw_gate, "a_log": a_log, "dt_bias": dt_bias, "raw_beta": raw_beta, "state": state}
    for name in ("beta_dtype", "core_dtype", "dtype"):
        if options.get(name) not in (None, *calls.DTYPES):
            return f"{name} is {options[name]}; the kernel rounds to float32 and bfloat16"
    unread = calls.unread(**named, out_gate=out_gate, norm_weight=norm_weight)
    if unread or state is None or state.dim() != 4:
        return unread
    return beyond_scratch(*state.shape[2:]) or too_many_taps(conv_weight[0])
