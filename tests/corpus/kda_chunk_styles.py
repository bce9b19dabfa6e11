"""The chunk form of the delta rule as different authors would write it (K3.1 spec 2.5 and 3.4).

Lengths say what each wants: 37 and 71 are filled up inside, 48 and 128 divide into whole chunks.
"""

import torch
import torch.nn.functional as F
from operands import LOG2E
from records import speller

spelling = speller("kda_chunk", arguments="q k v g beta s0", results="o state", phase="prefill", lengths=(48,))


def cut(x, chunk):
    """[B, T, H, d] -> [B, H, N, C, d]."""
    return x.unflatten(1, (-1, chunk)).permute(0, 3, 1, 2, 4)


def joined(o):
    """[B, H, N, C, d] -> [B, T, H, d]."""
    return o.flatten(2, 3).transpose(1, 2)


@spelling(arguments="q k v g beta", options={"start": False, "scaled": True}, lengths=(48, 64))
def columns_then_rows(q, k, v, g, beta, initial_state=None, chunk=16):
    """One einsum for each column of A, the inverse by a loop over rows, no initial state."""
    q, k, v, g = (cut(x, chunk) for x in (q * q.shape[-1] ** -0.5, k, v, g))
    beta, g = cut(beta.unsqueeze(-1), chunk).squeeze(-1), g.cumsum(-2)
    a = torch.zeros(*g.shape[:-1], chunk, dtype=q.dtype)
    for i in range(chunk):
        a[..., i] = torch.einsum("...cd,...d->...c", k * (g - g[..., i, None, :]).exp(), k[..., i, :])
    upper = torch.triu(torch.ones(chunk, chunk, dtype=torch.bool))
    a = -(a * beta[..., None]).masked_fill(upper, 0)
    for i in range(1, chunk):
        a[..., i, :i] = a[..., i, :i].clone() + (a[..., i, :, None].clone() * a[..., :, :i].clone()).sum(-2)
    a = (a + torch.eye(chunk, dtype=q.dtype)) * beta[..., None, :]
    w, u = a @ (g.exp() * k), a @ v
    s, o = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1]), torch.zeros_like(v)
    for n in range(q.shape[2]):
        q_n, k_n, g_n = q[:, :, n], k[:, :, n], g[:, :, n]
        read = torch.zeros(*g_n.shape[:-1], chunk, dtype=q.dtype)
        for j in range(chunk):
            read[..., j] = torch.einsum("...cd,...d->...c", q_n * (g_n - g_n[..., j, None, :]).exp(), k_n[..., j, :])
        read = read.masked_fill(torch.triu(torch.ones(chunk, chunk, dtype=torch.bool), diagonal=1), 0)
        new_v = u[:, :, n] - w[:, :, n] @ s
        o[:, :, n] = (q_n * g_n.exp()) @ s + read @ new_v
        s = s * g_n[..., -1, :, None].exp() + ((g_n[..., -1:, :] - g_n).exp() * k_n).transpose(-1, -2) @ new_v
    return joined(o), s


@spelling(half=True, options={"scaled": True}, lengths=(71, 128))
def pairwise_masked_before_exp(q, k, v, g, beta, state, chunk_size=64):
    """Chunks of 64 filled up inside, pairwise decays of five axes masked before exp, substitution in place."""
    length = q.shape[1]
    q, k, v, g, beta = (x.transpose(1, 2).contiguous().to(torch.float32) for x in (q, k, v, g, beta))
    fill = (chunk_size - length % chunk_size) % chunk_size
    q, k, v, g = (F.pad(x, (0, 0, 0, fill)) for x in (q, k, v, g))
    beta = F.pad(beta, (0, fill)).unsqueeze(-1)
    q = q / q.shape[-1] ** 0.5
    k_beta, v_beta = k * beta, v * beta
    q, k, g, k_beta, v_beta = (x.reshape(*x.shape[:2], -1, chunk_size, x.shape[-1]) for x in (q, k, g, k_beta, v_beta))
    g = g.cumsum(dim=-2)
    later = torch.triu(torch.ones(chunk_size, chunk_size, dtype=torch.bool), diagonal=1)
    same_or_later = torch.triu(torch.ones(chunk_size, chunk_size, dtype=torch.bool), diagonal=0)
    decay = (g.unsqueeze(-2) - g.unsqueeze(-3)).masked_fill(later.unsqueeze(-1), float("-inf")).exp()
    attn = -(k_beta.unsqueeze(-2) * k.unsqueeze(-3) * decay).sum(-1).masked_fill(same_or_later, 0)
    for i in range(1, chunk_size):
        attn[..., i, :i] += (attn[..., i, :i].clone().unsqueeze(-1) * attn[..., :i, :i].clone()).sum(-2)
    attn = attn + torch.eye(chunk_size, dtype=attn.dtype)
    u, w = attn @ v_beta, attn @ (k_beta * g.exp())
    out = torch.zeros_like(u)
    for i in range(q.shape[2]):
        inner = (q[:, :, i].unsqueeze(-2) * k[:, :, i].unsqueeze(-3) * decay[:, :, i]).sum(-1).masked_fill(later, 0)
        fresh = u[:, :, i] - w[:, :, i] @ state
        out[:, :, i] = (q[:, :, i] * g[:, :, i].exp()) @ state + inner @ fresh
        tail = (k[:, :, i] * (g[:, :, i, -1:] - g[:, :, i]).exp()).transpose(-1, -2)
        state = state * g[:, :, i, -1].exp().unsqueeze(-1) + tail @ fresh
    return out.reshape(*out.shape[:2], -1, out.shape[-1])[:, :, :length].transpose(1, 2).contiguous(), state


