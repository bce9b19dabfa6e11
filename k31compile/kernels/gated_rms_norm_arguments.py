"""Arguments of ``k31::gated_rms_norm``: names, defaults, checks, and the tensor that holds its result."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import torch

from k31compile.errors import OperatorError
from k31compile.kernels.checks import FLOATS, check_floats, check_shape, check_word


@dataclass(slots=True, eq=False)
class GatedRMSNorm:
    """An RMS norm over the last axis and a gate (K3.1 spec 2.3, 3.8).

    Args:
        x: [..., D]; gate: of the same shape; weight: [D], or [G, D] where the axis before the last one has size G
            and each of its groups is normalised by itself. Any mix of float dtypes.
        eps: added to the mean of the squares.
        activation: of the gate, "sigmoid" or "silu".
        norm_before_gate: norm(x) * act(gate), else norm(x * act(gate)).
        weight_cast: where the roundings to the dtype of x fall; see `gated_rms_norm_reference`.
        dtype: of the result; that of x without one.
    """

    x: torch.Tensor
    gate: torch.Tensor
    weight: torch.Tensor
    _: KW_ONLY
    eps: float
    activation: str = "sigmoid"
    norm_before_gate: bool = True
    weight_cast: str = "before"
    dtype: torch.dtype | None = None

    def check_words(self) -> None:
        """Check the words, and that they fit each other."""
        check_word("activation", self.activation, ("sigmoid", "silu"))
        check_word("weight_cast", self.weight_cast, ("before", "after", "between"))
        if self.weight_cast == "between" and not self.norm_before_gate:
            raise OperatorError("weight_cast='between' rounds between norm and gate: it needs norm_before_gate=True")
        if self.dtype not in (None, *FLOATS):
            raise OperatorError(f"dtype must be floating point (16 bits and up), not {self.dtype}")
        if self.x.dim() < 1:
            raise OperatorError("x must be [..., D], not a single number")

    def check(self) -> None:
        """Check dtypes, devices and sizes."""
        check_floats(("x", self.x), ("gate", self.gate), ("weight", self.weight))
        check_shape("gate", self.gate, tuple(self.x.shape))
        if self.weight.dim() not in (1, 2):
            raise OperatorError(f"weight must be [D] or [G, D], not {list(self.weight.shape)}")
        check_shape("weight", self.weight, tuple(self.x.shape[-self.weight.dim() :]))

    @property
    def result_dtype(self) -> torch.dtype:
        """Dtype of the result."""
        return self.x.dtype if self.dtype is None else self.dtype

    def new_result(self) -> torch.Tensor:
        """The result's shape and dtype."""
        return self.x.new_empty(self.x.shape, dtype=self.result_dtype)
