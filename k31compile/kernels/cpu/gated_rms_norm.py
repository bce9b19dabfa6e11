"""`k31::gated_rms_norm` by the C++ kernel: describe, call."""

from __future__ import annotations

from typing import Any

import torch

from k31compile.kernels.arguments import taking
from k31compile.kernels.cpu import calls, loader
from k31compile.kernels.gated_rms_norm_arguments import GatedRMSNorm
from k31compile.kernels.registry import Provider

_MOST_DIMENSIONS = 4


def gated_rms_norm_provider(variant: str = "fast") -> Provider:
    """The provider that runs one build variant of the kernel."""

    @taking(GatedRMSNorm)
    def run(call: GatedRMSNorm) -> torch.Tensor:
        result = call.new_result()
        if result.numel() == 0:
            return result
        x, gate, weight = (calls.readable(_flattened(tensor)) for tensor in (call.x, call.gate, call.weight))
        arguments = calls.GatedRmsNormCall(
            calls.row_operand(x),
            calls.row_operand(gate),
            calls.row_operand(weight),
            *(1, 1, 1, *x.shape)[-_MOST_DIMENSIONS:],
            calls.ACTIVATIONS[call.activation],
            not call.norm_before_gate,
            calls.WEIGHT_CASTS[call.weight_cast],
            call.eps,
            torch.get_num_threads(),
            result.data_ptr(),
            calls.DTYPES[result.dtype],
        )
        loader.call(variant, "k31_gated_rms_norm", arguments, 0)
        return result

    return Provider(f"cpu-{variant}", lambda: loader.available(variant), run, _declines)


def _flattened(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with its leading dimensions as one, where there are more than the kernel has strides for."""
    return tensor.flatten(0, -_MOST_DIMENSIONS) if tensor.dim() > _MOST_DIMENSIONS else tensor


def _declines(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    *_args: Any,
    dtype: torch.dtype | None = None,
    **_kwargs: Any,
) -> str | None:
    if dtype not in (None, *calls.DTYPES):
        return f"the result is {dtype}; the kernel writes float32 and bfloat16"
    return calls.unread(x=x, gate=gate, weight=weight)
