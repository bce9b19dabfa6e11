"""torchtune: builders, KVCache with input_pos, GroupedExperts by split and tolist."""

import torch
import torch.nn.functional as F
from torch import nn


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.normalized_shape = (dim,)
        self.scale = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return F.rms_norm(x.float(), self.normalized_shape, self.scale.float(), self.eps).to(x.dtype)


class KVCache(nn.Module):
    def __init__(self, b, s, *dims):
        super().__init__()
        self.n = len(dims)
        for i, d in enumerate(dims):
            self.register_buffer(f"c{i}", torch.zeros(b, s, d), persistent=False)
        self.register_buffer("cache_pos", torch.arange(0, s), persistent=False)

    def reset(self):
        for i in range(self.n):
            getattr(self, f"c{i}").zero_()
        self.cache_pos -= self.cache_pos.min().item()

    def update(self, *vals):
        s = vals[0].shape[1]
        out = []
        for i, v in enumerate(vals):
            c = getattr(self, f"c{i}")
            c[:, self.cache_pos[:s]] = v
            out.append(c)
        self.cache_pos.add_(s)
        return out


class StateCache(nn.Module):
    def __init__(self, b, w, c, h, k, v):
        super().__init__()
        self.register_buffer("conv", torch.zeros(b, c, w), persistent=False)
        self.register_buffer("state", torch.zeros(b, h, k, v), persistent=False)


class DeltaAttention(nn.Module):
    def __init__(
        self, *, embed_dim, num_heads, head_dim, qkv_proj, decay_proj, beta_proj, gate_proj, output_proj, norm, cache
    ):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.qkv_proj = qkv_proj
        self.decay_proj = decay_proj
        self.beta_proj = beta_proj
        self.gate_proj = gate_proj
        self.output_proj = output_proj
        self.norm = norm
        self.cache = cache
        self.conv_weight = nn.Parameter(torch.zeros(3 * num_heads * head_dim, 1, 4))
        self.A_log = nn.Parameter(torch.zeros(num_heads))
        self.dt_bias = nn.Parameter(torch.zeros(num_heads * head_dim))

    def forward(self, x, *, mask=None, input_pos=None):
        b, s, _ = x.shape
        h, d = self.num_heads, self.head_dim
        qkv = torch.cat([self.cache.conv, self.qkv_proj(x).transpose(1, 2)], dim=2)
        self.cache.conv.copy_(qkv[:, :, -3:])
        qkv = F.silu(F.conv1d(qkv, self.conv_weight, groups=qkv.shape[1])).transpose(1, 2)
        q, k, v = [y.reshape(b, s, h, d) for y in torch.tensor_split(qkv, 3, dim=-1)]
        q = q * (q.pow(2).sum(-1, keepdim=True) + 1e-6).rsqrt() * (d**-0.5)
        k = k * (k.pow(2).sum(-1, keepdim=True) + 1e-6).rsqrt()
        log_decay = -5.0 * torch.sigmoid(
            torch.exp(self.A_log).unsqueeze(-1) * (self.decay_proj(x) + self.dt_bias).view(b, s, h, d)
        )
        decay = log_decay.exp()
        beta = self.beta_proj(x).sigmoid().unsqueeze(-1)
        state = self.cache.state.clone()
        out = torch.empty_like(v)
        for i in range(s):
            state = state * decay[:, i].unsqueeze(-1)
            recalled = torch.matmul(k[:, i].unsqueeze(-2), state).squeeze(-2)
            state = torch.addcmul(state, k[:, i].unsqueeze(-1), (beta[:, i] * (v[:, i] - recalled)).unsqueeze(-2))
            out[:, i] = torch.matmul(q[:, i].unsqueeze(-2), state).squeeze(-2)
        self.cache.state.copy_(state)
        out = self.norm(out) * torch.sigmoid(self.gate_proj(x)).view(b, s, h, d)
        return self.output_proj(out.flatten(-2))


