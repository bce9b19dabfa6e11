"""The gated RMS norm as different authors would write it (K3.1 spec 2.3 output and 3.8)."""

import torch
import torch.nn.functional as F
from operands import EPS
from records import speller

spelling = speller("gated_rms_norm", arguments="x gate norm_weight", results="y", phase="prefill", lengths=(1, 7))


@spelling(half=True)
def all_in_float32(x, gate, weight):
    """Norm, weight and gate in float32, one cast at the end."""
    dtype = x.dtype
    x = x.to(torch.float32)
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
    return (weight.to(torch.float32) * x * torch.sigmoid(gate.to(torch.float32))).to(dtype)


@spelling(half=True, options={"activation": "silu"})
def weight_after_the_cast(x, gate, weight):
    """The normed value is cast down before the weight; the gate is SiLU in float32."""
    dtype = x.dtype
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + EPS)
    return (weight * normed.to(dtype) * F.silu(gate.float())).to(dtype)


@spelling(half=True)
def gate_cast_before_the_product(x, gate, weight):
    """F.rms_norm, then a gate that was cast to the stream's dtype first."""
    normed = F.rms_norm(x.float(), (x.shape[-1],), weight.float(), EPS).to(x.dtype)
    return normed * torch.sigmoid(gate.float()).to(x.dtype)


@spelling()
def divided_by_the_root(x, gate, weight):
    """x / sqrt of a sum over D; the gate by 1 / (1 + exp(-g))."""
    mean = torch.sum(x * x, dim=-1, keepdim=True) / x.shape[-1]
    return x / torch.sqrt(mean + EPS) * weight * (1.0 / (1.0 + torch.exp(-gate)))


@spelling(options={"activation": "silu", "gate_first": True})
def gate_then_norm(x, gate, weight):
    """The gate goes in before the norm."""
    x = x * F.silu(gate)
    return x * (1 / torch.sqrt(x.square().mean(-1, keepdim=True) + EPS)) * weight


@spelling(options={"one_more": True})
def weight_stored_less_one(x, gate, weight):
    """The weight is stored as its distance from 1."""
    normed = x * (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt()
    return normed * (1.0 + weight) * gate.sigmoid()


@spelling(arguments="x gate_flat norm_weight", results="y_flat")
def flat_gate(x, gate, weight):
    """The gate comes flat [B, T, H * V], the result leaves flat; the norm by a power of -1/2."""
    normed = x * torch.pow(x.pow(2).mean(-1, True).add(EPS), -0.5) * weight
    return normed.flatten(-2).mul(gate.sigmoid())


@spelling(arguments="x_flat gate_flat norm_weight", results="y_flat")
def rows_of_heads(x, gate, weight):
    """Everything as [B * T * H, V]; the mean square by a dot product and a linear norm."""
    shape, size = x.shape, weight.shape[0]
    x, gate = x.reshape(-1, size), gate.reshape(-1, size)
    squared = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() / size
    return (x * torch.rsqrt(squared + EPS) * weight * gate.sigmoid()).view(shape)


@spelling(options={"activation": "silu"})
def silu_written_out(x, gate, weight):
    """gate * sigmoid(gate) spelled out, the weight multiplied into it first."""
    return (gate * torch.sigmoid(gate) * weight) * (x * torch.rsqrt((x**2).mean(-1, keepdim=True) + EPS))
