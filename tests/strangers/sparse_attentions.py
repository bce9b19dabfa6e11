"""Attention over selected keys, as five people write it."""

import math

import torch
import torch.nn.functional as F
from stranger import Stranger
from torch import nn


# 1. An inference script's prefill: native heads, a mask by scatter, a causal one added.
class MlaPrefill(nn.Module):
    def __init__(self, dim=26, n_heads=3, kv_lora=12, nope=8, rope=4, v_dim=6):
        super().__init__()
        self.n_heads, self.kv_lora, self.nope, self.rope, self.v_dim = n_heads, kv_lora, nope, rope, v_dim
        self.wq = nn.Linear(dim, n_heads * (nope + rope), bias=False)
        self.wkv_a = nn.Linear(dim, kv_lora + rope, bias=False)
        self.kv_norm = nn.RMSNorm(kv_lora, eps=1e-6)
        self.wkv_b = nn.Linear(kv_lora, n_heads * (nope + v_dim), bias=False)
        self.wo = nn.Linear(n_heads * v_dim, dim, bias=False)
        self.softmax_scale = (nope + rope) ** -0.5

    def forward(self, x, topk_indices):
        bsz, seqlen, _ = x.size()
        q = self.wq(x).view(bsz, seqlen, self.n_heads, self.nope + self.rope)
        kv, k_pe = torch.split(self.wkv_a(x), [self.kv_lora, self.rope], dim=-1)
        kv = self.wkv_b(self.kv_norm(kv)).view(bsz, seqlen, self.n_heads, self.nope + self.v_dim)
        k_nope, v = torch.split(kv, [self.nope, self.v_dim], dim=-1)
        k = torch.cat([k_nope, k_pe.unsqueeze(2).expand(-1, -1, self.n_heads, -1)], dim=-1)
        scores = torch.einsum("bshd,bthd->bsht", q, k) * self.softmax_scale
        index_mask = torch.full((bsz, seqlen, seqlen), float("-inf")).scatter_(-1, topk_indices, 0)
        index_mask += torch.full((seqlen, seqlen), float("-inf")).triu_(1)
        scores += index_mask.unsqueeze(2)
        scores = scores.softmax(dim=-1, dtype=torch.float32)
        x = torch.einsum("bsht,bthd->bshd", scores, v)
        return self.wo(x.flatten(2))


# 2. A kernel's reference: one row of latents a key, values its first part, -1 is invalid, the sum kept safe.
class FlashReference(nn.Module):
    def __init__(self, hidden=20, heads=4, latent=14, rope=6):
        super().__init__()
        self.heads, self.latent, self.rope = heads, latent, rope
        self.q = nn.Linear(hidden, heads * (latent + rope), bias=False)

    def forward(self, hidden, kv, indices):
        s_q = hidden.shape[0]
        q = self.q(hidden).view(s_q, self.heads, self.latent + self.rope)
        invalid = (indices < 0) | (indices >= kv.size(0))
        focused = kv.index_select(0, indices.masked_fill(invalid, 0).flatten()).view(s_q, indices.size(-1), -1)
        P = q @ focused.transpose(1, 2)
        P *= (self.latent + self.rope) ** -0.5
        P[invalid.unsqueeze(1).broadcast_to(P.shape)] = float("-inf")
        lse = torch.logsumexp(P, dim=-1, keepdim=True)
        lse = torch.where(torch.isneginf(lse), float("inf"), lse)
        weights = torch.exp(P - lse)
        return weights @ focused[..., : self.latent]


# 3. A serving engine's decode: two products, an indexed gather by batch, where and softmax.
class EngineDecode(nn.Module):
    def __init__(self, heads=3, nope=8, rope=4, latent=16, v_dim=5):
        super().__init__()
        self.heads, self.nope, self.rope = heads, nope, rope
        self.q_b = nn.Linear(10, heads * (nope + rope), bias=False)
        self.W_UK = nn.Parameter(torch.randn(heads, nope, latent) * 0.3)
        self.W_UV = nn.Parameter(torch.randn(heads, latent, v_dim) * 0.3)
        self.scale = 1 / math.sqrt(nope + rope)

    def forward(self, q_lora, ckv, k_pe, topk):
        B = q_lora.shape[0]
        q = self.q_b(q_lora).view(B, self.heads, self.nope + self.rope)
        q_nope, q_pe = q.split([self.nope, self.rope], dim=-1)
        ql_nope = torch.bmm(q_nope.transpose(0, 1), self.W_UK).transpose(0, 1)
        valid = topk >= 0
        safe = topk.clamp(min=0).long()
        rows = torch.arange(B)[:, None]
        c, pe = ckv[rows, safe], k_pe[rows, safe]
        logits = torch.einsum("bhl,bkl->bhk", ql_nope, c) + torch.einsum("bhr,bkr->bhk", q_pe, pe)
        logits = torch.where(valid[:, None], logits * self.scale, -torch.inf)
        o = torch.einsum("bhk,bkl->bhl", F.softmax(logits, dim=-1, dtype=torch.float32), c)
        return torch.bmm(o.transpose(0, 1), self.W_UV).transpose(0, 1).flatten(1)


