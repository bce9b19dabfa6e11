"""nanoGPT tutorial: single letters, no cache, everything by hand."""

import math

import torch
import torch.nn as nn
from torch.nn import functional as F


class KDA(nn.Module):
    def __init__(s, c):
        super().__init__()
        s.h = c.n_head
        s.d = c.hs
        C = c.n_embd
        n = s.h * s.d
        s.qkv = nn.Linear(C, 3 * n, bias=False)
        s.conv = nn.Conv1d(3 * n, 3 * n, 4, groups=3 * n, padding=3, bias=False)
        s.fa = nn.Sequential(nn.Linear(C, s.d, bias=False), nn.Linear(s.d, n, bias=False))
        s.b = nn.Sequential(nn.Linear(C, s.h, bias=False), nn.Sigmoid())
        s.g = nn.Sequential(nn.Linear(C, n, bias=False), nn.Sigmoid())
        s.a = nn.Parameter(torch.zeros(s.h, 1))
        s.dt = nn.Parameter(torch.zeros(s.h, s.d))
        s.ln = nn.RMSNorm(s.d, eps=1e-5)
        s.proj = nn.Linear(n, C, bias=False)

    def forward(s, x):
        B, T, C = x.shape
        H, D = s.h, s.d
        y = F.silu(s.conv(s.qkv(x).transpose(1, 2))[..., :T]).transpose(1, 2)
        q, k, v = y.split(H * D, dim=2)
        q = q.view(B, T, H, D).transpose(1, 2)
        k = k.view(B, T, H, D).transpose(1, 2)
        v = v.view(B, T, H, D).transpose(1, 2)
        q = q / torch.sqrt((q**2).sum(-1, keepdim=True) + 1e-6) / math.sqrt(D)
        k = k / torch.sqrt((k**2).sum(-1, keepdim=True) + 1e-6)
        w = torch.exp(-5 * torch.sigmoid(s.a.exp() * (s.fa(x).view(B, T, H, D) + s.dt))).transpose(1, 2)
        b = s.b(x).transpose(1, 2)
        S = torch.zeros(B, H, D, D, device=x.device)
        o = []
        for t in range(T):
            S = w[:, :, t, :, None] * S
            r = k[:, :, t, None, :] @ S
            S = S + k[:, :, t, :, None] @ (b[:, :, t, None, None] * (v[:, :, t, None, :] - r))
            o.append(q[:, :, t, None, :] @ S)
        o = torch.cat(o, dim=2).transpose(1, 2)
        o = s.ln(o) * s.g(x).view(B, T, H, D)
        return s.proj(o.contiguous().view(B, T, H * D))


class SparseSelfAttention(nn.Module):
    def __init__(s, c):
        super().__init__()
        C = c.n_embd
        s.h = c.n_head
        s.d = c.hs
        s.r = c.lora
        s.topk = c.topk
        s.ih = c.ih
        s.idim = c.idim
        s.qa = nn.Sequential(nn.Linear(C, c.qlora, bias=False), nn.RMSNorm(c.qlora, eps=1e-6))
        s.qb = nn.Linear(c.qlora, s.h * s.d, bias=False)
        s.kva = nn.Sequential(nn.Linear(C, s.r, bias=False), nn.RMSNorm(s.r, eps=1e-6))
        s.kb = nn.Linear(s.r, s.h * s.d, bias=False)
        s.vb = nn.Linear(s.r, s.h * s.d, bias=False)
        s.iq = nn.Linear(c.qlora, s.ih * s.idim, bias=False)
        s.ik = nn.Sequential(nn.Linear(C, s.idim, bias=False), nn.LayerNorm(s.idim, eps=1e-6))
        s.iw = nn.Linear(C, s.ih, bias=False)
        s.g = nn.Linear(C, s.h * s.d, bias=False)
        s.proj = nn.Linear(s.h * s.d, C, bias=False)
        s.register_buffer(
            "bias", torch.tril(torch.ones(c.block_size, c.block_size)).view(1, 1, c.block_size, c.block_size)
        )

    def forward(s, x):
        B, T, C = x.shape
        a = s.qa(x)
        c = s.kva(x)
        q = s.qb(a).view(B, T, s.h, s.d).transpose(1, 2)
        k = s.kb(c).view(B, T, s.h, s.d).transpose(1, 2)
        v = s.vb(c).view(B, T, s.h, s.d).transpose(1, 2)
        iq = s.iq(a).view(B, T, s.ih, s.idim).transpose(1, 2)
        ik = s.ik(x).unsqueeze(1)
        sc = F.relu(iq @ ik.transpose(-2, -1)) * s.iw(x).transpose(1, 2).unsqueeze(-1)
        sc = sc.sum(1) / math.sqrt(s.ih * s.idim)
        sc = sc.masked_fill(s.bias[:, 0, :T, :T] == 0, float("-inf"))
        _, i = torch.topk(sc, min(s.topk, T), dim=-1)
        m = torch.zeros(B, T, T, device=x.device).scatter(2, i, 1.0).unsqueeze(1) * s.bias[:, :, :T, :T]
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(m == 0, float("-inf"))
        att = F.softmax(att, dim=-1)
        y = (att @ v).transpose(1, 2).contiguous().view(B, T, s.h * s.d)
        return s.proj(y * torch.sigmoid(s.g(x)))


