"""KDA, token by token, as six people write it."""

import math

import torch
import torch.nn.functional as F
from stranger import Stranger
from torch import nn


# 1. A port from MLX: states [B, H, Dv, Dk], None as an axis, decays that were exponentiated before.
def mlx_rule(q, k, v, g, beta, state):
    outputs = []
    for step in range(q.shape[1]):
        keys = k[:, step, :, None, :]
        state = state * g[:, step, :, None, :]
        memory = (state * keys).sum(axis=-1)
        delta = (v[:, step] - memory) * beta[:, step, :, None]
        state = state + keys * delta[..., None]
        outputs.append((state * q[:, step, :, None, :]).sum(axis=-1))
    return torch.stack(outputs, dim=1), state


class MlxAttention(nn.Module):
    def __init__(self, hidden=20, heads=3, dk=8, dv=12):
        super().__init__()
        self.heads, self.dk, self.dv = heads, dk, dv
        self.fused_proj = nn.Linear(hidden, heads * (3 * dk + dv + 1), bias=False)
        self.dt_bias = nn.Parameter(torch.randn(heads * dk) * 0.1)
        self.A_log = nn.Parameter(torch.rand(heads))
        self.o_proj = nn.Linear(heads * dv, hidden, bias=False)

    def __call__(self, *args):
        return super().__call__(*args)

    def forward(self, x, state):
        b, t, _ = x.shape
        n = self.heads * self.dk
        q, k, g, v, beta = torch.split(self.fused_proj(x), [n, n, n, self.heads * self.dv, self.heads], dim=-1)
        q, k, g = (y.reshape(b, t, self.heads, self.dk) for y in (q, k, g))
        v = v.reshape(b, t, self.heads, self.dv)
        q = q * torch.rsqrt((q * q).sum(-1, keepdim=True) + 1e-6) * self.dk**-0.5
        k = k * torch.rsqrt((k * k).sum(-1, keepdim=True) + 1e-6)
        rate = torch.exp(self.A_log)[:, None] * (g + self.dt_bias.reshape(self.heads, self.dk))
        decay = torch.exp(-5.0 * torch.sigmoid(rate))
        out, state = mlx_rule(q, k, v, decay, torch.sigmoid(beta), state)
        return self.o_proj(out.reshape(b, t, -1)), state


# 2. The reference of a kernel library: einsum, beta on the key, the output written in place.
def naive_recurrent_kda(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False):
    dtype = v.dtype
    B, T, H, K, V = *q.shape, v.shape[-1]
    if scale is None:
        scale = K**-0.5
    q, k, v, g, beta = map(lambda x: x.to(torch.float), [q, k, v, g, beta])
    q = q * scale
    S = k.new_zeros(B, H, K, V).to(q)
    if initial_state is not None:
        S += initial_state
    o = torch.zeros_like(v)
    for i in range(0, T):
        q_i, k_i, v_i, g_i, b_i = q[:, i], k[:, i], v[:, i], g[:, i], beta[:, i]
        S = S * g_i[..., None].exp()
        S = S + torch.einsum("b h k, b h v -> b h k v", b_i[..., None] * k_i, v_i - (k_i[..., None] * S).sum(-2))
        o[:, i] = torch.einsum("b h k, b h k v -> b h v", q_i, S)
    if not output_final_state:
        S = None
    return o.to(dtype), S


class NaiveLayer(nn.Module):
    def __init__(self, d_model=24, num_heads=2, head_k_dim=6, head_v_dim=10):
        super().__init__()
        self.H, self.K, self.V = num_heads, head_k_dim, head_v_dim
        self.q_proj = nn.Linear(d_model, num_heads * head_k_dim, bias=False)
        self.k_proj = nn.Linear(d_model, num_heads * head_k_dim, bias=False)
        self.v_proj = nn.Linear(d_model, num_heads * head_v_dim, bias=False)
        self.f_proj = nn.Sequential(nn.Linear(d_model, 4, bias=False), nn.Linear(4, num_heads * head_k_dim))
        self.b_proj = nn.Linear(d_model, num_heads, bias=False)
        self.A = nn.Parameter(torch.rand(num_heads))

    def forward(self, x):
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q, k = (F.normalize(y.unflatten(-1, (self.H, self.K)), dim=-1) for y in (q, k))
        g = -self.A.exp().view(1, 1, -1, 1) * F.softplus(self.f_proj(x).unflatten(-1, (self.H, self.K)))
        o, _ = naive_recurrent_kda(q, k, v.unflatten(-1, (self.H, self.V)), g, self.b_proj(x).sigmoid())
        return o.flatten(-2)


