"""KDA in chunks, as seven people write it."""

import math

import torch
import torch.nn.functional as F
from stranger import Stranger
from torch import nn


def l2(x, eps=1e-6):
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps)


class Projections(nn.Module):
    """What stands around all of them: q, k, v, a log decay and beta, [B, T, H, *]."""

    def __init__(self, d, h, dk, dv, rule):
        super().__init__()
        self.h, self.dk, self.dv, self.rule = h, dk, dv, rule
        self.q = nn.Linear(d, h * dk, bias=False)
        self.k = nn.Linear(d, h * dk, bias=False)
        self.v = nn.Linear(d, h * dv, bias=False)
        self.f = nn.Linear(d, h * dk)
        self.b = nn.Linear(d, h, bias=False)
        self.o = nn.Linear(h * dv, d, bias=False)

    def forward(self, x, *state):
        q, k = l2(self.q(x).unflatten(-1, (self.h, self.dk))), l2(self.k(x).unflatten(-1, (self.h, self.dk)))
        v = self.v(x).unflatten(-1, (self.h, self.dv))
        g = -5.0 * torch.sigmoid(self.f(x).unflatten(-1, (self.h, self.dk)))
        result = self.rule(q, k, v, g, self.b(x).sigmoid(), *state)
        o, final = result if isinstance(result, tuple) else (result, None)
        o = self.o(o.flatten(-2))
        return o if final is None else (o, final)


# 1. The reference of a kernel library: columns of A by einsum, rows of the inverse by substitution.
def fla_chunk(q, k, v, g, beta, initial_state=None, chunk_size=16):
    B, T, H, K = q.shape
    V, BT = v.shape[-1], chunk_size
    pad = (BT - T % BT) % BT
    q, k, v, g = (F.pad(x, (0, 0, 0, 0, 0, pad)) for x in (q, k, v, g))
    beta = F.pad(beta, (0, 0, 0, pad))
    NT = (T + pad) // BT
    q, k, v, g = (x.view(B, NT, BT, H, -1).permute(0, 3, 1, 2, 4) for x in (q, k, v, g))
    beta = beta.view(B, NT, BT, H).permute(0, 3, 1, 2)
    q = q * K**-0.5
    g = g.cumsum(-2)
    mask = torch.triu(torch.ones(BT, BT, dtype=torch.bool), diagonal=0)
    A = torch.zeros(*q.shape[:-1], BT)
    for i in range(BT):
        k_i = k[..., i, :]
        g_i = g[..., i : i + 1, :]
        A[..., i] = torch.einsum("... c d, ... d -> ... c", k * (g - g_i).exp(), k_i)
    A = A * beta[..., None]
    A = -A.masked_fill(mask, 0)
    for i in range(1, BT):
        A[..., i, :i] = A[..., i, :i].clone() + (A[..., i, :, None].clone() * A[..., :, :i].clone()).sum(-2)
    A = (A + torch.eye(BT)) * beta[..., None, :]
    w = A @ (g.exp() * k)
    u = A @ v
    S = k.new_zeros(B, H, K, V)
    if initial_state is not None:
        S += initial_state
    o = torch.zeros_like(v)
    mask = torch.triu(torch.ones(BT, BT, dtype=torch.bool), diagonal=1)
    for i in range(NT):
        q_i, k_i, u_i, g_i, w_i = q[:, :, i], k[:, :, i], u[:, :, i], g[:, :, i], w[:, :, i]
        Aqk = torch.zeros(B, H, BT, BT)
        for j in range(BT):
            k_j = k[:, :, i, j]
            g_j = g[:, :, i, j : j + 1, :]
            Aqk[..., j] = torch.einsum("... c d, ... d -> ... c", q_i * (g_i - g_j).exp(), k_j)
        Aqk = Aqk.masked_fill(mask, 0)
        v_i = u_i - w_i @ S
        o[:, :, i] = (q_i * g_i.exp()) @ S + Aqk @ v_i
        S = S * g_i[:, :, -1].exp()[..., None]
        S += ((g_i[:, :, -1:] - g_i).exp() * k_i).transpose(-1, -2) @ v_i
    return o.permute(0, 2, 3, 1, 4).reshape(B, NT * BT, H, V)[:, :T]


