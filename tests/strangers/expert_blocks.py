"""Experts with their routers, as four people write them."""

import torch
import torch.nn.functional as F
from stranger import Stranger
from torch import nn


# 1. A ModuleList of experts, every expert on every token, its weight zero where it was not chosen.
class Expert(nn.Module):
    def __init__(self, d, f):
        super().__init__()
        self.w1, self.w3 = nn.Linear(d, f, bias=False), nn.Linear(d, f, bias=False)
        self.w2 = nn.Linear(f, d, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class ListOfExperts(nn.Module):
    def __init__(self, d=12, f=10, n=5, k=2):
        super().__init__()
        self.gate = nn.Linear(d, n, bias=False)
        self.experts = nn.ModuleList([Expert(d, f) for _ in range(n)])
        self.shared = Expert(d, 2 * f)
        self.k = k

    def forward(self, x):
        B, T, C = x.shape
        x = x.view(-1, C)
        p, i = torch.topk(self.gate(x), self.k)
        p = F.softmax(p, dim=-1)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            share = (p * (i == e)).sum(-1, keepdim=True)
            y = y + share * expert(x)
        return (y + self.shared(x)).view(B, T, C)


# 2. Weights fetched by index, one einsum a matrix.
class ConditionalFeedForward(nn.Module):
    def __init__(self, dim=14, hidden=9, num_experts=6, active=3):
        super().__init__()
        self.gate = nn.Linear(dim, num_experts, bias=False)
        self.w1 = nn.Parameter(torch.randn(num_experts, hidden, dim) * 0.3)
        self.w2 = nn.Parameter(torch.randn(num_experts, dim, hidden) * 0.3)
        self.w3 = nn.Parameter(torch.randn(num_experts, hidden, dim) * 0.3)
        self.active = active

    def forward(self, x):
        shape = x.shape
        x = x.view(-1, shape[-1])
        scores = F.softmax(self.gate(x), dim=-1)
        expert_weights, expert_indices = torch.topk(scores, self.active, dim=-1)
        expert_weights /= expert_weights.sum(dim=-1, keepdim=True)
        w1, w2, w3 = self.w1[expert_indices], self.w2[expert_indices], self.w3[expert_indices]
        x1 = F.silu(torch.einsum("ti,taoi -> tao", x, w1))
        x3 = torch.einsum("ti, taoi -> tao", x, w3)
        expert_outs = torch.einsum("tao, taio -> tai", (x1 * x3), w2)
        return torch.einsum("tai,ta -> ti", expert_outs, expert_weights).view(shape)


# 3. From JAX: a dense combine row out of one-hots, all experts by einsum, matrices [in, out], SiTU in a latent space.
class LatentOneHot(nn.Module):
    def __init__(self, d=20, latent=8, f=6, n=7, k=2):
        super().__init__()
        self.n, self.k = n, k
        self.router = nn.Parameter(torch.randn(d, n) * 0.3)
        self.bias = nn.Parameter(torch.randn(n) * 0.1)
        self.down, self.up = nn.Linear(d, latent, bias=False), nn.Linear(latent, d, bias=False)
        self.wi = nn.Parameter(torch.randn(n, latent, 2 * f) * 0.4)
        self.wo = nn.Parameter(torch.randn(n, f, latent) * 0.4)

    def forward(self, x):
        affinity = torch.sigmoid(x @ self.router)
        _, idx = torch.topk(affinity + self.bias, self.k, -1)
        w = torch.take_along_dim(affinity, idx, -1)
        w = 2.0 * w / (w.sum(-1, keepdim=True) + 1e-20)
        combine = (F.one_hot(idx, self.n).to(x.dtype) * w[..., None]).sum(-2)
        y = self.down(x)
        g, u = torch.einsum("nd,edf->nef", y, self.wi).chunk(2, -1)
        h = 4.0 * torch.tanh(g / 4.0) * torch.sigmoid(g) * (25.0 * torch.tanh(u / 25.0))
        z = torch.einsum("nef,efd,ne->nd", h, self.wo, combine)
        return self.up(F.rms_norm(z, (z.shape[-1],), eps=1e-5))


# 4. Tokens repeated for every choice, a batched product, index_add of the weighted rows.
class RepeatedTokens(nn.Module):
    def __init__(self, d=16, f=12, n=4, k=2):
        super().__init__()
        self.gate = nn.Linear(d, n, bias=False)
        self.gate_up_proj = nn.Parameter(torch.randn(n, 2 * f, d) * 0.3)
        self.down_proj = nn.Parameter(torch.randn(n, d, f) * 0.3)
        self.k = k

    def forward(self, hidden_states):
        tokens = hidden_states.shape[0]
        scores = self.gate(hidden_states).softmax(-1)
        weights, experts = torch.topk(scores, self.k, dim=-1)
        token = torch.arange(tokens).repeat_interleave(self.k)
        flat = experts.flatten()
        rows = hidden_states[token].unsqueeze(-1)
        gate, up = (self.gate_up_proj[flat] @ rows).squeeze(-1).chunk(2, dim=-1)
        out = (self.down_proj[flat] @ (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
        out = out * weights.flatten().unsqueeze(-1)
        return torch.zeros_like(hidden_states).index_add_(0, token, out)


BOTH = {"moe_gating_top_k": 1, "grouped_experts": 1}
STRANGERS = [
    Stranger("list_of_experts", lambda: (ListOfExperts(), (torch.randn(2, 4, 12),)), BOTH),
    Stranger("conditional_ffn", lambda: (ConditionalFeedForward(), (torch.randn(2, 3, 14),)), BOTH),
    Stranger("latent_one_hot", lambda: (LatentOneHot(), (torch.randn(9, 20),)), BOTH),
    Stranger("repeated_tokens", lambda: (RepeatedTokens(), (torch.randn(7, 16),)), BOTH),
]