# 4. A model file: a boolean mask by scatter, scaled_dot_product_attention, heads of their own.
class SdpaModel(nn.Module):
    def __init__(self, hidden=24, heads=3, head_dim=8):
        super().__init__()
        self.heads, self.head_dim = heads, head_dim
        self.q_proj = nn.Linear(hidden, heads * head_dim, bias=False)
        self.kv_proj = nn.Linear(hidden, 2 * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, hidden, bias=False)

    def forward(self, hidden_states, topk_indices):
        b, s, _ = hidden_states.shape
        q = self.q_proj(hidden_states).view(b, s, self.heads, -1).transpose(1, 2)
        k, v = self.kv_proj(hidden_states).chunk(2, dim=-1)
        k, v = (x[:, None].expand(-1, self.heads, -1, -1) for x in (k, v))
        hidden = torch.ones((b, s, s), dtype=torch.bool).scatter(-1, topk_indices, False)
        causal = torch.ones(s, s, dtype=torch.bool).tril()
        allowed = ~hidden & causal
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed[:, None], scale=self.head_dim**-0.5)
        return self.o_proj(out.transpose(1, 2).reshape(b, s, -1))


# 5. Somebody from numpy: take_along_dim, a softmax by hand with the maximum taken off.
class NumpyMinded(nn.Module):
    def __init__(self, d=18, h=3, c=10, k=4):
        super().__init__()
        self.h, self.c, self.k = h, c, k
        self.Wq = nn.Parameter(torch.randn(d, h * c) / d**0.5)
        self.Wc = nn.Parameter(torch.randn(d, c) / d**0.5)
        self.Wo = nn.Parameter(torch.randn(h, c, d) / (h * c) ** 0.5)

    def forward(self, x, scores):
        B, T, _ = x.shape
        K = self.k
        idx = torch.topk(scores, K, dim=-1).indices
        q = (x @ self.Wq).reshape(B, T, self.h, self.c)
        lat = x @ self.Wc
        picked = torch.take_along_dim(lat[:, None], idx[..., None].expand(B, T, K, self.c), dim=2)
        s = (q[:, :, :, None, :] * picked[:, :, None, :, :]).sum(-1) / np_sqrt(self.c)
        future = idx > torch.arange(T)[None, :, None]
        s = torch.where(future[:, :, None, :], torch.full_like(s, -float("inf")), s)
        s = s - s.amax(-1, keepdim=True)
        p = torch.exp(s)
        p = p / p.sum(-1, keepdim=True)
        o = (p[..., None] * picked[:, :, None]).sum(3)
        return torch.tensordot(o, self.Wo, dims=([2, 3], [0, 1]))


def np_sqrt(number):
    return float(number) ** 0.5


def causal_choice(b, t, k):
    """Return k different positions for each row, position t always among row t's."""
    scores = torch.rand(b, t, t) + torch.eye(t)
    return scores.topk(k, dim=-1).indices


def holes(indices):
    """Return the indices with the last two of row 0 empty."""
    indices = indices.clone()
    indices[0, -2:] = -1
    return indices


ONE = {"sparse_flash_attention": 1}
STRANGERS = [
    Stranger("mla_prefill", lambda: (MlaPrefill(), (torch.randn(2, 9, 26), causal_choice(2, 9, 4))), ONE),
    Stranger(
        "flash_reference",
        lambda: (
            FlashReference(),
            (torch.randn(5, 20), torch.randn(11, 20), holes(torch.rand(5, 11).topk(6).indices)),
        ),
        ONE,
    ),
    Stranger(
        "engine_decode",
        lambda: (
            EngineDecode(),
            (
                torch.randn(3, 10),
                torch.randn(3, 13, 16),
                torch.randn(3, 13, 4),
                holes(torch.rand(3, 13).topk(5).indices).to(torch.int32),
            ),
        ),
        ONE,
    ),
    Stranger("sdpa_model", lambda: (SdpaModel(), (torch.randn(2, 10, 24), causal_choice(2, 10, 5))), ONE),
    Stranger("numpy_minded", lambda: (NumpyMinded(), (torch.randn(2, 8, 18), torch.rand(2, 8, 8) + torch.eye(8))), ONE),
]