# 2. From the paper: a triangular solve, everything [B, H, T, *], masked before the exponential.
def paper_chunk(q, k, v, g, beta, S=None, C=32):
    B, T, H, Dk = q.shape
    q, k, v, g = [x.transpose(1, 2) for x in (q, k, v, g)]
    beta = beta.transpose(1, 2).unsqueeze(-1)
    extra = -T % C
    if extra:
        q, k, v, g, beta = [F.pad(x, (0, 0, 0, extra)) for x in (q, k, v, g, beta)]
    q, k, v, g, beta = [x.reshape(B, H, -1, C, x.shape[-1]) for x in (q * Dk**-0.5, k, v, g, beta)]
    G = torch.cumsum(g, dim=-2)
    keep = torch.ones(C, C, dtype=torch.bool).tril()
    D = (G.unsqueeze(-2) - G.unsqueeze(-3)).masked_fill(~keep.unsqueeze(-1), float("-inf")).exp()
    kk = (k.unsqueeze(-2) * k.unsqueeze(-3) * D).sum(-1)
    qk = (q.unsqueeze(-2) * k.unsqueeze(-3) * D).sum(-1)
    L = torch.eye(C) + (beta * kk).tril(-1)
    W = torch.linalg.solve_triangular(L, beta * k * G.exp(), upper=False, unitriangular=True)
    U = torch.linalg.solve_triangular(L, beta * v, upper=False, unitriangular=True)
    if S is None:
        S = q.new_zeros(B, H, Dk, v.shape[-1])
    outs = []
    for n in range(q.shape[2]):
        new_v = U[:, :, n] - W[:, :, n] @ S
        outs.append((q[:, :, n] * G[:, :, n].exp()) @ S + qk[:, :, n] @ new_v)
        last = G[:, :, n, -1:]
        S = last.exp().transpose(-1, -2) * S + (k[:, :, n] * (last - G[:, :, n]).exp()).transpose(-1, -2) @ new_v
    o = torch.stack(outs, 2).reshape(B, H, -1, v.shape[-1])[:, :, :T]
    return o.transpose(1, 2)


