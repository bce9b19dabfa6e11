"""Gated RMS norm as a formula (K3.1 spec 2.3)."""

import torch
from torch import Tensor

from k31compile.kernels.checks import accumulation_dtype
from k31compile.targets.ascend.lowerings.registry import FORMULA, lowers


@lowers("gated_rms_norm", FORMULA)
def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    *,
    eps: float,
    activation: str = "sigmoid",
    norm_before_gate: bool = True,
    weight_cast: str = "before",
    dtype: torch.dtype | None = None,
) -> Tensor:
    """norm(x) weight act(gate), or norm(x act(gate)) weight, rounded where `weight_cast` says."""
    wide, stored = accumulation_dtype(x, gate, weight), x.dtype
    gate = gate.to(wide)
    opened = gate * torch.sigmoid(gate) if activation == "silu" else torch.sigmoid(gate)
    y = x.to(wide) if norm_before_gate else x.to(wide) * opened
    normed = y * inverse_rms(y, eps)
    normed = weight * normed.to(stored) if weight_cast == "after" else weight.to(wide) * normed
    if weight_cast == "between":
        normed, opened = normed.to(stored), opened.to(stored)
    return (normed * opened if norm_before_gate else normed).to(dtype or stored)


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean of squares + eps) over the last dimension, which stays with size 1."""
    return torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)
