"""vLLM / SGLang runner: flattened tokens, paged caches, metadata object, state pools."""

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class ForwardMetadata:
    num_prefills: int
    num_decodes: int
    max_query_len: int
    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    state_indices: torch.Tensor
    positions: torch.Tensor
    token_to_req: torch.Tensor


BLOCK = 4


class ReplicatedLinear(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(o, i), requires_grad=False)

    def forward(self, x):
        return F.linear(x, self.weight), None


class RMSNorm(nn.Module):
    def __init__(self, d, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))
        self.variance_epsilon = eps

    def forward_native(self, x):
        orig = x.dtype
        x = x.to(torch.float32)
        var = x.pow(2).mean(dim=-1, keepdim=True)
        x = x * torch.rsqrt(var + self.variance_epsilon)
        return x.to(orig) * self.weight

    forward = forward_native


class RMSNormGated(nn.Module):
    def __init__(self, d, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))
        self.eps = eps

    def forward(self, x, z):
        x = x.float()
        v = x.pow(2).mean(-1, keepdim=True)
        return (x * torch.rsqrt(v + self.eps) * self.weight.float() * torch.sigmoid(z.float())).to(z.dtype)


def causal_conv1d_update_native(x, state_pool, weight, idx):
    # x [n, c], state_pool [slots, c, w-1]
    st = state_pool[idx]
    win = torch.cat([st, x.unsqueeze(-1)], dim=-1)
    state_pool[idx] = win[..., 1:]
    return F.silu((win * weight.unsqueeze(0)).sum(-1))


def causal_conv1d_fn_native(x, state_pool, weight, idx):
    # x [b, t, c]
    xt = x.transpose(1, 2)
    c = xt.shape[1]
    state_pool[idx] = F.pad(xt, (3, 0))[..., -3:]
    out = F.conv1d(F.pad(xt, (3, 0)), weight.unsqueeze(1), groups=c)
    return F.silu(out).transpose(1, 2)


