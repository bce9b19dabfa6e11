"""`k31::short_conv` by the C++ kernel: describe, call."""

from __future__ import annotations

from typing import Any

import torch

from k31compile.kernels.arguments import taking
from k31compile.kernels.cpu import calls, loader
from k31compile.kernels.registry import Provider
from k31compile.kernels.short_conv_arguments import ShortConv

_MOST_TAPS = 64  # the scratch of a thread grows with them


def short_conv_provider(variant: str = "fast") -> Provider:
    """The provider that runs one build variant of the kernel."""

    @taking(ShortConv)
    def run(call: ShortConv) -> tuple[torch.Tensor, torch.Tensor]:
        result, state = call.new_results()
        lengths = calls.integers(call.actual_seq_lengths)
        arguments = calls.ShortConvCall(
            calls.operand(call.x),
            calls.operand(call.weight[None]),
            calls.operand(None if call.bias is None else call.bias[None, None]),
            calls.operand(call.state),
            0 if lengths is None else lengths.data_ptr(),
            *call.x.shape,
            call.weight.shape[1],
            calls.ACTIVATIONS[call.activation],
            torch.get_num_threads(),
            result.data_ptr(),
            state.data_ptr(),
            calls.DTYPES[state.dtype],
        )
        loader.call(variant, "k31_short_conv", arguments, 0)
        return result, state

    return Provider(f"cpu-{variant}", lambda: loader.available(variant), run, _declines)


def _declines(
    x: torch.Tensor,
    weight: torch.Tensor,
    *_args: Any,
    bias: torch.Tensor | None = None,
    state: torch.Tensor | None = None,
    **_kwargs: Any,
) -> str | None:
    return too_many_taps(weight) or calls.unread(x=x, weight=weight, bias=bias, state=state)


def too_many_taps(weight: torch.Tensor) -> str | None:
    """Why the kernels do not take a weight [C, W]; None when they do."""
    if weight.dim() == 2 and weight.shape[1] > _MOST_TAPS:
        return f"weight has {weight.shape[1]} taps; the kernel takes up to {_MOST_TAPS}"
    return None
