"""Normalisations and the rule for the dtype in which they, and everything delicate, are computed."""

import torch
from torch import Tensor, nn


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of norms, softmax, gates, states and scores: float64 stays float64, all else is float32.

    K3.1 spec 2.19. With it `model.double()` is a float64 reference from end to end.
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


def rms_normalize(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x * rsqrt(mean(x^2) + eps) * weight over the last axis, in the accumulation dtype (K3.1 spec 2)."""
    x = x.to(accumulate_dtype(x.dtype))
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.to(x.dtype)


def l2_normalize(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x * rsqrt(sum(x^2) + eps) over the last axis, in the accumulation dtype (K3.1 spec 2.3)."""
    x = x.to(accumulate_dtype(x.dtype))
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


class RMSNorm(nn.Module):
    """RMS norm over the last axis: [..., size] -> [..., size] in the dtype of the input (K3.1 spec 2)."""

    def __init__(self, size: int, eps: float) -> None:
        """Weight [size], ones."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [..., size]; float32 inside, float64 for float64."""
        return rms_normalize(x, self.weight, self.eps).to(x.dtype)


class GatedRMSNorm(nn.Module):
    """RMS norm per head, then a sigmoid gate: norm(o) * sigmoid(gate) (K3.1 spec 2.3, output)."""

    float32_parameters = ("weight",)

    def __init__(self, size: int, eps: float) -> None:
        """Weight [size], ones, kept in float32."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, o: Tensor, gate: Tensor) -> Tensor:
        """o and gate [..., H, size] -> [..., H, size] in the dtype of the gate."""
        normed = rms_normalize(o, self.weight, self.eps)
        return (normed * torch.sigmoid(gate.to(normed.dtype))).to(gate.dtype)


class LayerNorm(nn.Module):
    """LayerNorm with bias over the last axis, float32 inside: [..., size] -> [..., size] (K3.1 spec 2.8)."""

    float32_parameters = ("weight", "bias")

    def __init__(self, size: int, eps: float) -> None:
        """Weight ones and bias zeros, both [size] and kept in float32."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [..., size]; the result has the dtype of the input."""
        dtype = accumulate_dtype(x.dtype)
        weight, bias = self.weight.to(dtype), self.bias.to(dtype)
        return nn.functional.layer_norm(x.to(dtype), weight.shape, weight, bias, self.eps).to(x.dtype)
