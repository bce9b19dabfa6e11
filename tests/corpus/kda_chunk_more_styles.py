"""More spellings of the chunk form: raw gates inside, one chunk as a function, affine maps, blocks within chunks."""

import torch
import torch.nn.functional as F
from kda_chunk_styles import cut, joined
from operands import LOWER_BOUND
from records import speller

spelling = speller("kda_chunk", arguments="q k v g beta s0", results="o state", phase="prefill", lengths=(48,))


@spelling(
    arguments="q k v raw_g a_log dt_bias raw_beta s0",
    options={"gate": "bounded", "beta": "raw"},
    lengths=(37, 48),
)
def raw_padding(q, k, v, raw_g, a_log, dt_bias, raw_beta, s, c=16):
    """Raw gates activated after padding: the fill is -inf for them and 0 for the rest."""
    t = q.shape[1]
    q, k, v = (cut(F.pad(x, (0, 0, 0, 0, 0, -t % c)), c) for x in (q, k, v))
    raw_g = F.pad(raw_g, (0, 0, 0, 0, 0, -t % c), value=float("-inf"))
    raw_beta = F.pad(raw_beta, (0, 0, 0, -t % c), value=float("-inf"))
    g = cut(LOWER_BOUND * torch.sigmoid(a_log.exp()[:, None] * (raw_g + dt_bias)), c).cumsum(-2)
    beta = cut(raw_beta.sigmoid().unsqueeze(-1), c)
    gap = (g.unsqueeze(-2) - g.unsqueeze(-3)).clamp(max=0).exp()
    lower = (beta * torch.einsum("...id,...jd,...ijd->...ij", k, k, gap)).tril(-1)
    seen = torch.einsum("...id,...jd,...ijd->...ij", q, k, gap).tril()
    eye = torch.eye(c, dtype=lower.dtype).expand_as(lower)
    solver = torch.linalg.solve_triangular(eye + lower, eye, upper=False) * beta.mT
    out = []
    for i in range(g.shape[2]):
        fresh = solver[:, :, i] @ (v[:, :, i] - (k[:, :, i] * g[:, :, i].exp()) @ s)
        out.append((q[:, :, i] * g[:, :, i].exp()) @ s + seen[:, :, i] @ fresh)
        tail = k[:, :, i] * (g[:, :, i, -1:] - g[:, :, i]).exp()
        s = s * g[:, :, i, -1].exp().unsqueeze(-1) + tail.mT @ fresh
    return joined(torch.stack(out, 2))[:, :t], s


def one_chunk(q, k, v, g, beta, s):
    """[B, C, H, d] of one chunk and the state before it -> its outputs and the state after it."""
    c = q.shape[1]
    total = torch.cumsum(g, dim=1)
    gap = total[:, :, None] - total[:, None]
    later = torch.arange(c)[:, None] < torch.arange(c)
    gap = torch.where(later[..., None, None], float("-inf"), gap).exp()
    against_k = (k[:, :, None] * k[:, None] * gap).sum(-1).permute(0, 3, 1, 2)
    against_q = (q[:, :, None] * k[:, None] * gap).sum(-1).permute(0, 3, 1, 2)
    rows = []
    residual = (v - torch.einsum("bchk,bhkv->bchv", k * total.exp(), s)) * beta[..., None]
    for i in range(c):
        earlier = sum((against_k[:, :, i, j, None] * rows[j] for j in range(i)), torch.zeros_like(residual[:, i]))
        rows.append(residual[:, i] - beta[:, i, :, None] * earlier)
    fresh = torch.stack(rows, dim=2)
    o = torch.einsum("bchk,bhkv->bchv", q * total.exp(), s) + (against_q @ fresh).transpose(1, 2)
    tail = (k * (total[:, -1:] - total).exp()).transpose(1, 2)
    return o, s * total[:, -1].exp().unsqueeze(-1) + tail.transpose(-1, -2) @ fresh


@spelling(lengths=(37, 48))
def chunk_function(q, k, v, g, beta, s):
    """One function for a chunk; it substitutes on the value rows themselves, so there is no inverse at all."""
    out = []
    for first in range(0, q.shape[1], 16):
        part = slice(first, min(first + 16, q.shape[1]))
        o, s = one_chunk(q[:, part], k[:, part], v[:, part], g[:, part], beta[:, part], s)
        out.append(o)
    return torch.cat(out, dim=1), s