class LatentSparseAttention(nn.Module):
    def __init__(
        self,
        *,
        embed_dim,
        num_heads,
        head_dim,
        latent_dim,
        q_latent_dim,
        q_down,
        q_norm,
        q_up,
        kv_down,
        kv_norm,
        kv_up,
        gate_proj,
        output_proj,
        index_q,
        index_k,
        index_norm,
        index_w,
        topk,
        kv_cache,
    ):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.topk = topk
        self.kv_cache = kv_cache
        (
            self.q_down,
            self.q_norm,
            self.q_up,
            self.kv_down,
            self.kv_norm,
            self.kv_up,
            self.gate_proj,
            self.output_proj,
        ) = q_down, q_norm, q_up, kv_down, kv_norm, kv_up, gate_proj, output_proj
        self.index_q, self.index_k, self.index_norm, self.index_w = index_q, index_k, index_norm, index_w

    def forward(self, x, *, mask, input_pos=None):
        b, s, _ = x.shape
        h, d = self.num_heads, self.head_dim
        ql = self.q_norm(self.q_down(x))
        c = self.kv_norm(self.kv_down(x))
        ik = self.index_norm(self.index_k(x))
        c, ik = self.kv_cache.update(c, ik)
        m = mask[input_pos]  # [b?, s, S] bool
        iq = self.index_q(ql).view(b, s, 8, 8)
        w = self.index_w(x)
        score = torch.matmul(iq, ik.unsqueeze(1).transpose(-1, -2)).relu_()
        score = torch.matmul(w.unsqueeze(-2), score).squeeze(-2)
        score = torch.where(m, score, torch.tensor(float("-inf"), dtype=score.dtype))
        top = torch.topk(score, self.topk, dim=-1).indices
        allowed = torch.zeros_like(score, dtype=torch.bool).scatter_(-1, top, True).logical_and(m)
        q = self.q_up(ql).view(b, s, h, d).transpose(1, 2)
        k, v = self.kv_up(c).view(b, -1, h, 2 * d).transpose(1, 2).chunk(2, dim=-1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed[:, None], dropout_p=0.0, is_causal=False)
        out = out.transpose(1, 2).contiguous().view(b, s, -1)
        return self.output_proj(out * F.sigmoid(self.gate_proj(x)))


class TokenChoiceTopKRouter(nn.Module):
    def __init__(self, *, gate, dim, num_experts, experts_per_token):
        super().__init__()
        self.gate = gate
        self.num_experts = num_experts
        self.experts_per_token = experts_per_token
        self.expert_bias = nn.Parameter(torch.zeros(num_experts))

    def forward(self, x):
        scores = torch.sigmoid(self.gate(x).to(torch.float32))
        _, sel = torch.topk(scores + self.expert_bias, k=self.experts_per_token, dim=1)
        top = scores.gather(dim=1, index=sel)
        top = top / top.sum(dim=-1, keepdim=True)
        n = torch.histc(sel.view(-1).float(), bins=self.num_experts, min=0, max=self.num_experts)
        order = torch.argsort(sel.view(-1), stable=True)
        top = top.view(-1)[order]
        token = order // self.experts_per_token
        return top, token, n


class GroupedExperts(nn.Module):
    def __init__(self, *, dim, hidden_dim, num_experts):
        super().__init__()
        self.num_experts = num_experts
        self.gate_proj = nn.Parameter(torch.empty(num_experts, dim, hidden_dim))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))
        self.up_proj = nn.Parameter(torch.empty(num_experts, dim, hidden_dim))

    def forward(self, x, n):
        x = torch.split(x, split_size_or_sections=n.int().tolist(), dim=0)
        outs = []
        for i, xe in enumerate(x):
            h = F.silu(torch.matmul(xe, self.gate_proj[i]))
            h = h * torch.matmul(xe, self.up_proj[i])
            outs.append(torch.matmul(h, self.down_proj[i]))
        return torch.cat(outs, dim=0)


class MoE(nn.Module):
    def __init__(self, *, experts, router, down, norm, up, shared_expert):
        super().__init__()
        self.experts, self.router, self.down, self.norm, self.up, self.shared_expert = (
            experts,
            router,
            down,
            norm,
            up,
            shared_expert,
        )

    def forward(self, x):
        b, s, d = x.shape
        x = x.reshape(-1, d)
        top, token, n = self.router(x)
        z = self.down(x)
        idx = token.reshape(-1, 1).expand(-1, z.shape[-1])
        routed = torch.gather(z, 0, idx)
        out = self.experts(routed, n) * top.reshape(-1, 1)
        y = torch.zeros_like(z)
        y = y.scatter_add(0, idx, out)
        return (self.up(self.norm(y)) + self.shared_expert(x)).reshape(b, s, d)


class FeedForward(nn.Module):
    def __init__(self, *, gate_proj, down_proj, up_proj):
        super().__init__()
        self.w1, self.w2, self.w3, self.activation = gate_proj, down_proj, up_proj, nn.SiLU()

    def forward(self, x):
        return self.w2(self.activation(self.w1(x)) * self.w3(x))