# 3. A whole decode layer as model files spell it: conv cache, l2 norm, step, gated norm.
class DecodeLayer(nn.Module):
    def __init__(self, hidden_size=32, num_heads=4, head_dim=8, conv_size=4):
        super().__init__()
        self.num_heads, self.head_dim, self.conv_size = num_heads, head_dim, conv_size
        width = num_heads * head_dim
        self.qkv_proj = nn.Linear(hidden_size, 3 * width, bias=False)
        self.conv1d = nn.Conv1d(3 * width, 3 * width, conv_size, groups=3 * width, bias=False)
        self.f_a_proj = nn.Linear(hidden_size, head_dim, bias=False)
        self.f_b_proj = nn.Linear(head_dim, width, bias=False)
        self.b_proj = nn.Linear(hidden_size, num_heads, bias=False)
        self.g_proj = nn.Linear(hidden_size, width, bias=False)
        self.dt_bias = nn.Parameter(torch.randn(width))
        self.A_log = nn.Parameter(torch.rand(1, 1, num_heads, 1))
        self.o_norm_weight = nn.Parameter(torch.rand(head_dim) + 0.5)
        self.o_proj = nn.Linear(width, hidden_size, bias=False)

    def forward(self, hidden_states, conv_state, recurrent_state):
        batch_size = hidden_states.shape[0]
        mixed = self.qkv_proj(hidden_states).transpose(1, 2)
        window = torch.cat([conv_state, mixed], dim=-1)
        conv_state = window[:, :, 1:]
        mixed = F.silu((window * self.conv1d.weight.squeeze(1)).sum(-1))
        q, k, v = mixed.view(batch_size, 3, self.num_heads, self.head_dim).unbind(1)

        def l2norm(x):
            return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)

        q, k = l2norm(q) / math.sqrt(self.head_dim), l2norm(k)
        raw = self.f_b_proj(self.f_a_proj(hidden_states)) + self.dt_bias
        g = -5.0 * torch.sigmoid(self.A_log.exp() * raw.view(batch_size, 1, self.num_heads, self.head_dim))
        beta = self.b_proj(hidden_states).sigmoid().squeeze(1).unsqueeze(-1)
        recurrent_state = recurrent_state * g.squeeze(1).exp().unsqueeze(-1)
        v_old = torch.matmul(k.unsqueeze(-2), recurrent_state).squeeze(-2)
        recurrent_state = recurrent_state + k.unsqueeze(-1) @ (beta * (v - v_old)).unsqueeze(-2)
        o = torch.matmul(q.unsqueeze(-2), recurrent_state).squeeze(-2)
        gate = self.g_proj(hidden_states).view(batch_size, self.num_heads, self.head_dim)
        o = o * torch.rsqrt(o.pow(2).mean(-1, keepdim=True) + 1e-5) * self.o_norm_weight * torch.sigmoid(gate)
        return self.o_proj(o.reshape(batch_size, 1, -1)), conv_state, recurrent_state


# 4. A programmer of BLAS: batch and heads are one axis, one baddbmm for the write.
class BlasDecode(nn.Module):
    def __init__(self, d=18, h=3, dk=5, dv=7):
        super().__init__()
        self.h, self.dk, self.dv = h, dk, dv
        self.W = nn.Parameter(torch.randn(d, h * (3 * dk + dv + 1)) * 0.3)

    def forward(self, x, S):
        n = x.shape[0] * self.h
        p = x @ self.W
        sizes = [self.h * self.dk] * 3 + [self.h * self.dv, self.h]
        q, k, a, v, b = p.split(sizes, -1)
        q = F.normalize(q.reshape(n, 1, self.dk), dim=2)
        k = F.normalize(k.reshape(n, 1, self.dk), dim=2)
        S = S * torch.exp(-F.softplus(a.reshape(n, self.dk, 1)))
        r = v.reshape(n, 1, self.dv) - torch.bmm(k, S)
        S = torch.baddbmm(S, k.transpose(1, 2) * torch.sigmoid(b).reshape(n, 1, 1), r)
        y = torch.bmm(q, S) * self.dk**-0.5
        return y.reshape(x.shape[0], self.h * self.dv), S