@spelling(results="o")
def masked_after_the_sum(q, k, v, g, beta, s, c=16):
    """exp of every difference, future ones too, masked when summed; the final state is dropped."""
    q, k, v, g, beta = (cut(x, c) for x in (q, k, v, g, beta.unsqueeze(-1)))
    g = g.cumsum(3)
    future = torch.ones(c, c, dtype=torch.bool).triu(1)
    decay = (g[..., :, None, :] - g[..., None, :, :]).exp()
    scores = torch.where(future, 0.0, (q[..., :, None, :] * decay * k[..., None, :, :]).sum(-1))
    lower = ((k * beta)[..., :, None, :] * decay * k[..., None, :, :]).sum(-1).tril(-1)
    inverse = torch.linalg.inv(torch.eye(c, dtype=g.dtype) + lower)
    w, u = inverse @ (beta * k * g.exp()), inverse @ (beta * v)
    out = []
    for n in range(q.shape[2]):
        fresh = u[:, :, n] - w[:, :, n] @ s
        out.append(scores[:, :, n] @ fresh + (q * g.exp())[:, :, n] @ s)
        s = g[:, :, n, -1].exp()[..., None] * s + ((g[:, :, n, -1:] - g[:, :, n]).exp() * k[:, :, n]).mT @ fresh
    return joined(torch.stack(out, 2))


@spelling(lengths=(37, 48))
def triangular_solve(q, k, v, g, beta, s, c=16):
    """solve_triangular on [decayed k | v] at once; q = k = v = 0 fills the last chunk."""
    t = q.shape[1]
    q, k, v, g, beta = (cut(F.pad(x, (0, 0, 0, 0, 0, -t % c)), c) for x in (q, k, v, g, beta.unsqueeze(-1)))
    total = g.cumsum(-2)
    gap = (total.unsqueeze(-2) - total.unsqueeze(-3)).masked_fill(
        ~torch.ones(c, c).tril().bool()[..., None], -torch.inf
    )
    pair = torch.einsum("...id,...jd,...ijd->...ij", k, k, gap.exp())
    seen = torch.einsum("...id,...jd,...ijd->...ij", q, k, gap.exp())
    right = torch.cat([total.exp() * k, v], -1) * beta
    solved = torch.linalg.solve_triangular((pair * beta).tril(-1), right, upper=False, unitriangular=True)
    w, u = solved.split([k.shape[-1], v.shape[-1]], dim=-1)
    chunks = []
    for w_n, u_n, q_n, k_n, seen_n, total_n in zip(*(x.unbind(2) for x in (w, u, q, k, seen, total)), strict=True):
        rest = u_n - w_n @ s
        chunks.append(torch.einsum("bhck,bhkv->bhcv", q_n * total_n.exp(), s) + seen_n @ rest)
        last = total_n[:, :, -1:]
        s = last.exp().mT * s + torch.einsum("bhck,bhcv->bhkv", (last - total_n).exp() * k_n, rest)
    return torch.cat(chunks, 2)[:, :, :t].transpose(1, 2), s


@spelling(arguments="q_bhtd k_bhtd v_bhtd g_bhtd beta_bhtd s0", results="o_bhtd state", lengths=(32, 48))
def middle_anchor(q, k, v, g, beta, s):
    """Products factored around the chunk's middle gate, the inverse as (I - L)(I + L^2)(I + L^4)(I + L^8)."""
    eye, lower = torch.eye(16, dtype=g.dtype), torch.ones(16, 16, dtype=torch.bool).tril()
    out = []
    parts = zip(*(x.split(16, dim=2) for x in (q, k, v, g, beta)), strict=True)
    for q, k, v, g, beta in parts:
        g = g.cumsum(2)
        middle = g[:, :, 8:9]
        up, down = (g - middle).exp(), (middle - g).exp()
        x = beta.unsqueeze(-1) * ((k * up) @ (k * down).mT).masked_fill(~lower, 0).tril(-1)
        x2 = x @ x
        x4 = x2 @ x2
        inverse = (eye - x) @ (eye + x2) @ (eye + x4) @ (eye + x4 @ x4)
        t = inverse * beta.unsqueeze(-2)
        fresh = t @ v - (t @ (g.exp() * k)) @ s
        out.append((g.exp() * q) @ s + ((q * up) @ (k * down).mT).masked_fill(~lower, 0) @ fresh)
        s = g[:, :, -1, :, None].exp() * s + ((g[:, :, -1:] - g).exp() * k).mT @ fresh
    return torch.cat(out, dim=2), s