@spelling(lengths=(48, 64))
def affine_states(q, k, v, g, beta, s):
    """Each chunk as a map S -> M S + E; the states come first, all outputs after them at once."""
    q, k, v, g, beta = (cut(x, 16) for x in (q, k, v, g, beta.unsqueeze(-1)))
    g = g.cumsum(-2)
    gap = (g.unsqueeze(-2) - g.unsqueeze(-3)).masked_fill(torch.ones(16, 16).triu(1).bool()[..., None], -torch.inf)
    lower = (beta * (k.unsqueeze(-2) * k.unsqueeze(-3) * gap.exp()).sum(-1)).tril(-1)
    seen = (q.unsqueeze(-2) * k.unsqueeze(-3) * gap.exp()).sum(-1)
    solver = torch.linalg.inv(torch.eye(16, dtype=g.dtype) + lower)
    w, u = solver @ (beta * g.exp() * k), solver @ (beta * v)
    tail = ((g[..., -1:, :] - g).exp() * k).mT
    move, add = torch.diag_embed(g[..., -1, :].exp()) - tail @ w, tail @ u
    states = [s]
    for n in range(q.shape[2]):
        states.append(move[:, :, n] @ states[-1] + add[:, :, n])
    before = torch.stack(states[:-1], dim=2)
    return joined((q * g.exp()) @ before + seen @ (u - w @ before)), states[-1]