class KimiDeltaAttention(nn.Module):
    def __init__(self, d=32, h=2, k=8):
        super().__init__()
        self.h, self.k = h, k
        n = h * k
        self.in_proj_qkvgb = ReplicatedLinear(d, 4 * n + h)
        self.f_a = ReplicatedLinear(d, k)
        self.f_b = ReplicatedLinear(k, n)
        self.conv_weight = nn.Parameter(torch.empty(3 * n, 4))
        self.A_log = nn.Parameter(torch.empty(1, 1, h, 1))
        self.dt_bias = nn.Parameter(torch.empty(n))
        self.o_norm = RMSNormGated(k, 1e-5)
        self.o_proj = ReplicatedLinear(n, d)

    def forward(self, x, meta, kv):
        conv_pool, ssm_pool = kv
        n = self.h * self.k
        proj, _ = self.in_proj_qkvgb(x)
        mixed, z, b = proj.split([3 * n, n, self.h], dim=-1)
        raw, _ = self.f_b(self.f_a(x)[0])
        g = -5.0 * torch.sigmoid(
            self.A_log.float().exp().view(-1, 1) * (raw.float() + self.dt_bias).view(-1, self.h, self.k)
        )
        beta = b.float().sigmoid()
        if meta.num_prefills > 0:
            B = meta.num_prefills
            T = x.shape[0] // B
            mixed = causal_conv1d_fn_native(
                mixed.view(B, T, -1), conv_pool, self.conv_weight, meta.state_indices
            ).reshape(B * T, -1)
        else:
            B, T = meta.num_decodes, 1
            mixed = causal_conv1d_update_native(mixed, conv_pool, self.conv_weight, meta.state_indices)
        q, k, v = (t.view(B, T, self.h, self.k) for t in mixed.split(n, dim=-1))
        q = q / (q.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt()
        k = k / (k.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt()
        g = g.view(B, T, self.h, self.k)
        beta = beta.view(B, T, self.h)
        # pool is [slots, h, v, k]
        if meta.num_prefills > 0:
            state = torch.zeros(B, self.h, self.k, self.k)
        else:
            state = ssm_pool[meta.state_indices]
        out = torch.empty(B, T, self.h, self.k)
        for t in range(T):
            state = state * g[:, t].exp().unsqueeze(-2)
            pred = torch.matmul(state, k[:, t].unsqueeze(-1)).squeeze(-1)
            delta = beta[:, t].unsqueeze(-1) * (v[:, t] - pred)
            state = state + delta.unsqueeze(-1) * k[:, t].unsqueeze(-2)
            out[:, t] = torch.matmul(state, (q[:, t] * self.k**-0.5).unsqueeze(-1)).squeeze(-1)
        ssm_pool[meta.state_indices] = state
        o = self.o_norm(out.view(-1, self.h, self.k), z.view(-1, self.h, self.k))
        return self.o_proj(o.reshape(-1, n))[0]


class SparseMLA(nn.Module):
    def __init__(self, d=32, h=2):
        super().__init__()
        self.h = h
        self.nope, self.rope, self.vd, self.lora, self.ih, self.id, self.topk = 8, 4, 8, 16, 8, 8, 4
        self.fused_qkv_a = ReplicatedLinear(d, 12 + self.lora + self.rope)
        self.q_a_layernorm = RMSNorm(12, 1e-6)
        self.kv_a_layernorm = RMSNorm(self.lora, 1e-6)
        self.q_b = ReplicatedLinear(12, h * (self.nope + self.rope))
        self.W_UK = nn.Parameter(torch.empty(h, self.nope, self.lora))
        self.W_UV = nn.Parameter(torch.empty(h, self.lora, self.vd))
        self.g_proj = ReplicatedLinear(d, h * self.vd)
        self.o_proj = ReplicatedLinear(h * self.vd, d)
        self.wq_b = ReplicatedLinear(12, self.ih * self.id)
        self.wk = ReplicatedLinear(d, self.id)
        self.k_norm = nn.LayerNorm(self.id, eps=1e-6)
        self.weights_proj = ReplicatedLinear(d, self.ih)

    def forward(self, x, meta, kv):
        kv_cache, ik_cache = kv  # [blocks, BLOCK, lora+rope], [blocks, BLOCK, id]
        qa, c, pe = self.fused_qkv_a(x)[0].split([12, self.lora, self.rope], dim=-1)
        qa = self.q_a_layernorm(qa.contiguous())
        c = self.kv_a_layernorm(c.contiguous())
        q = self.q_b(qa)[0].view(-1, self.h, self.nope + self.rope)
        qn, qp = q.split([self.nope, self.rope], dim=-1)
        kv_cache.view(-1, kv_cache.shape[-1]).index_copy_(0, meta.slot_mapping, torch.cat([c, pe], dim=-1))
        ki = self.k_norm(self.wk(x)[0])
        ik_cache.view(-1, self.id).index_copy_(0, meta.slot_mapping, ki)
        qi = self.wq_b(qa)[0].view(-1, self.ih, self.id)
        w = self.weights_proj(x)[0].float() * self.ih**-0.5 * self.id**-0.5
        # logits over the request's pages
        keys = ik_cache[meta.block_tables].flatten(1, 2)  # [B, S, id]
        keys = keys[meta.token_to_req]  # [N, S, id]
        s = torch.einsum("nhd,nsd->nhs", qi.float(), keys.float()).relu()
        s = (s * w.unsqueeze(-1)).sum(1)
        pos = torch.arange(s.shape[1], device=x.device)
        s = s.masked_fill(pos[None] > meta.positions[:, None], float("-inf"))
        vals, topk = s.topk(min(self.topk, s.shape[1]), dim=-1)
        topk = torch.where(vals == float("-inf"), -1, topk)
        # attention over selected rows, absorbed
        safe = topk.clamp(min=0)
        bt = meta.block_tables[meta.token_to_req]
        slots = bt.gather(1, safe // BLOCK) * BLOCK + safe % BLOCK
        rows = kv_cache.view(-1, kv_cache.shape[-1])[slots]  # [N,k,lora+rope]
        ql = torch.cat([torch.einsum("nhd,hdc->nhc", qn, self.W_UK), qp], dim=-1)
        att = torch.einsum("nhc,nkc->nhk", ql, rows) * (self.nope + self.rope) ** -0.5
        att = att.masked_fill((topk < 0).unsqueeze(1), float("-inf")).softmax(-1, dtype=torch.float32)
        o = torch.einsum("nhk,nkc->nhc", att, rows[..., : self.lora])
        o = torch.bmm(o.transpose(0, 1), self.W_UV).transpose(0, 1).reshape(-1, self.h * self.vd)
        return self.o_proj(o * torch.sigmoid(self.g_proj(x)[0]))[0]


def grouped_topk(logits, bias, k, scale):
    scores = logits.sigmoid()
    _, ids = torch.topk(scores + bias.unsqueeze(0), k=k, dim=-1, sorted=False)
    w = scores.gather(1, ids)
    w = w / w.sum(dim=-1, keepdim=True)
    return (w * scale).to(torch.float32), ids.to(torch.int32)


class SiluAndMul(nn.Module):
    def forward(self, x):
        d = x.shape[-1] // 2
        return F.silu(x[..., :d]) * x[..., d:]


class FusedMoE(nn.Module):
    def __init__(self, e, d, i):
        super().__init__()
        self.e = e
        self.w13_weight = nn.Parameter(torch.empty(e, 2 * i, d))
        self.w2_weight = nn.Parameter(torch.empty(e, d, i))
        self.act = SiluAndMul()

    def forward(self, x, w, ids):
        B, D = x.shape
        topk = ids.shape[1]
        x = x.view(B, -1, D).repeat(1, topk, 1).reshape(-1, D)
        out = torch.zeros(B * topk, self.w2_weight.shape[1], dtype=x.dtype, device=x.device)
        ids = ids.view(-1)
        for i in range(self.e):
            mask = ids == i
            if mask.sum():
                out[mask] = self.act(x[mask] @ self.w13_weight[i].transpose(0, 1)) @ self.w2_weight[i].transpose(0, 1)
        return (out.view(B, -1, self.w2_weight.shape[1]) * w.view(B, -1, 1).to(out.dtype)).sum(dim=1)


class KimiMoE(nn.Module):
    def __init__(self, d=32, e=6):
        super().__init__()
        self.gate = ReplicatedLinear(d, e)
        self.e_bias = nn.Parameter(torch.empty(e))
        self.down = ReplicatedLinear(d, 16)
        self.experts = FusedMoE(e, 16, 12)
        self.norm = RMSNorm(16, 1e-5)
        self.up = ReplicatedLinear(16, d)
        self.s_gu = ReplicatedLinear(d, 24)
        self.s_d = ReplicatedLinear(12, d)
        self.act = SiluAndMul()

    def forward(self, x):
        w, ids = grouped_topk(self.gate(x.float())[0], self.e_bias, 2, 1.5)
        y = self.experts(self.down(x)[0], w, ids)
        y = self.up(self.norm(y))[0]
        return y + self.s_d(self.act(self.s_gu(x)[0]))[0]


class AttnResidual(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.norm = RMSNorm(d, 1e-5)
        self.proj = ReplicatedLinear(d, 1)

    def forward(self, bank, n, prefix):
        rows = torch.cat([bank[:, :n], prefix.unsqueeze(1)], dim=1)
        prob = torch.softmax(self.proj(self.norm(rows))[0].squeeze(-1).float(), dim=-1)
        return (prob.unsqueeze(-1) * rows.float()).sum(dim=1).to(prefix.dtype)


class Layer(nn.Module):
    def __init__(self, i):
        super().__init__()
        self.i = i
        self.attn = KimiDeltaAttention() if i % 2 == 0 else SparseMLA()
        self.mlp = KimiMoE()
        self.ln1 = RMSNorm(32, 1e-5)
        self.ln2 = RMSNorm(32, 1e-5)
        self.r1 = AttnResidual()
        self.r2 = AttnResidual()

    def forward(self, prefix, bank, meta, kv):
        h = self.r1(bank, 1, prefix) if self.i > 0 else prefix
        if self.i == 0:
            bank[:, 0] = prefix
            prefix = torch.zeros_like(prefix)
        prefix = prefix + self.attn(self.ln1(h), meta, kv)
        return prefix + self.mlp(self.ln2(self.r2(bank, 1, prefix)))


class KimiModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.layers = nn.ModuleList([Layer(i) for i in range(2)])
        self.fr = AttnResidual()
        self.norm = RMSNorm(32, 1e-5)
        self.lm_head = ReplicatedLinear(32, 50)

    def forward(self, input_ids, meta, kv_caches):
        h = self.embed(input_ids)
        bank = h.new_zeros(h.shape[0], 1, h.shape[1])
        for l, kv in zip(self.layers, kv_caches):
            h = l(h, bank, meta, kv)
        return self.lm_head(self.norm(self.fr(bank, 1, h)))[0]


def build():
    return KimiModel()


def drive(call, model, ids):
    kv = [(torch.zeros(4, 48, 3), torch.zeros(4, 2, 8, 8)), (torch.zeros(12, BLOCK, 20), torch.zeros(12, BLOCK, 8))]
    bt = torch.tensor([[3, 1, 7, 5], [2, 8, 4, 9]])
    p = torch.arange(12).repeat(2)
    r = torch.arange(2).repeat_interleave(12)
    slot = bt[r, p // BLOCK] * BLOCK + p % BLOCK
    m = ForwardMetadata(2, 0, 12, slot, bt, torch.tensor([12, 12]), torch.tensor([2, 1]), p, r)
    yield "prefill", call(ids.flatten(), m, kv)
    p = torch.tensor([12, 12])
    r = torch.arange(2)
    slot = bt[r, p // BLOCK] * BLOCK + p % BLOCK
    m = ForwardMetadata(0, 2, 1, slot, bt, torch.tensor([13, 13]), torch.tensor([2, 1]), p, r)
    yield "decode", call((ids[:, 0] + 3) % 50, m, kv)


_e = dict(kda=1, short_conv=1, gated_rms_norm=1, lightning_indexer=1, sparse=1, router=2, experts=2, attn_res=4)
expect = dict(prefill=_e, decode=_e)
