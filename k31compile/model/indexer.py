"""The lightning indexer: a cheap score of every visible key, and the best few of them (K3.1 spec 2.8)."""

import math

import torch
from torch import Tensor, nn

from k31compile.model.caches import MlaCache, Step, read_pages, write_pages
from k31compile.model.config import K31Config
from k31compile.model.norms import LayerNorm, accumulate_dtype


def rotate(x: Tensor, positions: Tensor, theta: float, interleave: bool) -> Tensor:
    """Rotary embedding over the whole last axis (K3.1 spec 2.8, 4.8).

    x [B, T, ..., R], positions [B, T]. Pairs are (i, i + R/2), or (2i, 2i + 1) with `interleave`.
    """
    dtype, size = accumulate_dtype(x.dtype), x.shape[-1]
    frequency = theta ** (-torch.arange(0, size, 2, device=x.device, dtype=dtype) / size)
    angle = positions.to(dtype).view(*positions.shape, *[1] * (x.dim() - 2)) * frequency
    cos, sin = angle.cos(), angle.sin()
    pairs = x.to(dtype).reshape(*x.shape[:-1], *((size // 2, 2) if interleave else (2, size // 2)))
    axis = -1 if interleave else -2
    first, second = pairs.unbind(axis)
    turned = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=axis)
    return turned.flatten(-2).to(x.dtype)


def hadamard(x: Tensor) -> Tensor:
    """Orthonormal Walsh-Hadamard transform of the last axis, a power of two (K3.1 spec 2.8)."""
    size = x.shape[-1]
    y = x.to(accumulate_dtype(x.dtype))
    half = 1
    while half < size:
        first, second = y.reshape(*x.shape[:-1], -1, 2, half).unbind(-2)
        y = torch.stack([first + second, first - second], dim=-2).flatten(-3)
        half *= 2
    return (y / math.sqrt(size)).to(x.dtype)


def index_scores(q: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """I[t, s] = sum_h w[t, h] relu(q[t, h] . k[s]) (K3.1 spec 2.8).

    q [B, T, H, d], keys [B, S, d], weights [B, T, H] -> [B, T, S], in the dtype of the weights.
    """
    dots = torch.einsum("bthd,bsd->bths", q.to(weights.dtype), keys.to(weights.dtype))
    scores: Tensor = torch.einsum("bth,bths->bts", weights, dots.relu())
    return scores


class LightningIndexer(nn.Module):
    """Selects the keys that the sparse attention of one layer reads (K3.1 spec 2.8)."""

    def __init__(self, config: K31Config) -> None:
        """Parameters of one indexer."""
        super().__init__()
        self.num_heads, self.head_dim = config.index_n_heads, config.index_head_dim
        self.topk = config.index_topk
        self.rope_dim, self.rope_interleave = config.index_rope_dim, config.index_rope_interleave
        self.rope_theta, self.use_hadamard = config.index_rope_theta, config.index_hadamard
        self.wq_b = nn.Linear(config.q_lora_rank, self.num_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(config.hidden_size, self.head_dim, bias=False)
        self.k_norm = LayerNorm(self.head_dim, config.lora_norm_eps)
        self.weights_proj = nn.Linear(config.hidden_size, self.num_heads, bias=False)

    def forward(self, x: Tensor, q_latent: Tensor, cache: MlaCache, step: Step) -> Tensor:
        """x [B, T, D], q_latent [B, T, q_lora] -> int64 [B, T, min(index_topk, S)], positions of keys.

        Writes the index keys of this call to their pages. Where fewer keys are visible than are asked for,
        the rest of a row names invisible ones in no particular order, and the attention must leave them out.
        Ties are broken as torch.topk happens to, which promises nothing; relu makes exact ties at 0 common.
        """
        assert cache.index_keys is not None
        q = self.wq_b(q_latent).view(*x.shape[:-1], self.num_heads, self.head_dim)
        q = self._transform(q, step.positions)
        key = self._transform(self.k_norm(self.wk(x)), step.positions)
        write_pages(cache.index_keys, step.slots, key)
        keys = read_pages(cache.index_keys, step.block_table)
        scores = index_scores(q, keys, self._head_weights(x))
        scores = scores.masked_fill(~step.visible, float("-inf"))
        return scores.topk(min(self.topk, scores.shape[-1]), dim=-1).indices

    def _head_weights(self, x: Tensor) -> Tensor:
        """[B, T, H], scaled by H^-0.5 d^-0.5; the weight has the stream dtype, the product is accumulated."""
        dtype = accumulate_dtype(x.dtype)
        weights = nn.functional.linear(x.to(dtype), self.weights_proj.weight.to(dtype))
        return weights / math.sqrt(self.num_heads * self.head_dim)

    def _transform(self, x: Tensor, positions: Tensor) -> Tensor:
        """The same optional rope (first dims) and Hadamard transform for q and k."""
        if self.rope_dim:
            turned, rest = torch.split(x, [self.rope_dim, self.head_dim - self.rope_dim], dim=-1)
            turned = rotate(turned, positions, self.rope_theta, self.rope_interleave)
            x = torch.cat([turned, rest], dim=-1)
        return hadamard(x) if self.use_hadamard else x