class DepthAttention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.query = nn.Linear(dim, 1, bias=False)
        self.norm = RMSNorm(dim, 1e-5)

    def forward(self, sources: list[torch.Tensor]):
        x = torch.stack(sources, dim=-2)
        w = torch.softmax(self.query(self.norm(x)), dim=-2)
        return torch.sum(w * x, dim=-2)


class SelfAttentionLayer(nn.Module):
    def __init__(self, attn, mlp, *, sa_norm, mlp_norm, sa_res, mlp_res):
        super().__init__()
        self.attn, self.mlp, self.sa_norm, self.mlp_norm, self.sa_res, self.mlp_res = (
            attn,
            mlp,
            sa_norm,
            mlp_norm,
            sa_res,
            mlp_res,
        )

    def forward(self, xs, *, mask, input_pos):
        xs = xs + [self.attn(self.sa_norm(self.sa_res(xs)), mask=mask, input_pos=input_pos)]
        return xs + [self.mlp(self.mlp_norm(self.mlp_res(xs)))]


class TransformerDecoder(nn.Module):
    def __init__(self, *, tok_embeddings, layers, res, norm, output, max_seq_len):
        super().__init__()
        self.tok_embeddings, self.layers, self.res, self.norm, self.output = (
            tok_embeddings,
            nn.ModuleList(layers),
            res,
            norm,
            output,
        )
        self.register_buffer(
            "causal_mask", torch.tril(torch.ones(max_seq_len, max_seq_len, dtype=torch.bool)), persistent=False
        )

    def forward(self, tokens, *, input_pos):
        xs = [self.tok_embeddings(tokens)]
        for l in self.layers:
            xs = l(xs, mask=self.causal_mask, input_pos=input_pos)
        return self.output(self.norm(self.res(xs))).float()


def lin(i, o):
    return nn.Linear(i, o, bias=False)


def moe_(d):
    return MoE(
        experts=GroupedExperts(dim=16, hidden_dim=12, num_experts=6),
        router=TokenChoiceTopKRouter(gate=lin(d, 6), dim=d, num_experts=6, experts_per_token=2),
        down=lin(d, 16),
        norm=RMSNorm(16, 1e-5),
        up=lin(16, d),
        shared_expert=FeedForward(gate_proj=lin(d, 12), down_proj=lin(12, d), up_proj=lin(d, 12)),
    )


def k31(d=32, b=2, s=16):
    kda = DeltaAttention(
        embed_dim=d,
        num_heads=2,
        head_dim=8,
        qkv_proj=lin(d, 48),
        decay_proj=nn.Sequential(lin(d, 8), lin(8, 16)),
        beta_proj=lin(d, 2),
        gate_proj=lin(d, 16),
        output_proj=lin(16, d),
        norm=RMSNorm(8, 1e-5),
        cache=StateCache(b, 3, 48, 2, 8, 8),
    )
    mla = LatentSparseAttention(
        embed_dim=d,
        num_heads=2,
        head_dim=8,
        latent_dim=16,
        q_latent_dim=12,
        q_down=lin(d, 12),
        q_norm=RMSNorm(12),
        q_up=lin(12, 16),
        kv_down=lin(d, 16),
        kv_norm=RMSNorm(16),
        kv_up=lin(16, 32),
        gate_proj=lin(d, 16),
        output_proj=lin(16, d),
        index_q=lin(12, 64),
        index_k=lin(d, 8),
        index_norm=nn.LayerNorm(8, eps=1e-6),
        index_w=lin(d, 8),
        topk=4,
        kv_cache=KVCache(b, s, 16, 8),
    )
    return TransformerDecoder(
        tok_embeddings=nn.Embedding(50, d),
        layers=[
            SelfAttentionLayer(
                a,
                moe_(d),
                sa_norm=RMSNorm(d, 1e-5),
                mlp_norm=RMSNorm(d, 1e-5),
                sa_res=DepthAttention(d),
                mlp_res=DepthAttention(d),
            )
            for a in (kda, mla)
        ],
        res=DepthAttention(d),
        norm=RMSNorm(d, 1e-5),
        output=lin(d, 50),
        max_seq_len=s,
    )


def build():
    return k31()


def drive(call, model, ids):
    yield "prefill", call(ids, input_pos=torch.arange(12))
    yield "decode", call((ids[:, :1] + 3) % 50, input_pos=torch.arange(12, 13))


_e = dict(kda=1, short_conv=1, gated_rms_norm=1, lightning_indexer=1, sparse=1, router=2, experts=2, attn_res=4)
expect = dict(prefill=_e, decode=_e)
