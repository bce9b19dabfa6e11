"""DeepSeek inference repo."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

world_size = 1
rank = 0


@dataclass
class ModelArgs:
    max_batch_size: int = 2
    max_seq_len: int = 32
    vocab_size: int = 50
    dim: int = 32
    inter_dim: int = 24
    moe_inter_dim: int = 12
    n_layers: int = 2
    n_dense_layers: int = 1
    n_heads: int = 2
    n_routed_experts: int = 6
    n_shared_experts: int = 1
    n_activated_experts: int = 2
    n_expert_groups: int = 3
    n_limited_groups: int = 2
    route_scale: float = 2.5
    latent: int = 16
    q_lora_rank: int = 12
    kv_lora_rank: int = 16
    qk_nope_head_dim: int = 8
    qk_rope_head_dim: int = 4
    v_head_dim: int = 8
    rope_theta: float = 10000.0
    index_n_heads: int = 8
    index_head_dim: int = 8
    index_topk: int = 4
    kda_heads: int = 2
    kda_dim: int = 8
    conv_size: int = 4


class Linear(nn.Module):
    def __init__(self, i, o, bias=False, dtype=None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(o, i, dtype=dtype))
        self.register_parameter("bias", None)

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


class ColumnParallelLinear(Linear):
    pass


class RowParallelLinear(Linear):
    pass


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.dim = dim
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim, dtype=torch.float32))

    def forward(self, x, residual=None):
        dtype = x.dtype
        if residual is None:
            x = x.float()
            var = x.pow(2).mean(-1, keepdim=True)
            x = x * torch.rsqrt(var + self.eps)
            return (self.weight * x).to(dtype)
        x = residual = x.float() + residual.float()
        var = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(var + self.eps)
        return (self.weight * x).to(dtype), residual.to(dtype)


class LayerNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.dim = dim
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        return F.layer_norm(x.float(), (self.dim,), self.weight, self.bias, self.eps).type_as(x)


def precompute_freqs_cis(args):
    dim = args.qk_rope_head_dim
    freqs = 1.0 / (args.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    freqs = torch.outer(torch.arange(args.max_seq_len), freqs)
    return torch.polar(torch.ones_like(freqs), freqs)


def apply_rotary_emb(x, freqs_cis, interleaved=True):
    dtype = x.dtype
    shape = x.shape
    if not interleaved:
        x = x.view(*shape[:-1], 2, -1).transpose(-1, -2).contiguous()
    x = torch.view_as_complex(x.float().view(*shape[:-1], -1, 2))
    freqs_cis = freqs_cis.view(1, x.size(1), 1, x.size(-1))
    y = torch.view_as_real(x * freqs_cis).flatten(3)
    if not interleaved:
        y = torch.cat([y[..., 0::2], y[..., 1::2]], dim=-1)
    return y.to(dtype)


class Indexer(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.n_heads = args.index_n_heads
        self.head_dim = args.index_head_dim
        self.rope_head_dim = args.qk_rope_head_dim
        self.index_topk = args.index_topk
        self.wq_b = Linear(args.q_lora_rank, self.n_heads * self.head_dim)
        self.wk = Linear(args.dim, self.head_dim)
        self.k_norm = LayerNorm(self.head_dim)
        self.weights_proj = Linear(args.dim, self.n_heads, dtype=torch.float32)
        self.softmax_scale = self.head_dim**-0.5
        self.register_buffer(
            "k_cache", torch.zeros(args.max_batch_size, args.max_seq_len, self.head_dim), persistent=False
        )

    def forward(self, x, qr, start_pos, freqs_cis, mask):
        bsz, seqlen, _ = x.size()
        end_pos = start_pos + seqlen
        q = self.wq_b(qr).view(bsz, seqlen, self.n_heads, self.head_dim)
        q_pe, q_nope = torch.split(q, [self.rope_head_dim, self.head_dim - self.rope_head_dim], dim=-1)
        q_pe = apply_rotary_emb(q_pe, freqs_cis, False)
        q = torch.cat([q_pe, q_nope], dim=-1)
        k = self.k_norm(self.wk(x))
        k_pe, k_nope = torch.split(k, [self.rope_head_dim, self.head_dim - self.rope_head_dim], dim=-1)
        k_pe = apply_rotary_emb(k_pe.unsqueeze(2), freqs_cis, False).squeeze(2)
        k = torch.cat([k_pe, k_nope], dim=-1)
        self.k_cache[:bsz, start_pos:end_pos] = k
        weights = self.weights_proj(x.float()) * self.n_heads**-0.5
        weights = weights * self.softmax_scale
        logits = torch.einsum("bshd,btd->bsht", q.float(), self.k_cache[:bsz, :end_pos].float())
        index_score = (logits.relu() * weights.unsqueeze(-1)).sum(dim=2)
        if mask is not None:
            index_score += mask
        return index_score.topk(min(self.index_topk, end_pos), dim=-1)[1]


class MLA(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.n_local_heads = args.n_heads
        self.nope, self.rope, self.vd, self.lora = (
            args.qk_nope_head_dim,
            args.qk_rope_head_dim,
            args.v_head_dim,
            args.kv_lora_rank,
        )
        self.qk_head_dim = self.nope + self.rope
        self.n_heads = args.n_heads
        self.wq_a = Linear(args.dim, args.q_lora_rank)
        self.q_norm = RMSNorm(args.q_lora_rank)
        self.wq_b = ColumnParallelLinear(args.q_lora_rank, self.n_heads * self.qk_head_dim)
        self.wkv_a = Linear(args.dim, self.lora + self.rope)
        self.kv_norm = RMSNorm(self.lora)
        self.wkv_b = ColumnParallelLinear(self.lora, self.n_heads * (self.nope + self.vd))
        self.wg = ColumnParallelLinear(args.dim, self.n_heads * self.vd)
        self.wo = RowParallelLinear(self.n_heads * self.vd, args.dim)
        self.softmax_scale = self.qk_head_dim**-0.5
        self.indexer = Indexer(args)
        self.register_buffer(
            "kv_cache", torch.zeros(args.max_batch_size, args.max_seq_len, self.lora), persistent=False
        )
        self.register_buffer(
            "pe_cache", torch.zeros(args.max_batch_size, args.max_seq_len, self.rope), persistent=False
        )

    def forward(self, x, start_pos, freqs_cis, mask):
        bsz, seqlen, _ = x.size()
        end_pos = start_pos + seqlen
        qr = self.q_norm(self.wq_a(x))
        q = self.wq_b(qr).view(bsz, seqlen, self.n_local_heads, self.qk_head_dim)
        q_nope, q_pe = torch.split(q, [self.nope, self.rope], dim=-1)
        q_pe = apply_rotary_emb(q_pe, freqs_cis)
        kv, k_pe = torch.split(self.wkv_a(x), [self.lora, self.rope], dim=-1)
        kv = self.kv_norm(kv)
        k_pe = apply_rotary_emb(k_pe.unsqueeze(2), freqs_cis)
        self.kv_cache[:bsz, start_pos:end_pos] = kv
        self.pe_cache[:bsz, start_pos:end_pos] = k_pe.squeeze(2)
        if mask is not None:
            q = torch.cat([q_nope, q_pe], dim=-1)
            kv = self.wkv_b(kv).view(bsz, seqlen, self.n_local_heads, self.nope + self.vd)
            k_nope, v = torch.split(kv, [self.nope, self.vd], dim=-1)
            k = torch.cat([k_nope, k_pe.expand(-1, -1, self.n_local_heads, -1)], dim=-1)
            scores = torch.einsum("bshd,bthd->bsht", q, k).mul_(self.softmax_scale)
            topk_indices = self.indexer(x, qr, start_pos, freqs_cis, mask)
            index_mask = torch.full((bsz, seqlen, seqlen), float("-inf"), device=x.device).scatter_(-1, topk_indices, 0)
            index_mask += mask
            scores += index_mask.unsqueeze(2)
            scores = scores.softmax(dim=-1)
            x_o = torch.einsum("bsht,bthd->bshd", scores, v)
        else:
            wkv_b = self.wkv_b.weight.view(self.n_local_heads, -1, self.lora)
            q_nope = torch.einsum("bshd,hdc->bshc", q_nope, wkv_b[:, : self.nope])
            scores = (
                torch.einsum("bshc,btc->bsht", q_nope, self.kv_cache[:bsz, :end_pos])
                + torch.einsum("bshr,btr->bsht", q_pe, self.pe_cache[:bsz, :end_pos])
            ) * self.softmax_scale
            topk_indices = self.indexer(x, qr, start_pos, freqs_cis, mask)
            index_mask = torch.full((bsz, 1, end_pos), float("-inf"), device=x.device).scatter_(-1, topk_indices, 0)
            scores += index_mask.unsqueeze(2)
            scores = scores.softmax(dim=-1)
            x_o = torch.einsum("bsht,btc->bshc", scores, self.kv_cache[:bsz, :end_pos])
            x_o = torch.einsum("bshc,hdc->bshd", x_o, wkv_b[:, -self.vd :])
        return self.wo(x_o.flatten(2) * self.wg(x).sigmoid())


class KDA(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.h, self.d, self.w = args.kda_heads, args.kda_dim, args.conv_size
        n = self.h * self.d
        self.wqkv = ColumnParallelLinear(args.dim, 3 * n)
        self.conv_weight = nn.Parameter(torch.empty(3 * n, self.w))
        self.wf_a = Linear(args.dim, self.d)
        self.wf_b = Linear(self.d, n)
        self.wb = Linear(args.dim, self.h)
        self.wg = Linear(args.dim, n)
        self.wo = RowParallelLinear(n, args.dim)
        self.A_log = nn.Parameter(torch.empty(self.h))
        self.dt_bias = nn.Parameter(torch.empty(self.h, self.d))
        self.o_norm = RMSNorm(self.d, 1e-5)
        self.register_buffer("conv_cache", torch.zeros(args.max_batch_size, self.w - 1, 3 * n), persistent=False)
        self.register_buffer("state", torch.zeros(args.max_batch_size, self.h, self.d, self.d), persistent=False)

    def forward(self, x, start_pos):
        bsz, seqlen, _ = x.size()
        qkv = self.wqkv(x)
        if start_pos == 0:
            self.conv_cache[:bsz].zero_()
            self.state[:bsz].zero_()
        full = torch.cat([self.conv_cache[:bsz], qkv], dim=1)
        self.conv_cache[:bsz] = full[:, -(self.w - 1) :]
        qkv = F.silu((full.unfold(1, self.w, 1) * self.conv_weight).sum(-1))
        q, k, v = (t.view(bsz, seqlen, self.h, self.d) for t in qkv.chunk(3, dim=-1))
        q = q * torch.rsqrt(q.float().square().sum(-1, keepdim=True) + 1e-6) * self.d**-0.5
        k = k * torch.rsqrt(k.float().square().sum(-1, keepdim=True) + 1e-6)
        g = -5.0 * torch.sigmoid(
            self.A_log.exp()[:, None]
            * (self.wf_b(self.wf_a(x)).float().view(bsz, seqlen, self.h, self.d) + self.dt_bias)
        )
        beta = self.wb(x).float().sigmoid()
        S = self.state[:bsz]
        outs = []
        for t in range(seqlen):
            S = S * g[:, t].exp()[..., None]
            u = (v[:, t] - torch.einsum("bhkv,bhk->bhv", S, k[:, t])) * beta[:, t, :, None]
            S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], u)
            outs.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]))
        self.state[:bsz] = S
        o = torch.stack(outs, dim=1)
        o = self.o_norm(o) * torch.sigmoid(self.wg(x).float()).view(bsz, seqlen, self.h, self.d)
        return self.wo(o.to(x.dtype).flatten(2))


class MLP(nn.Module):
    def __init__(self, dim, inter):
        super().__init__()
        self.w1 = ColumnParallelLinear(dim, inter)
        self.w2 = RowParallelLinear(inter, dim)
        self.w3 = ColumnParallelLinear(dim, inter)

    def forward(self, x):
        return self.w2((F.silu(self.w1(x).float()) * self.w3(x).float()).type_as(x))


Expert = MLP


class Gate(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.topk = args.n_activated_experts
        self.n_groups = args.n_expert_groups
        self.topk_groups = args.n_limited_groups
        self.route_scale = args.route_scale
        self.weight = nn.Parameter(torch.empty(args.n_routed_experts, args.dim))
        self.bias = nn.Parameter(torch.empty(args.n_routed_experts))

    def forward(self, x):
        scores = F.linear(x.float(), self.weight.float()).sigmoid()
        original_scores = scores
        scores = scores + self.bias
        scores = scores.view(x.size(0), self.n_groups, -1)
        group_scores = scores.topk(2, dim=-1)[0].sum(dim=-1)
        indices = group_scores.topk(self.topk_groups, dim=-1)[1]
        mask = scores.new_ones(x.size(0), self.n_groups, dtype=bool).scatter_(1, indices, False)
        scores = scores.masked_fill_(mask.unsqueeze(-1), float("-inf")).flatten(1)
        indices = torch.topk(scores, self.topk, dim=-1)[1]
        weights = original_scores.gather(1, indices)
        weights /= weights.sum(dim=-1, keepdim=True)
        weights *= self.route_scale
        return weights, indices


class MoE(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.dim = args.dim
        self.n_routed_experts = args.n_routed_experts
        self.experts_start_idx = 0
        self.experts_end_idx = args.n_routed_experts
        self.gate = Gate(args)
        self.down = Linear(args.dim, args.latent)
        self.norm = RMSNorm(args.latent, 1e-5)
        self.up = Linear(args.latent, args.dim)
        self.experts = nn.ModuleList([Expert(args.latent, args.moe_inter_dim) for _ in range(args.n_routed_experts)])
        self.shared_experts = MLP(args.dim, args.n_shared_experts * args.moe_inter_dim)

    def forward(self, x):
        shape = x.size()
        x = x.view(-1, self.dim)
        weights, indices = self.gate(x)
        z = self.down(x)
        y = torch.zeros_like(z, dtype=torch.float32)
        counts = torch.bincount(indices.flatten(), minlength=self.n_routed_experts).tolist()
        for i in range(self.experts_start_idx, self.experts_end_idx):
            if counts[i] == 0:
                continue
            expert = self.experts[i]
            idx, top = torch.where(indices == i)
            y[idx] += expert(z[idx]) * weights[idx, top, None]
        y = self.up(self.norm(y)) + self.shared_experts(x)
        return y.type_as(x).view(shape)


class AttnRes(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.query = nn.Parameter(torch.empty(dim))
        self.norm = RMSNorm(dim, 1e-5)

    def forward(self, sources):
        v = torch.stack(sources, dim=2)
        p = torch.einsum("bsnd,d->bsn", self.norm(v).float(), self.query.float()).softmax(dim=-1)
        return torch.einsum("bsn,bsnd->bsd", p, v.float()).type_as(v)


class Block(nn.Module):
    def __init__(self, layer_id, args):
        super().__init__()
        self.layer_id = layer_id
        self.attn = MLA(args) if layer_id % 2 == 1 else KDA(args)
        self.ffn = MLP(args.dim, args.inter_dim) if layer_id < args.n_dense_layers else MoE(args)
        self.attn_norm = RMSNorm(args.dim, 1e-5)
        self.ffn_norm = RMSNorm(args.dim, 1e-5)
        self.attn_res = AttnRes(args.dim)
        self.ffn_res = AttnRes(args.dim)

    def forward(self, sources, start_pos, freqs_cis, mask):
        h = self.attn_norm(self.attn_res(sources) if len(sources) > 1 else sources[0])
        a = self.attn(h, start_pos, freqs_cis, mask) if isinstance(self.attn, MLA) else self.attn(h, start_pos)
        sources = sources + [a]
        f = self.ffn(self.ffn_norm(self.ffn_res(sources)))
        return sources + [f]


class Transformer(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.embed = nn.Embedding(args.vocab_size, args.dim)
        self.layers = nn.ModuleList(Block(i, args) for i in range(args.n_layers))
        self.out_res = AttnRes(args.dim)
        self.norm = RMSNorm(args.dim, 1e-5)
        self.head = ColumnParallelLinear(args.dim, args.vocab_size)
        self.register_buffer("freqs_cis", precompute_freqs_cis(args), persistent=False)

    @torch.inference_mode()
    def forward(self, tokens, start_pos=0):
        seqlen = tokens.size(1)
        freqs_cis = self.freqs_cis[start_pos : start_pos + seqlen]
        mask = torch.full((seqlen, seqlen), float("-inf"), device=tokens.device).triu_(1) if seqlen > 1 else None
        sources = [self.embed(tokens)]
        for layer in self.layers:
            sources = layer(sources, start_pos, freqs_cis, mask)
        h = self.norm(self.out_res(sources))
        return self.head(h[:, -1].float())


def build():
    return Transformer(ModelArgs())


def drive(call, model, ids):
    yield "prefill", call(ids, 0).clone()
    yield "decode", call((ids[:, :1] + 3) % 50, 12).clone()


_e = dict(kda=1, short_conv=1, gated_rms_norm=1, lightning_indexer=1, sparse=1, router=1, experts=1, attn_res=4)
expect = dict(prefill=_e, decode=_e)
