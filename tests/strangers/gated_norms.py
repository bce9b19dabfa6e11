"""Gated RMS norms, as three people write them."""

import torch
import torch.nn.functional as F
from stranger import Stranger
from torch import nn


# 1. A model file: variance, weight behind the cast, SiLU of the gate in float32.
class RMSNormGated(nn.Module):
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(hidden_size) + 0.5)
        self.variance_epsilon = eps

    def forward(self, hidden_states, gate=None):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        hidden_states = self.weight * hidden_states.to(input_dtype)
        hidden_states = hidden_states * F.silu(gate.to(torch.float32))
        return hidden_states.to(input_dtype)


class HeadsThenNorm(nn.Module):
    def __init__(self, hidden=20, heads=3, dim=8):
        super().__init__()
        self.heads, self.dim = heads, dim
        self.v_proj, self.z_proj = (nn.Linear(hidden, heads * dim, bias=False) for _ in range(2))
        self.norm = RMSNormGated(dim)
        self.out_proj = nn.Linear(heads * dim, hidden, bias=False)

    def forward(self, x):
        core = self.v_proj(x).reshape(-1, self.dim)
        z = self.z_proj(x).reshape(-1, self.dim)
        core = self.norm(core, z).reshape(x.shape[0], x.shape[1], -1)
        return self.out_proj(core)


# 2. A state-space model: the gate comes first, rows are normed in groups, one flat weight.
class GroupedGateFirst(nn.Module):
    def __init__(self, d=24, group_size=6, eps=1e-5):
        super().__init__()
        self.z, self.x = nn.Linear(d, d), nn.Linear(d, d)
        self.weight = nn.Parameter(torch.randn(d))
        self.group_size, self.eps = group_size, eps

    def forward(self, u):
        x, z = self.x(u), self.z(u)
        x = x * F.silu(z)
        grouped = x.unflatten(-1, (-1, self.group_size))
        rstd = 1 / torch.sqrt(grouped.square().mean(dim=-1, keepdim=True) + self.eps)
        return (grouped * rstd).flatten(-2) * self.weight


# 3. A port from MLX: F.rms_norm as a whole, a sigmoid next to it.
class FunctionalSigmoid(nn.Module):
    def __init__(self, width=30, heads=3, eps=1e-5):
        super().__init__()
        self.heads, self.eps = heads, eps
        self.fused = nn.Linear(width, 2 * width, bias=False)
        self.weight = nn.Parameter(torch.rand(width // heads))

    def forward(self, x):
        out, gate = self.fused(x).tensor_split(2, dim=-1)
        out = out.unflatten(-1, (self.heads, -1))
        normed = F.rms_norm(out, (out.shape[-1],), self.weight, self.eps)
        return torch.flatten(normed * torch.sigmoid(gate.unflatten(-1, (self.heads, -1))), -2)


ONE = {"gated_rms_norm": 1}
STRANGERS = [
    Stranger("model_file_silu", lambda: (HeadsThenNorm(), (torch.randn(2, 5, 20),)), ONE),
    Stranger("grouped_gate_first", lambda: (GroupedGateFirst(), (torch.randn(3, 4, 24),)), ONE),
    Stranger("functional_sigmoid", lambda: (FunctionalSigmoid(), (torch.randn(2, 3, 30),)), ONE),
]
