"""``k31::skinny_linear``: a linear layer of a few rows, as a decode step has it, that reads its weight where it lies.

result = x @ weight.T + bias, summed in float32 and rounded once
"""

from __future__ import annotations

import torch
from torch.nn import functional

from k31compile.kernels.arguments import taking
from k31compile.kernels.checks import accumulation_dtype
from k31compile.kernels.cpu.skinny_linear import skinny_linear_provider
from k31compile.kernels.library import register_operator
from k31compile.kernels.registry import Provider
from k31compile.kernels.skinny_linear_arguments import SkinnyLinear

SCHEMA = "skinny_linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor"


@taking(SkinnyLinear, sizes=False)
def skinny_linear_fake(call: SkinnyLinear) -> torch.Tensor:
    """Shape and dtype of the result; sizes may be symbolic and stay so."""
    return call.new_result()


@taking(SkinnyLinear)
def skinny_linear_reference(call: SkinnyLinear) -> torch.Tensor:
    """Multiply and add; the definition of the operator (arguments: see `SkinnyLinear`).

    Products, sums and bias are float32 (float64 for float64 tensors), and one rounding follows.

    Returns [..., N] in the dtype of x. Raises OperatorError on anything outside this contract.
    """
    wide = accumulation_dtype(call.x, call.weight, call.bias)
    bias = None if call.bias is None else call.bias.to(wide)
    with torch.autocast(call.x.device.type, enabled=False):
        result = functional.linear(call.x.to(wide), call.weight.to(wide), bias)
    return call.new_result().copy_(result)


@taking(SkinnyLinear)
def _by_torch(call: SkinnyLinear) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        return functional.linear(call.x, call.weight, call.bias).contiguous()


def _mixes_dtypes(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> str | None:
    if bias is None or bias.dtype == x.dtype:
        return None
    return f"bias is {bias.dtype} and x {x.dtype}: torch adds equal ones only"


OPERATOR = register_operator(
    SCHEMA,
    fake=skinny_linear_fake,
    reference=skinny_linear_reference,
    # Torch before the definition: this would widen the weight on every call.
    providers=(
        skinny_linear_provider(),
        Provider("torch", lambda: (True, "torch's own linear layer"), _by_torch, _mixes_dtypes),
    ),
    is_for_cpu=True,
)
