"""`k31::packed_linear`: a linear layer that is given its weight and reads a packed copy of it."""

import torch
from torch import Tensor

from k31compile.kernels.library import LIBRARY
from k31compile.targets.packed_weights import PACKED, packed_dtype


def packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """x [..., K] times a weight [N, K], or [K, N] if `transposed`, plus bias: [..., N] in the dtype of x."""
    matrix = None if _is_faster_plain(x, weight) else PACKED.matrix(weight, transposed)
    if matrix is None:
        return torch.nn.functional.linear(x, weight.t() if transposed else weight, bias)
    dtype = matrix.dtype
    added = None if bias is None else bias.to(dtype)
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x.to(dtype), matrix, added, "none", [], "")
    return result.to(x.dtype)


def _is_faster_plain(x: Tensor, weight: Tensor) -> bool:
    """One row times a float32 copy took longer than one row times the weight itself, see docs/performance.md."""
    return x.numel() == x.shape[-1] and packed_dtype(weight.dtype) == torch.float32


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[1 if transposed else 0]))


LIBRARY.define(
    "packed_linear(Tensor x, Tensor weight, Tensor? bias, bool transposed) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
torch.library.register_fake("k31::packed_linear", _fake, lib=LIBRARY)
LIBRARY.impl("packed_linear", packed_linear, "CPU")

PACKED_LINEAR = torch.ops.k31.packed_linear.default