@spelling(arguments="raw_q raw_k v g beta s0", options={"l2": True, "scaled": True}, lengths=(71, 128))
def sixty_four_in_blocks(q, k, v, g, beta, s, c=64, block=16):
    """Chunks of 64 in blocks of 16: off the diagonal anchored at the row block's first gate, on it by difference."""
    t = q.shape[1]
    q, k = (x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q = q * q.shape[-1] ** -0.5
    q, k, v, g, beta = (cut(F.pad(x, (0, 0, 0, 0, 0, -t % c)), c) for x in (q, k, v, g, beta.unsqueeze(-1)))
    g = g.cumsum(-2)
    pair, seen = g.new_zeros(*g.shape[:-1], c), g.new_zeros(*g.shape[:-1], c)
    for i in range(0, c, block):
        row = slice(i, i + block)
        first = g[..., i : i + 1, :]
        up, down = (g[..., row, :] - first).exp(), k[..., :i, :] * (first - g[..., :i, :]).exp()
        pair[..., row, :i] = (k[..., row, :] * up) @ down.mT
        seen[..., row, :i] = (q[..., row, :] * up) @ down.mT
        gap = (g[..., row, None, :] - g[..., None, row, :]).clamp(max=0).exp() * k[..., None, row, :]
        pair[..., row, row] = (k[..., row, None, :] * gap).sum(-1)
        seen[..., row, row] = (q[..., row, None, :] * gap).sum(-1)
    right = beta * torch.cat([v, k * g.exp()], dim=-1)
    solved = torch.linalg.solve_triangular((beta * pair).tril(-1), right, upper=False, unitriangular=True)
    u, w = solved[..., : v.shape[-1]], solved[..., v.shape[-1] :]
    seen, o = seen.tril(), torch.empty_like(v)
    for n in range(g.shape[2]):
        fresh = u[:, :, n] - w[:, :, n] @ s
        o[:, :, n] = (q * g.exp())[:, :, n] @ s + seen[:, :, n] @ fresh
        s = torch.exp(g[:, :, n, -1, :, None]) * s + (k[:, :, n] * (g[:, :, n, -1:] - g[:, :, n]).exp()).mT @ fresh
    return joined(o)[:, :t], s


@spelling(results="state", lengths=(48, 64))
def state_only(q, k, v, g, beta, s):
    """Only the final state leaves, as when a prompt is read ahead; decays from the chunk's end."""
    parts = zip(*(x.transpose(1, 2).split(16, 2) for x in (k, v, g, beta)), strict=True)
    for k, v, g, beta in parts:
        from_end = g.flip(2).cumsum(2).flip(2) - g
        start = from_end[:, :, :1] + g[:, :, :1] - from_end
        gap = (start.unsqueeze(3) - start.unsqueeze(2)).masked_fill(torch.ones(16, 16).triu().bool()[..., None], -1e9)
        lower = torch.einsum("bhid,bhjd,bhijd,bhi->bhij", k, k, gap.exp(), beta)
        target = beta.unsqueeze(-1) * (v - (k * start.exp()) @ s)
        fresh = torch.linalg.solve_triangular(lower, target, upper=False, unitriangular=True)
        s = s * start[:, :, -1].exp().unsqueeze(-1) + (k * from_end.exp()).mT @ fresh
    return s


@spelling(results="o", updates={"s0": "state"}, lengths=(37, 48))
def state_copied_back(q, k, v, g, beta, s0):
    """The state lives in a buffer that is written by copy_ at the end; einsum with one letter more for the chunk."""
    t, c = q.shape[1], 16
    q, k, v, g, beta = (F.pad(x, (0, 0) * (x.dim() - 2) + (0, -t % c)) for x in (q, k, v, g, beta))
    q, k, v, g = (x.view(x.shape[0], -1, c, *x.shape[2:]).permute(1, 0, 3, 2, 4) for x in (q, k, v, g))
    beta = beta.view(beta.shape[0], -1, c, beta.shape[2]).permute(1, 0, 3, 2)
    g, state, out = g.cumsum(-2), s0, []
    decay = (
        (g.unsqueeze(-2) - g.unsqueeze(-3)).masked_fill(torch.ones(c, c).triu(1).bool()[..., None], -torch.inf).exp()
    )
    lower = torch.einsum("nbhid,nbhjd,nbhijd->nbhij", k * beta[..., None], k, decay).tril(-1)
    seen = torch.einsum("nbhid,nbhjd,nbhijd->nbhij", q, k, decay)
    inverse = torch.eye(c, dtype=g.dtype).expand_as(lower).clone()
    for i in range(1, c):
        inverse[..., i, :] = inverse[..., i, :] - (lower[..., i : i + 1, :i] @ inverse[..., :i, :]).squeeze(-2)
    for n in range(q.shape[0]):
        fresh = inverse[n] @ ((v[n] - (k[n] * g[n].exp()) @ state) * beta[n][..., None])
        out.append((q[n] * g[n].exp()) @ state + seen[n] @ fresh)
        state = state * g[n, ..., -1, :, None].exp() + (k[n] * (g[n, ..., -1:, :] - g[n]).exp()).mT @ fresh
    s0.copy_(state)
    return torch.cat(out, dim=2)[:, :, :t].transpose(1, 2)


@spelling(arguments="q k v g beta", results="o", options={"start": False}, lengths=(16,))
def whole_prompt_is_one_chunk(q, k, v, g, beta):
    """No state at all: one chunk as long as the prompt, o = (decayed q k') (I + L)^-1 beta v."""
    q, k, v, g, beta = (x.transpose(1, 2) for x in (q, k, v, g, beta.unsqueeze(-1)))
    g = g.cumsum(2)
    now = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
    decay = (g.unsqueeze(3) - g.unsqueeze(2)).masked_fill(~now.unsqueeze(-1), float("-inf")).exp()
    lower = (beta * torch.einsum("bhid,bhjd,bhijd->bhij", k, k, decay)).tril(-1)
    seen = torch.einsum("bhid,bhjd,bhijd->bhij", q, k, decay)
    return (seen @ torch.inverse(lower + torch.eye(q.shape[2], dtype=g.dtype)) @ (beta * v)).transpose(1, 2)


@spelling(arguments="q k v g_log2 beta s0", lengths=(32, 48))
def halves_by_recursion(q, k, v, bits, beta, s):
    """Base 2 from outside; a chunk's inverse from the inverses of its halves, down to single rows."""

    def inverted(lower):
        n = lower.shape[-1]
        if n == 1:
            return torch.ones_like(lower)
        half = n // 2
        top, bottom = inverted(lower[..., :half, :half]), inverted(lower[..., half:, half:])
        corner = -bottom @ lower[..., half:, :half] @ top
        above = torch.cat([top, torch.zeros_like(top)], dim=-1)
        return torch.cat([above, torch.cat([corner, bottom], dim=-1)], dim=-2)

    q, k, v, bits, beta = (cut(x, 16) for x in (q, k, v, bits, beta.unsqueeze(-1)))
    bits = bits.cumsum(-2)
    middle = bits[..., 7:8, :]
    up, down = torch.exp2(bits - middle), torch.exp2(middle - bits)
    solver = inverted((beta * ((k * up) @ (k * down).mT)).tril(-1)) * beta.mT
    seen = ((q * up) @ (k * down).mT).tril()
    out = []
    for n in range(q.shape[2]):
        fresh = solver[:, :, n] @ (v[:, :, n] - (k[:, :, n] * bits[:, :, n].exp2()) @ s)
        out.append((q[:, :, n] * bits[:, :, n].exp2()) @ s + seen[:, :, n] @ fresh)
        last = bits[:, :, n, -1:]
        s = last.exp2().mT * s + (k[:, :, n] * (last - bits[:, :, n]).exp2()).mT @ fresh
    return joined(torch.stack(out, dim=2)), s
