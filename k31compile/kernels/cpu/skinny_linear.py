"""`k31::skinny_linear` by the C++ kernel: describe, call."""

from __future__ import annotations

import torch

from k31compile.kernels.arguments import taking
from k31compile.kernels.cpu import calls, loader
from k31compile.kernels.registry import Provider
from k31compile.kernels.skinny_linear_arguments import SkinnyLinear

MOST_ROWS = 8  # of x, where the weight is not packed (as in cpu/skinny_linear_call.h)


def skinny_linear_provider(variant: str = "fast") -> Provider:
    """The provider that runs one build variant of the kernel."""

    @taking(SkinnyLinear)
    def run(call: SkinnyLinear) -> torch.Tensor:
        result = call.new_result()
        if result.numel() == 0:
            return result
        depth = call.x.shape[-1]
        if depth == 0:
            return result.zero_() if call.bias is None else result.copy_(call.bias)
        x, weight = calls.readable(call.x.reshape(-1, depth)), call.weight
        arguments = calls.SkinnyCall(
            calls.plane(x),
            calls.plane(weight),
            calls.Operand() if call.bias is None else calls.number_operand(call.bias),
            x.shape[0],
            weight.shape[0],
            depth,
            torch.get_num_threads(),
            result.data_ptr(),
        )
        loader.call(variant, "k31_skinny_linear", arguments, 0)
        return result

    return Provider(f"cpu-{variant}", lambda: loader.available(variant), run, _declines)


def _declines(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> str | None:
    for name, tensor in (("x", x), ("weight", weight)):
        if tensor.dtype not in calls.DTYPES:
            return f"{name} is {tensor.dtype}; the kernel multiplies float32 and bfloat16"
    if x.dtype != weight.dtype:
        return f"x is {x.dtype} and weight {weight.dtype}; the kernel multiplies equal ones"
    if weight.stride(-1) != 1 and weight.shape[-1] != 1:
        return "weight has gaps between the numbers of a row"
    return calls.unread(bias=bias)