# 3. A model file: 64 rows of substitution, beta on k and v, initial and final state.
def model_file_chunk(query, key, value, g, beta, initial_state, chunk_size=64, output_final_state=True):
    query, key, value, beta, g = [
        x.transpose(1, 2).contiguous().to(torch.float32) for x in (query, key, value, beta, g)
    ]
    batch_size, num_heads, sequence_length, k_head_dim = key.shape
    v_head_dim = value.shape[-1]
    pad_size = (chunk_size - sequence_length % chunk_size) % chunk_size
    query, key, value, g = (F.pad(x, (0, 0, 0, pad_size)) for x in (query, key, value, g))
    beta = F.pad(beta, (0, pad_size))
    total = sequence_length + pad_size
    query = query * (1 / (query.shape[-1] ** 0.5))
    v_beta = value * beta.unsqueeze(-1)
    k_beta = key * beta.unsqueeze(-1)
    query, key, value, k_beta, v_beta, g = [
        x.reshape(x.shape[0], x.shape[1], -1, chunk_size, x.shape[-1]) for x in (query, key, value, k_beta, v_beta, g)
    ]
    upper = torch.triu(torch.ones(chunk_size, chunk_size, dtype=torch.bool), diagonal=0)
    g = g.cumsum(dim=-2)
    pair = (g.unsqueeze(-2) - g.unsqueeze(-3)).masked_fill(upper.triu(1).unsqueeze(-1), -torch.inf).exp()
    attn = -((k_beta.unsqueeze(-2) * key.unsqueeze(-3) * pair).sum(-1)).masked_fill(upper, 0)
    for i in range(1, chunk_size):
        row = attn[..., i, :i].clone()
        sub = attn[..., :i, :i].clone()
        attn[..., i, :i] = row + (row.unsqueeze(-1) * sub).sum(-2)
    attn = attn + torch.eye(chunk_size, dtype=attn.dtype, device=attn.device)
    value = attn @ v_beta
    k_cumdecay = attn @ (k_beta * g.exp())
    last_recurrent_state = (
        torch.zeros(batch_size, num_heads, k_head_dim, v_head_dim) if initial_state is None else initial_state.to(value)
    )
    core_attn_out = torch.zeros_like(value)
    for i in range(0, total // chunk_size):
        q_i, k_i, v_i = query[:, :, i], key[:, :, i], value[:, :, i]
        attn = (q_i.unsqueeze(-2) * k_i.unsqueeze(-3) * pair[:, :, i]).sum(-1)
        v_prime = k_cumdecay[:, :, i] @ last_recurrent_state
        v_new = v_i - v_prime
        attn_inter = (q_i * g[:, :, i].exp()) @ last_recurrent_state
        core_attn_out[:, :, i] = attn_inter + attn @ v_new
        last_recurrent_state = (
            last_recurrent_state * g[:, :, i, -1, :, None].exp()
            + (k_i * (g[:, :, i, -1, None] - g[:, :, i]).exp()).transpose(-1, -2) @ v_new
        )
    if not output_final_state:
        last_recurrent_state = None
    core_attn_out = core_attn_out.reshape(batch_size, num_heads, -1, v_head_dim)[:, :, :sequence_length]
    return core_attn_out.transpose(1, 2).contiguous(), last_recurrent_state


# 4. A kernel's golden: 16 rows, e^G and e^-G as factors, (I - L)(I + L^2)(I + L^4)(I + L^8), states [V, K].
def golden_chunk(q, k, v, g, beta, state):
    _B, T, _H, K = q.shape
    C = 16
    n = math.ceil(T / C)
    padded = n * C - T
    out = []
    S = state.transpose(-1, -2)
    for c in range(n):
        rows = slice(c * C, min((c + 1) * C, T))
        qc, kc, vc, gc = (x[:, rows].transpose(1, 2) for x in (q, k, v, g))
        bc = beta[:, rows].transpose(1, 2)
        if c == n - 1 and padded:
            qc, kc, vc, gc = (F.pad(x, (0, 0, 0, padded)) for x in (qc, kc, vc, gc))
            bc = F.pad(bc, (0, padded))
        G = gc.cumsum(2)
        eG, eNG = G.exp(), (-G).exp()
        kd, ki, qd = kc * eG, kc * eNG, qc * eG * K**-0.5
        L = (kd @ ki.mT * bc[..., None]).tril(-1)
        L2 = L @ L
        L4 = L2 @ L2
        eye = torch.eye(C)
        inv = (eye - L) @ (eye + L2) @ (eye + L4) @ (eye + L4 @ L4)
        u = inv @ (bc[..., None] * (vc - kd @ S))
        out.append(qd @ S + (qd @ ki.mT).tril() @ u)
        S = eG[:, :, -1].unsqueeze(-1) * (S + ki.mT @ u)
    o = torch.cat(out, dim=2)[:, :, :T].transpose(1, 2)
    return o, S.transpose(-1, -2)


# 5. In the style of somebody with small helpers for everything.
def exists(x):
    return x is not None


def default(x, d):
    return x if exists(x) else d


def pad_at_dim(t, pad, dim=-1, value=0.0):
    zeros = (0, 0) * (-dim - 1 if dim < 0 else t.ndim - dim - 1)
    return F.pad(t, (*zeros, *pad), value=value)


def helper_chunk(q, k, v, log_decay, beta, past_memory=None, chunk_size=32):
    b, seq_len, h, d = q.shape
    need = (chunk_size - seq_len) % chunk_size
    q, k, v, log_decay = (t.permute(0, 2, 1, 3) for t in (q, k, v, log_decay))
    beta = beta.permute(0, 2, 1)
    q, k, v, log_decay = (pad_at_dim(t, (0, need), dim=-2) for t in (q, k, v, log_decay))
    beta = pad_at_dim(beta, (0, need))
    q, k, v, log_decay = (t.unflatten(-2, (-1, chunk_size)) for t in (q, k, v, log_decay))
    beta = beta.unflatten(-1, (-1, chunk_size))[..., None]
    q = q * d**-0.5
    cum = log_decay.cumsum(dim=-2)
    causal = torch.ones((chunk_size, chunk_size), dtype=torch.bool).tril()
    rel = torch.where(causal[..., None], cum[..., :, None, :] - cum[..., None, :, :], -1e4)
    rel = rel.exp()
    sim_kk = torch.einsum("...id,...jd,...ijd->...ij", k, k, rel)
    sim_qk = torch.einsum("...id,...jd,...ijd->...ij", q, k, rel)
    strict = causal.clone().fill_diagonal_(False)
    tri = torch.linalg.inv(torch.eye(chunk_size) + (beta * sim_kk).masked_fill(~strict, 0.0))
    values, keys_decayed = tri @ (v * beta), tri @ (k * beta * cum.exp())
    memory = default(past_memory, torch.zeros(b, h, d, v.shape[-1]))
    retrieved = []
    for chunk in zip(*(t.unbind(dim=2) for t in (q, k, values, keys_decayed, cum, sim_qk)), strict=True):
        cq, ck, cv, ckd, cc, csim = chunk
        delta = cv - torch.einsum("bhnd,bhde->bhne", ckd, memory)
        retrieved.append(
            torch.einsum("bhnd,bhde->bhne", cq * cc.exp(), memory) + torch.einsum("bhij,bhje->bhie", csim, delta)
        )
        *_, last = cc.unbind(dim=-2)
        memory = memory * last.exp()[..., None]
        memory = memory + torch.einsum("bhnd,bhne->bhde", ck * (last[:, :, None] - cc).exp(), delta)
    out = torch.cat(retrieved, dim=-2)[..., :seq_len, :]
    return out.permute(0, 2, 1, 3), memory


# 6. From JAX: chunks first, decays relative to the chunk's start as factors, a solve against the identity.
def jax_chunk(q, k, v, g, beta, h0, chunk=16):
    b, t, h, dk = q.shape
    dv = v.shape[-1]
    n = -(-t // chunk)

    def split(x):
        x = torch.nn.functional.pad(x, [0, 0] * (x.ndim - 2) + [0, n * chunk - t])
        x = x.reshape(b, n, chunk, *x.shape[2:])
        return torch.moveaxis(torch.moveaxis(x, 3, 1), 2, 0) if x.ndim > 4 else torch.permute(x, (1, 0, 3, 2))

    qs, ks, vs, gs, bs = split(q), split(k), split(v), split(g), split(beta)
    idx = torch.arange(chunk)
    lower = idx[:, None] >= idx[None, :]
    strict = idx[:, None] > idx[None, :]

    def body(state, inp):
        q_c, k_c, v_c, g_c, b_c = inp
        cum = torch.cumsum(g_c, dim=-2)
        k_up, k_down = k_c * torch.exp(cum), k_c * torch.exp(-cum)
        q_up = q_c * torch.exp(cum) * dk**-0.5
        a = torch.where(strict, torch.einsum("bhik,bhjk->bhij", k_up, k_down), 0.0) * b_c[..., None]
        inverse = torch.linalg.solve_triangular(torch.eye(chunk) + a, torch.eye(chunk).expand_as(a), upper=False)
        rhs = v_c - torch.einsum("bhik,bhkv->bhiv", k_up, state)
        new = torch.einsum("bhij,bhj,bhjv->bhiv", inverse, b_c, rhs)
        attn = torch.where(lower, torch.einsum("bhik,bhjk->bhij", q_up, k_down), 0.0)
        y = torch.einsum("bhik,bhkv->bhiv", q_up, state) + torch.einsum("bhij,bhjv->bhiv", attn, new)
        total = cum[..., -1, :]
        k_end = k_c * torch.exp(total[..., None, :] - cum)
        state = torch.exp(total)[..., None] * state + torch.einsum("bhik,bhiv->bhkv", k_end, new)
        return state, y

    state, ys = h0, []
    for i in range(n):
        state, y = body(state, (qs[i], ks[i], vs[i], gs[i], bs[i]))
        ys.append(y)
    y = torch.stack(ys)  # n b h c v
    return torch.permute(y, (1, 0, 3, 2, 4)).reshape(b, n * chunk, h, dv)[:, :t], state


# 7. Nothing is padded: the last chunk is shorter than the others.
def ragged_chunk(q, k, v, g, beta, S, size=32):
    S = S.clone()
    o = torch.empty_like(v)
    for start in range(0, q.size(1), size):
        end = min(start + size, q.size(1))
        qi, ki, vi, gi = (t[:, start:end].transpose(1, 2) for t in (q, k, v, g))
        bi = beta[:, start:end].transpose(1, 2)[..., None]
        n = end - start
        cg = torch.cumsum(gi, 2)
        diff = cg[:, :, :, None] - cg[:, :, None]
        tri = torch.tril(torch.ones(n, n))[..., None]
        decay = torch.exp(diff * tri) * tri
        A = torch.einsum("bhid,bhjd,bhijd->bhij", ki, ki, decay).tril(-1) * bi
        T = torch.eye(n) - A
        power = A
        for _ in range(math.ceil(math.log2(n))):
            power = power @ power
            T = T + T @ power
        U = T @ (bi * (vi - (ki * cg.exp()) @ S))
        Aq = torch.einsum("bhid,bhjd,bhijd->bhij", qi, ki, decay)
        o[:, start:end] = (((qi * cg.exp()) @ S + Aq @ U) / math.sqrt(q.size(-1))).transpose(1, 2)
        end_decay = cg[:, :, -1:]
        S = S * end_decay.exp().transpose(2, 3) + (ki * (end_decay - cg).exp()).transpose(2, 3) @ U
    return o, S


def layer(rule, d, h, dk, dv, b, t, *, state=None, kv=True):
    def build():
        args = [torch.randn(b, t, d)]
        if state:
            args.append(torch.randn(b, h, dk, dv) if kv else torch.randn(b, h, dv, dk))
        return Projections(d, h, dk, dv, rule), tuple(args)

    return build


ONE = {"kda_chunk": 1}
STRANGERS = [
    Stranger("fla_columns", layer(fla_chunk, 20, 3, 8, 12, 2, 37), ONE),
    Stranger("paper_solve", layer(paper_chunk, 18, 2, 6, 10, 2, 50), ONE),
    Stranger("model_file_64", layer(model_file_chunk, 16, 2, 8, 6, 2, 70, state=True), ONE),
    Stranger("golden_factors", layer(golden_chunk, 22, 2, 9, 7, 2, 33, state=True, kv=False), ONE),
    Stranger("helpers_inv", layer(helper_chunk, 14, 3, 5, 8, 2, 45), ONE),
    Stranger("jax_solve_eye", layer(jax_chunk, 24, 2, 7, 11, 3, 40, state=True), ONE),
    Stranger("ragged_tail", layer(ragged_chunk, 26, 2, 10, 6, 2, 41, state=True), ONE),
]