# 5. From JAX: a scan over the time-major inputs with a carry.
def scan(f, init, xs):
    carry, ys = init, []
    for x in zip(*xs, strict=True):
        carry, y = f(carry, x)
        ys.append(y)
    return carry, torch.stack(ys)


def jax_kda(q, k, v, log_alpha, beta):
    def body(S, inputs):
        q_t, k_t, v_t, a_t, b_t = inputs
        S = torch.exp(a_t)[..., :, None] * S
        S = S + torch.einsum("...k,...v->...kv", k_t, b_t[..., None] * (v_t - torch.einsum("...kv,...k->...v", S, k_t)))
        return S, torch.einsum("...kv,...k->...v", S, q_t)

    b, _, h, dk = q.shape
    xs = tuple(torch.moveaxis(a, 1, 0) for a in (q, k, v, log_alpha, beta))
    S, out = scan(body, torch.zeros(b, h, dk, v.shape[-1]), xs)
    return torch.moveaxis(out, 0, 1), S


class JaxLayer(nn.Module):
    def __init__(self, features=22, heads=2, dk=7, dv=9):
        super().__init__()
        self.kernels = nn.ParameterDict({
            name: nn.Parameter(torch.randn(features, heads, size) * 0.3)
            for name, size in {"q": dk, "k": dk, "v": dv, "a": dk, "b": 1}.items()
        })  # fmt: skip
        self.out = nn.Parameter(torch.randn(heads, dv, features))

    def forward(self, x):
        p = {name: torch.einsum("btf,fhd->bthd", x, w) for name, w in self.kernels.items()}
        q = p["q"] / torch.sqrt(torch.sum(p["q"] ** 2, -1, keepdim=True) + 1e-6) * 7**-0.5
        k = p["k"] / torch.sqrt(torch.sum(p["k"] ** 2, -1, keepdim=True) + 1e-6)
        beta = torch.sigmoid(p["b"][..., 0])
        o, S = jax_kda(q, k, p["v"], F.logsigmoid(p["a"]), beta)
        return torch.einsum("bthd,hdf->btf", o, self.out), S


# 6. A serving engine: states [V, K] in a pool that requests point into, written back in place.
class PoolDecode(nn.Module):
    def __init__(self, hidden=26, heads=2, dk=9, dv=5, slots=6):
        super().__init__()
        self.heads, self.dk, self.dv = heads, dk, dv
        self.in_proj = nn.Linear(hidden, heads * (3 * dk + dv) + heads, bias=False)
        self.A_log = nn.Parameter(torch.rand(heads, 1))
        self.register_buffer("ssm_state", torch.randn(slots, heads, dv, dk) * 0.2)

    def forward(self, hidden, state_indices):
        n = hidden.shape[0]
        wide = self.heads * self.dk
        q, k, f, v, b = self.in_proj(hidden).split([wide, wide, wide, self.heads * self.dv, self.heads], dim=-1)
        q, k, f = (z.view(n, self.heads, self.dk) for z in (q, k, f))
        v = v.view(n, self.heads, self.dv)
        q = q / q.norm(dim=-1, keepdim=True).clamp_min(1e-6)
        k = k / k.norm(dim=-1, keepdim=True).clamp_min(1e-6)
        gate = -torch.exp(self.A_log) * F.softplus(f)
        h = self.ssm_state[state_indices]
        h = h * gate.exp().unsqueeze(-2)
        v = v - (h * k.unsqueeze(-2)).sum(-1)
        v = v * b.sigmoid().unsqueeze(-1)
        h = h + v.unsqueeze(-1) * k.unsqueeze(-2)
        self.ssm_state[state_indices] = h
        return ((h * q.unsqueeze(-2)).sum(-1) * self.dk**-0.5).flatten(1)


