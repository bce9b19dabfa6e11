"""Whole layers as authors write them: projections, norms, rotary positions, a cache that is written in place."""

import torch
import torch.nn.functional as F
from torch import nn

INF = float("inf")


def rotate(x, pos, interleave):
    """Rotary positions over the last axis of [B, T, ..., R]; pairs (i, i + R/2) or (2i, 2i + 1)."""
    half = x.shape[-1] // 2
    angle = pos.view(*pos.shape, *[1] * (x.dim() - 2)).to(x.dtype) * 100.0 ** (
        -torch.arange(half, dtype=x.dtype) / half
    )
    cos, sin = angle.cos(), angle.sin()
    if interleave:
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Indexer(nn.Module):
    """Projections, a norm of the key, rotary positions on the first dimensions, a cache [B, S, D]."""

    def __init__(self, hidden=26, rank=18, heads=3, width=12, rope=8, count=5, capacity=40, batch=2, interleave=False):
        super().__init__()
        self.heads, self.width, self.rope, self.count, self.interleave = heads, width, rope, count, interleave
        self.wq = nn.Linear(rank, heads * width, bias=False)
        self.wk = nn.Linear(hidden, width, bias=False)
        self.norm = nn.LayerNorm(width)
        self.ww = nn.Linear(hidden, heads, bias=False)
        self.register_buffer("keys", torch.zeros(batch, capacity, width))

    def forward(self, x, latent, start):
        b, t, _ = x.shape
        pos = start[:, None] + torch.arange(t)
        q = self._turn(self.wq(latent).view(b, t, self.heads, self.width), pos)
        k = self._turn(self.norm(self.wk(x)), pos)
        self.keys[torch.arange(b)[:, None], pos] = k.to(self.keys.dtype)
        scores = torch.einsum("bthd,bsd->bths", q, self.keys)
        scores = (F.relu(scores) * self.ww(x).unsqueeze(-1)).sum(2)
        scores = scores.masked_fill(torch.arange(self.keys.shape[1]) > pos.unsqueeze(-1), -INF)
        return scores.topk(self.count, dim=-1).indices

    def _turn(self, x, pos):
        return torch.cat([rotate(x[..., : self.rope], pos, self.interleave), x[..., self.rope :]], dim=-1)


class Attention(nn.Module):
    """Absorbed attention over a latent cache that is written in place, behind an indexer of its own or a given one."""

    def __init__(self, hidden=26, rank=18, heads=4, latent=14, capacity=40, batch=2, **index):
        super().__init__()
        self.heads, self.latent = heads, latent
        self.down = nn.Linear(hidden, rank, bias=False)
        self.wq = nn.Linear(rank, heads * latent, bias=False)
        self.wc = nn.Linear(hidden, latent, bias=False)
        self.out = nn.Linear(heads * latent, hidden, bias=False)
        self.indexer = Indexer(hidden, rank, capacity=capacity, batch=batch, **index)
        self.register_buffer("cache", torch.zeros(batch, capacity, latent))

    def forward(self, x, start):
        low = F.rms_norm(self.down(x), (self.down.out_features,))
        return x + self.attend(x, low, start, self.indexer(x, low, start))

    def attend(self, x, low, start, chosen):
        b, t, _ = x.shape
        pos = start[:, None] + torch.arange(t)
        q = self.wq(low).view(b, t, self.heads, self.latent)
        self.cache[torch.arange(b)[:, None], pos] = self.wc(x).to(self.cache.dtype)
        keep = torch.zeros(b, t, self.cache.shape[1], dtype=torch.bool).scatter(-1, chosen, True)
        keep &= torch.arange(self.cache.shape[1]) <= pos.unsqueeze(-1)
        logits = torch.einsum("bthd,bsd->bhts", q, self.cache) * self.latent**-0.5
        weights = logits.masked_fill(~keep.unsqueeze(1), -INF).softmax(-1)
        return self.out(torch.einsum("bhts,bsd->bthd", weights, self.cache).flatten(2))


class Stack(nn.Module):
    """Layers with weights, and rotary styles, of their own."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x, start):
        for layer in self.layers:
            x = layer(x, start)
        return x


def seeded(make, seed=0):
    torch.manual_seed(seed)
    return make().requires_grad_(False).eval()
