"""Arguments of ``k31::skinny_linear``: names, checks, and the tensor that holds its result."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from k31compile.errors import OperatorError
from k31compile.kernels.checks import check_floats, check_shape


@dataclass(slots=True, eq=False)
class SkinnyLinear:
    """A linear layer.

    Args:
        x: [..., K], any number of rows; a few are what the kernel is for.
        weight: [N, K], in the dtype of x.
        bias: [N] of any float dtype, or none.
    """

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None = None

    def check_words(self) -> None:
        """Check ranks."""
        if self.x.dim() < 1:
            raise OperatorError("x must be [..., K], not a single number")
        if self.weight.dim() != 2:
            raise OperatorError(f"weight must be [N, K], not {list(self.weight.shape)}")

    def check(self) -> None:
        """Check dtypes, devices and sizes."""
        named = () if self.bias is None else (("bias", self.bias),)
        check_floats(("x", self.x), ("weight", self.weight), *named)
        if self.weight.dtype != self.x.dtype:
            raise OperatorError(f"weight is {self.weight.dtype}, x {self.x.dtype}: they must be one")
        check_shape("weight", self.weight, (self.weight.shape[0], self.x.shape[-1]))
        if self.bias is not None:
            check_shape("bias", self.bias, (self.weight.shape[0],))

    def new_result(self) -> torch.Tensor:
        """The result's shape and dtype."""
        return self.x.new_empty((*self.x.shape[:-1], self.weight.shape[0]))
