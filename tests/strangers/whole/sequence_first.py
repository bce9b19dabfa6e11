"""Megatron: sequence first [s, b, h], config dataclass, mixed qkv, tuple (output, bias) returns."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class TransformerConfig:
    hidden_size: int = 32
    num_heads: int = 2
    kv_channels: int = 8
    num_moe_experts: int = 6
    moe_router_topk: int = 2
    layernorm_epsilon: float = 1e-5
    kv_lora_rank: int = 16
    q_lora_rank: int = 12


class TELinear(nn.Linear):
    def __init__(s, i, o):
        super().__init__(i, o, bias=False)

    def forward(s, x):
        return super().forward(x), None


class WrappedTorchNorm(nn.Module):
    def __init__(s, d, eps):
        super().__init__()
        s.weight = nn.Parameter(torch.ones(d))
        s.eps = eps

    def _norm(s, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + s.eps)

    def forward(s, x):
        return s._norm(x.float()).type_as(x) * s.weight


class GatedDeltaNet(nn.Module):
    def __init__(s, c):
        super().__init__()
        s.c = c
        n = c.num_heads * c.kv_channels
        s.n = n
        s.in_proj = TELinear(c.hidden_size, 4 * n + c.num_heads)
        s.f_down = TELinear(c.hidden_size, 8)
        s.f_up = TELinear(8, n)
        s.conv1d = nn.Conv1d(3 * n, 3 * n, 4, groups=3 * n, padding=3, bias=False)
        s.A_log = nn.Parameter(torch.zeros(c.num_heads))
        s.dt_bias = nn.Parameter(torch.zeros(n))
        s.out_norm = WrappedTorchNorm(c.kv_channels, 1e-5)
        s.out_proj = TELinear(n, c.hidden_size)

    def forward(s, x):
        sq, b, _ = x.shape
        h, d = s.c.num_heads, s.c.kv_channels
        p, _ = s.in_proj(x)
        f, _ = s.f_up(s.f_down(x)[0])
        p = p.transpose(0, 1)
        qkv, gate, beta = torch.split(p, [3 * s.n, s.n, h], dim=-1)
        qkv = F.silu(s.conv1d(qkv.transpose(1, 2).contiguous())[..., :sq]).transpose(1, 2)
        q, k, v = torch.split(qkv, [s.n] * 3, dim=-1)
        q, k, v = (t.reshape(b, sq, h, d) for t in (q, k, v))
        gate = gate.reshape(b, sq, h, d)
        q = F.normalize(q.float(), dim=-1, eps=1e-6).contiguous()
        k = F.normalize(k.float(), dim=-1, eps=1e-6).contiguous()
        g = -s.A_log.exp()[:, None] * F.softplus((f.transpose(0, 1).float() + s.dt_bias).reshape(b, sq, h, d))
        beta = beta.sigmoid()
        S = torch.zeros(b, h, d, d)
        core = []
        for t in range(sq):
            S = S * g[:, t].exp().unsqueeze(-1)
            S = (
                S
                - torch.einsum(
                    "bhk,bhv->bhkv", k[:, t] * beta[:, t, :, None], torch.einsum("bhkv,bhk->bhv", S, k[:, t])
                )
                + torch.einsum("bhk,bhv->bhkv", k[:, t] * beta[:, t, :, None], v[:, t])
            )
            core.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]) * d**-0.5)
        o = torch.stack(core, 1)
        o = s.out_norm(o) * torch.sigmoid(gate.float()).to(o.dtype)
        return s.out_proj(o.reshape(b, sq, -1).transpose(0, 1).contiguous())


class DSAMLA(nn.Module):
    def __init__(s, c):
        super().__init__()
        s.c = c
        h, d = c.num_heads, c.kv_channels
        s.qd = TELinear(c.hidden_size, c.q_lora_rank)
        s.qn = WrappedTorchNorm(c.q_lora_rank, 1e-6)
        s.qu = TELinear(c.q_lora_rank, h * (d + 4))
        s.kd = TELinear(c.hidden_size, c.kv_lora_rank + 4)
        s.kn = WrappedTorchNorm(c.kv_lora_rank, 1e-6)
        s.ku = TELinear(c.kv_lora_rank, h * 2 * d)
        s.g = TELinear(c.hidden_size, h * d)
        s.o = TELinear(h * d, c.hidden_size)
        s.wq = TELinear(c.q_lora_rank, 64)
        s.wk = TELinear(c.hidden_size, 8)
        s.kln = nn.LayerNorm(8, eps=1e-6)
        s.ww = TELinear(c.hidden_size, 8)

    def _compute_index_scores(s, q, w, k):
        sc = torch.einsum("sbhd,tbd->sbht", q.float(), k.float())
        sc = torch.relu(sc)
        sc = sc * w.unsqueeze(-1)
        return sc.sum(dim=2).transpose(0, 1)

    def forward(s, x):
        sq, b, _ = x.shape
        h, d = s.c.num_heads, s.c.kv_channels
        qc = s.qn(s.qd(x)[0])
        q = s.qu(qc)[0].view(sq, b, h, d + 4)
        kv, kpe = torch.split(s.kd(x)[0], [s.c.kv_lora_rank, 4], dim=-1)
        kv = s.ku(s.kn(kv))[0].view(sq, b, h, 2 * d)
        kn, v = torch.split(kv, [d, d], dim=-1)
        k = torch.cat([kn, kpe.unsqueeze(2).expand(-1, -1, h, -1)], dim=-1)
        mask = torch.triu(torch.full((sq, sq), float("-inf"), dtype=torch.float32, device=x.device), diagonal=1)
        w = s.ww(x)[0] * (8**-0.5) * (8**-0.5)
        isc = s._compute_index_scores(s.wq(qc)[0].reshape(sq, b, 8, 8), w, s.kln(s.wk(x)[0])) + mask
        top = isc.topk(min(4, sq), dim=-1)[1]
        qq = q.permute(1, 2, 0, 3).reshape(b * h, sq, -1)
        kk = k.permute(1, 2, 3, 0).reshape(b * h, -1, sq)
        att = torch.bmm(qq.float(), kk.float()) * (d + 4) ** -0.5
        att = att.reshape(b, h, sq, sq)
        im = torch.full((b, sq, sq), float("-inf"), device=x.device).scatter_(-1, top, 0)
        im = im + mask.view(1, sq, sq)
        att = att + im.unsqueeze(1)
        att = F.softmax(att, dim=-1, dtype=torch.float32)
        vv = v.permute(1, 2, 0, 3).reshape(b * h, sq, -1)
        o = (
            torch.bmm(att.reshape(b * h, sq, sq).to(vv.dtype), vv)
            .reshape(b, h, sq, -1)
            .permute(2, 0, 1, 3)
            .contiguous()
            .reshape(sq, b, -1)
        )
        return s.o(o * torch.sigmoid(s.g(x)[0]))


class MoELayer(nn.Module):
    def __init__(s, c):
        super().__init__()
        s.c = c
        s.router = nn.Parameter(torch.zeros(6, 32))
        s.expert_bias = nn.Parameter(torch.zeros(6))
        s.dn = TELinear(32, 16)
        s.nm = WrappedTorchNorm(16, 1e-5)
        s.up = TELinear(16, 32)
        s.fc1 = nn.ModuleList([TELinear(16, 24) for _ in range(6)])
        s.fc2 = nn.ModuleList([TELinear(12, 16) for _ in range(6)])
        s.sh1 = TELinear(32, 24)
        s.sh2 = TELinear(12, 32)

    @staticmethod
    def act(x):
        a, b = torch.chunk(x, 2, dim=-1)
        return F.silu(a) * b

    def forward(s, x):
        sh = x.shape
        t = x.view(-1, 32)
        logits = F.linear(t, s.router).float()
        scores = torch.sigmoid(logits)
        _, idx = torch.topk(scores + s.expert_bias, k=2, dim=1)
        probs = torch.gather(scores, 1, idx)
        probs = probs / (probs.sum(dim=-1, keepdim=True) + 1e-20)
        rp = torch.zeros_like(logits).scatter(1, idx, probs)
        rm = torch.zeros_like(logits).int().scatter(1, idx, 1).bool()
        z = s.dn(t)[0]
        n = t.shape[0]
        tpe = rm.sum(dim=0)
        rmT = rm.T.contiguous()
        ti = torch.arange(n, device=x.device).unsqueeze(0).expand(6, -1)
        si = ti.masked_select(rmT)
        pp = rp.T.contiguous().masked_select(rmT)
        pz = z.index_select(0, si)
        outs = []
        for e, xe in enumerate(torch.split(pz, tpe.tolist())):
            outs.append(s.fc2[e](s.act(s.fc1[e](xe)[0]))[0])
        po = torch.cat(outs, 0) * pp.unsqueeze(-1)
        y = torch.zeros_like(z)
        y.scatter_add_(0, si.unsqueeze(1).expand(-1, 16), po)
        return (s.up(s.nm(y))[0] + s.sh2(s.act(s.sh1(t)[0]))[0]).view(sh), None


class AR(nn.Module):
    def __init__(s):
        super().__init__()
        s.w = nn.Parameter(torch.zeros(32))
        s.n = WrappedTorchNorm(32, 1e-5)

    def forward(s, vals):
        v = torch.stack(vals, dim=0)
        lg = torch.matmul(s.n(v), s.w.unsqueeze(-1)).squeeze(-1)
        p = torch.softmax(lg, dim=0, dtype=torch.float32)
        return torch.einsum("nsb,nsbd->sbd", p, v)


class TransformerLayer(nn.Module):
    def __init__(s, c, i):
        super().__init__()
        s.a1, s.a2 = AR(), AR()
        s.ln1, s.ln2 = WrappedTorchNorm(32, 1e-5), WrappedTorchNorm(32, 1e-5)
        s.at = GatedDeltaNet(c) if i == 0 else DSAMLA(c)
        s.mlp = MoELayer(c)

    def forward(s, v):
        h = s.a1(v) if len(v) > 1 else v[0]
        o, _ = s.at(s.ln1(h))
        v = v + [o]
        m, _ = s.mlp(s.ln2(s.a2(v)))
        return v + [m]


class GPTModel(nn.Module):
    def __init__(s):
        super().__init__()
        c = TransformerConfig()
        s.emb = nn.Embedding(50, 32)
        s.layers = nn.ModuleList([TransformerLayer(c, i) for i in range(2)])
        s.ar = AR()
        s.fn = WrappedTorchNorm(32, 1e-5)
        s.out = TELinear(32, 50)

    def forward(s, ids):
        v = [s.emb(ids).transpose(0, 1).contiguous()]
        for l in s.layers:
            v = l(v)
        return s.out(s.fn(s.ar(v)))[0].transpose(0, 1).contiguous()


def build():
    return GPTModel()


def drive(call, model, ids):
    yield "prefill", call(ids)


expect = dict(
    prefill=dict(kda=1, short_conv=1, gated_rms_norm=1, lightning_indexer=1, sparse=1, router=2, experts=2, attn_res=4)
)