# 7. After the paper's formulas: alpha in (0, 1) by a sigmoid, or an exponential that is taken before heads are split.
class PaperAlpha(nn.Module):
    def __init__(self, alpha, d=16, h=3, dk=6, dv=10):
        super().__init__()
        self.alpha, self.h = alpha, h
        self.w = nn.ModuleDict(
            {n: nn.Linear(d, h * s) for n, s in {"q": dk, "k": dk, "v": dv, "a": dk, "b": 1}.items()}
        )

    def forward(self, x, S):
        split = lambda name: self.w[name](x).unflatten(-1, (self.h, -1))  # noqa: E731
        q, k = F.normalize(split("q"), dim=-1), F.normalize(split("k"), dim=-1)
        alpha = self.alpha(self.w["a"](x)).unflatten(-1, (self.h, -1))
        S = alpha.unsqueeze(-1) * S
        error = split("v") - torch.einsum("bhkv,bhk->bhv", S, k)
        S = S + torch.einsum("bhk,bhv->bhkv", torch.sigmoid(split("b")) * k, error)
        return torch.einsum("bhkv,bhk->bhv", S, q), S


# 8. The same over several tokens; alpha is a root of a sigmoid, as gated linear attention has it.
class RootAlpha(PaperAlpha):
    def forward(self, x):
        split = lambda name: self.w[name](x).unflatten(-1, (self.h, -1))  # noqa: E731
        q, k = F.normalize(split("q"), dim=-1), F.normalize(split("k"), dim=-1)
        v, beta = split("v"), torch.sigmoid(split("b"))
        alpha = self.alpha(self.w["a"](x)).unflatten(-1, (self.h, -1))
        S, out = x.new_zeros(x.shape[0], self.h, v.shape[-1], k.shape[-1]), []
        for t in range(x.shape[1]):
            S = S * alpha[:, t, :, None, :]
            error = v[:, t] - (S * k[:, t, :, None]).sum(-1)
            S = S + (beta[:, t] * error).unsqueeze(-1) * k[:, t, :, None]
            out.append((S * q[:, t, :, None]).sum(-1))
        return torch.stack(out, dim=1)


def flat_decay(a):
    return torch.exp(-F.softplus(a))


def with_inputs(make, *shapes):
    return lambda: (make(), tuple(torch.randn(*shape) for shape in shapes))


STRANGERS = [
    Stranger("mlx_rule", with_inputs(MlxAttention, (2, 3, 20), (2, 3, 12, 8)), {"kda_recurrent": 1}),
    Stranger("naive_recurrent", with_inputs(NaiveLayer, (2, 5, 24)), {"kda_recurrent": 1}),
    Stranger(
        "decode_layer",
        with_inputs(DecodeLayer, (2, 1, 32), (2, 96, 3), (2, 4, 8, 8)),
        {"mega_kda": 1},
    ),
    Stranger("blas_decode", with_inputs(BlasDecode, (2, 18), (6, 5, 7)), {"kda_recurrent": 1}),
    Stranger("jax_scan", with_inputs(JaxLayer, (2, 4, 22)), {"kda_recurrent": 1}),
    Stranger(
        "state_pool",
        lambda: (PoolDecode(), (torch.randn(3, 26), torch.tensor([4, 1, 2]))),
        {"kda_recurrent": 1},
    ),
    Stranger(
        "flat_decay",
        with_inputs(lambda: PaperAlpha(flat_decay), (2, 16), (2, 3, 6, 10)),
        {"kda_recurrent": 1},
    ),
    Stranger(
        "sigmoid_alpha",
        with_inputs(lambda: PaperAlpha(torch.sigmoid), (2, 16), (2, 3, 6, 10)),
        {"kda_recurrent": 1},
    ),
    Stranger(
        "root_alpha",
        with_inputs(lambda: RootAlpha(lambda a: torch.sigmoid(a) ** (1 / 16)), (2, 5, 16)),
        {"kda_recurrent": 1},
    ),
    Stranger("flat_decay_by_token", with_inputs(lambda: RootAlpha(flat_decay), (2, 5, 16)), {"kda_recurrent": 1}),
]