@spelling(lengths=(48, 64))
def factored_residual_first(q, k, v, g, beta, s):
    """exp(G) and exp(-G) as factors; the state's part is taken from v before the inverse is applied."""
    q, k, v, g, beta = (cut(x, 16) for x in (q, k, v, g, beta[..., None]))
    g = g.cumsum(-2)
    grown, shrunk, read = k * torch.exp(-g), k * torch.exp(g), q * torch.exp(g)
    lower = torch.tril(beta * (shrunk @ grown.transpose(-1, -2)), -1)
    series = term = torch.eye(16, dtype=g.dtype).expand_as(lower)
    for _ in range(15):
        term = -lower @ term
        series = series + term
    seen, o = torch.tril(read @ grown.transpose(-1, -2)), torch.empty_like(v)
    for i in range(q.shape[2]):
        fresh = series[:, :, i] @ (beta[:, :, i] * (v[:, :, i] - shrunk[:, :, i] @ s))
        o[:, :, i] = read[:, :, i] @ s + seen[:, :, i] @ fresh
        s = (s + grown[:, :, i].transpose(-1, -2) @ fresh) * g[:, :, i, -1].exp().unsqueeze(-1)
    return joined(o), s


@spelling(arguments="q k v g beta s0_vk", results="o state_vk", lengths=(37, 48))
def ragged_tail_value_rows(q, k, v, g, beta, s):
    """The last chunk is simply shorter, the state is [V, K], linalg.solve instead of an inverse."""
    out = []
    parts = zip(*(x.transpose(1, 2).split(16, 2) for x in (q, k, v, g, beta)), strict=True)
    for q, k, v, g, beta in parts:
        g, b = g.cumsum(2), beta.unsqueeze(-1)
        decay = (g.unsqueeze(3) - g.unsqueeze(2)).exp()
        pair = torch.einsum("bhid,bhjd,bhijd->bhij", k, k, decay).tril(-1)
        fresh = torch.linalg.solve(torch.eye(k.shape[2], dtype=k.dtype) + b * pair, b * (v - (k * g.exp()) @ s.mT))
        seen = torch.einsum("bhid,bhjd,bhijd->bhij", q, k, decay).tril()
        out.append((q * g.exp()) @ s.mT + seen @ fresh)
        end = g[:, :, -1:]
        s = s * end.exp() + fresh.mT @ (k * (end - g).exp())
    return torch.cat(out, 2).transpose(1, 2), s


@spelling(lengths=(48, 64))
def never_transposed(q, k, v, g, beta, s):
    """[B, N, C, H, d] all the way, einsum throughout, the gate summed up in base 2."""
    q, k, v, g, beta = (x.unflatten(1, (-1, 16)) for x in (q, k, v, g * LOG2E, beta))
    g = g.cumsum(2)
    low = torch.arange(16)[:, None] >= torch.arange(16)[None, :]
    decay = torch.exp2((g[:, :, :, None] - g[:, :, None]).masked_fill(~low[:, :, None, None], -torch.inf))
    pair = torch.einsum("bnihd,bnjhd,bnijhd,bnih->bnhij", k, k, decay, beta).tril(-1)
    seen = torch.einsum("bnihd,bnjhd,bnijhd->bnhij", q, k, decay)
    solver = torch.linalg.inv(pair + torch.eye(16, dtype=g.dtype))
    start, end = g.exp2(), (g[:, :, -1:] - g).exp2()
    out = []
    for n in range(q.shape[1]):
        gap = v[:, n] - torch.einsum("bchk,bhkv->bchv", k[:, n] * start[:, n], s)
        fresh = torch.einsum("bhij,bjh,bjhv->bihv", solver[:, n], beta[:, n], gap)
        read = torch.einsum("bchk,bhkv->bchv", q[:, n] * start[:, n], s)
        out.append(read + torch.einsum("bhij,bjhv->bihv", seen[:, n], fresh))
        s = torch.einsum("bhk,bhkv->bhkv", start[:, n, -1], s)
        s = s + torch.einsum("bchk,bchv->bhkv", k[:, n] * end[:, n], fresh)
    return torch.cat(out, 1), s
