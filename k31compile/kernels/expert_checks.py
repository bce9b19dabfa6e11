"""What the mixture-of-experts operators take: their options, and the checks of their tensors.

Each check raises OperatorError with the argument's name, what it is and what is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from k31compile.errors import OperatorError
from k31compile.kernels.checks import check_floats
from k31compile.kernels.visibility import check_integers

SOFTMAX, SIGMOID = 0, 1
GROUP_MAXIMUM, GROUP_TWO_BEST = 0, 1
SITU, SWIGLU = "situ", "swiglu"
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


class Gating(NamedTuple):
    """The options of moe_gating_top_k, with the defaults of its schema.

    bias: [E], added to the scores for the choice only.
    k_group of group_count: how many groups of E / group_count neighbours stay in the choice.
    group_select_mode: a group's value is its best choice (0) or the sum of its two best (1).
    group_fill: what the choice of an expert in any other group becomes; None for -inf. Some routers write 0.0,
        which lets such an expert win over a kept one below 0.
    renorm: divide the weights by their sum + eps.
    norm_type: scores are the softmax (0) or the sigmoid (1) of the logits.
    routed_scaling_factor: what the weights are multiplied by at the end.
    """

    bias: torch.Tensor | None = None
    k_group: int = 1
    group_count: int = 1
    group_select_mode: int = GROUP_TWO_BEST
    group_fill: float | None = None
    renorm: bool = True
    norm_type: int = SIGMOID
    routed_scaling_factor: float = 1.0
    eps: float = 1e-20

    @property
    def fill(self) -> float:
        """The number that `group_fill` stands for; a schema has no literal for -inf."""
        return -math.inf if self.group_fill is None else self.group_fill

    def check_words(self) -> None:
        """Check what chooses a variant."""
        if self.norm_type not in (SOFTMAX, SIGMOID):
            raise OperatorError(f"norm_type must be 0 (softmax) or 1 (sigmoid), not {self.norm_type}")
        if self.group_select_mode not in (GROUP_MAXIMUM, GROUP_TWO_BEST):
            raise OperatorError(f"group_select_mode must be 0 or 1, not {self.group_select_mode}")
        if self.group_count < 1:
            raise OperatorError(f"group_count must be at least 1, not {self.group_count}")
        if not 1 <= self.k_group <= self.group_count:
            raise OperatorError(f"k_group must be in [1, group_count = {self.group_count}], not {self.k_group}")

    def check(self, x: torch.Tensor, k: int) -> None:
        """Check logits [N, E] and the number of experts a row chooses, against these options."""
        self.check_words()
        check_rank("x", x, "[N, E]")
        experts = x.shape[1]
        check_floats(("x", x), *(() if self.bias is None else (("bias", self.bias),)))
        if self.bias is not None and self.bias.shape != (experts,):
            raise OperatorError(f"bias must have shape [{experts}], not {list(self.bias.shape)}")
        if not 0 <= k <= experts:
            raise OperatorError(f"k must be in [0, {experts}], the number of experts, not {k}")
        if experts % self.group_count:
            raise OperatorError(f"group_count {self.group_count} does not divide {experts} experts")
        size = experts // self.group_count
        if self.group_count > 1 and size <= self.group_select_mode:
            raise OperatorError(f"group_select_mode {self.group_select_mode} needs more experts a group than {size}")


class ExpertActivation(NamedTuple):
    """The options of grouped_experts, with the defaults of its schema.

    activation: "situ" (K3.1 spec 2.18) or "swiglu", silu(gate) * up.
    situ_beta, linear_beta: where SiTU saturates gate and up; linear_beta None leaves up as it is.
    """

    activation: str = SITU
    situ_beta: float = 4.0
    linear_beta: float | None = 25.0

    def check(self) -> None:
        """Check the word and the bounds."""
        if self.activation not in (SITU, SWIGLU):
            raise OperatorError(f"activation must be 'situ' or 'swiglu', not {self.activation!r}")
        if not self.situ_beta > 0:
            raise OperatorError(f"situ_beta must be above 0, is {self.situ_beta}")
        if self.linear_beta is not None and not self.linear_beta > 0:
            raise OperatorError(f"linear_beta must be None or above 0, is {self.linear_beta}")


def check_experts(
    x: torch.Tensor,
    expert_idx: torch.Tensor,
    weights: torch.Tensor,
    gate_proj: Sequence[torch.Tensor],
    up_proj: Sequence[torch.Tensor],
    down_proj: Sequence[torch.Tensor],
) -> None:
    """Check the tensors of grouped_experts against each other."""
    check_rank("x", x, "[N, L]")
    check_rank("expert_idx", expert_idx, "[N, k]")
    check_integers("expert_idx", expert_idx)
    if expert_idx.device != x.device:
        raise OperatorError(f"expert_idx is on {expert_idx.device}, x on {x.device}")
    if expert_idx.shape[0] != x.shape[0]:
        raise OperatorError(f"expert_idx must have shape [{x.shape[0]}, k], not {list(expert_idx.shape)}")
    if weights.shape != expert_idx.shape:
        raise OperatorError(f"weights must have shape {list(expert_idx.shape)}, not {list(weights.shape)}")
    check_floats(("x", x), ("weights", weights))
    experts = count_experts("gate_proj", gate_proj)
    inner = gate_proj[0].shape[-2]
    shapes = ((inner, x.shape[1]), (inner, x.shape[1]), (width_of(down_proj), inner))
    for name, matrices, shape in zip(PROJECTIONS, (gate_proj, up_proj, down_proj), shapes, strict=True):
        count = count_experts(name, matrices)
        if count != experts:
            raise OperatorError(f"{name} has {count} experts, gate_proj {experts}")
        for matrix in matrices:
            if matrix.shape[-2:] != shape:
                raise OperatorError(f"{name} must hold matrices {list(shape)}, not {list(matrix.shape[-2:])}")
        check_floats(("x", x), *((name, matrix) for matrix in matrices))


def narrow_dtype(x: torch.Tensor, *projections: torch.Tensor) -> torch.dtype | None:
    """The dtype that grouped_experts rounds its activation to: that of x and all projections, if it has 16 bits."""
    narrow = x.dtype.itemsize == 2 and all(matrix.dtype == x.dtype for matrix in projections)
    return x.dtype if narrow else None


def count_experts(name: str, matrices: Sequence[torch.Tensor]) -> int:
    """E of a projection: one packed tensor [E, out, in], or a list of E matrices [out, in]."""
    if not matrices:
        raise OperatorError(f"{name} must hold a tensor [E, out, in] or E matrices [out, in], not nothing")
    if len(matrices) == 1 and matrices[0].dim() == 3:
        return matrices[0].shape[0]
    for matrix in matrices:
        if matrix.dim() != 2:
            allowed = "one tensor [E, out, in] or E matrices [out, in]"
            raise OperatorError(f"{name} must hold {allowed}, not {len(matrices)} with {list(matrix.shape)} among them")
    return len(matrices)


def width_of(down_proj: Sequence[torch.Tensor]) -> int:
    """L_out, the numbers in a row of the result; may be symbolic."""
    count_experts("down_proj", down_proj)
    return down_proj[0].shape[-2]


def check_rank(name: str, tensor: torch.Tensor, shape: str) -> None:
    """Demand two dimensions."""
    if tensor.dim() != 2:
        raise OperatorError(f"{name} must be {shape}, not {list(tensor.shape)}")