class MLP(nn.Module):
    def __init__(s, C, I):
        super().__init__()
        s.w1 = nn.Linear(C, I, bias=False)
        s.w3 = nn.Linear(C, I, bias=False)
        s.w2 = nn.Linear(I, C, bias=False)

    def forward(s, x):
        return s.w2(F.silu(s.w1(x)) * s.w3(x))


class MoE(nn.Module):
    def __init__(s, c):
        super().__init__()
        s.k = c.k
        s.n = c.n_exp
        s.router = nn.Linear(c.n_embd, c.n_exp, bias=False)
        s.b = nn.Parameter(torch.zeros(c.n_exp))
        s.lat = nn.Linear(c.n_embd, c.latent, bias=False)
        s.experts = nn.ModuleList([MLP(c.latent, c.inter) for _ in range(c.n_exp)])
        s.out = nn.Sequential(nn.RMSNorm(c.latent, eps=1e-5), nn.Linear(c.latent, c.n_embd, bias=False))
        s.shared = MLP(c.n_embd, c.inter)

    def forward(s, x):
        B, T, C = x.shape
        p = torch.sigmoid(s.router(x))
        _, ix = torch.topk(p + s.b, s.k, dim=-1)
        m = torch.zeros_like(p).scatter_(-1, ix, 1.0)
        w = p * m
        w = w / w.sum(-1, keepdim=True)
        z = s.lat(x)
        y = 0
        for e in range(s.n):
            y = y + w[:, :, e : e + 1] * s.experts[e](z)
        return s.out(y) + s.shared(x)


class DepthMix(nn.Module):
    def __init__(s, C):
        super().__init__()
        s.q = nn.Parameter(torch.zeros(C))
        s.ln = nn.RMSNorm(C, eps=1e-5)

    def forward(s, xs):
        X = torch.stack(xs)
        a = F.softmax((s.ln(X) * s.q).sum(-1, keepdim=True), dim=0)
        return (a * X).sum(0)


class Block(nn.Module):
    def __init__(s, c, i):
        super().__init__()
        s.ln1 = nn.RMSNorm(c.n_embd, eps=1e-5)
        s.ln2 = nn.RMSNorm(c.n_embd, eps=1e-5)
        s.attn = KDA(c) if i % 2 == 0 else SparseSelfAttention(c)
        s.mlp = MoE(c)
        s.m1 = DepthMix(c.n_embd)
        s.m2 = DepthMix(c.n_embd)

    def forward(s, xs):
        xs = xs + [s.attn(s.ln1(s.m1(xs)))]
        return xs + [s.mlp(s.ln2(s.m2(xs)))]


class C:
    n_embd = 32
    n_head = 2
    hs = 8
    lora = 16
    qlora = 12
    topk = 4
    ih = 8
    idim = 8
    block_size = 32
    k = 2
    n_exp = 6
    latent = 16
    inter = 12
    vocab = 50
    n_layer = 2


class GPT(nn.Module):
    def __init__(s, c):
        super().__init__()
        s.transformer = nn.ModuleDict(
            dict(
                wte=nn.Embedding(c.vocab, c.n_embd),
                h=nn.ModuleList([Block(c, i) for i in range(c.n_layer)]),
                mix=DepthMix(c.n_embd),
                ln_f=nn.RMSNorm(c.n_embd, eps=1e-5),
            )
        )
        s.lm_head = nn.Linear(c.n_embd, c.vocab, bias=False)

    def forward(s, idx):
        xs = [s.transformer.wte(idx)]
        for b in s.transformer.h:
            xs = b(xs)
        return s.lm_head(s.transformer.ln_f(s.transformer.mix(xs)))


def build():
    return GPT(C)


def drive(call, model, ids):
    yield "prefill", call(ids)


expect = dict(
    prefill=dict(kda=1, short_conv=1, gated_rms_norm=1, lightning_indexer=1, sparse=1, router=2, experts=2, attn_res=4)
)
