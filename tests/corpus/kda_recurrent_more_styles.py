"""More spellings of the delta rule over a few tokens: states in pools and in place, unusual algebra, golden loops."""

import torch
from operands import LOG2E
from records import speller

spelling = speller("kda_recurrent", arguments="q k v g beta s0", results="o state", phase="unrolled", lengths=(1, 5, 8))


@spelling(lengths=(1, 4))
def golden_triple_loop(q, k, v, g, beta, s0):
    """Loops over batch, tokens and heads with matrices of two axes, as golden references do."""
    o, state = torch.zeros_like(v), s0.clone()
    for b in range(q.shape[0]):
        for t in range(q.shape[1]):
            for h in range(q.shape[2]):
                kept = state[b, h] * g[b, t, h].exp()[:, None]
                gap = (v[b, t, h] - kept.T @ k[b, t, h]) * beta[b, t, h]
                state[b, h] = kept + torch.outer(k[b, t, h], gap)
                o[b, t, h] = state[b, h].T @ q[b, t, h]
    return o, state


@spelling(results="o", updates={"s0": "state"}, lengths=(1, 4))
def state_in_place(q, k, v, g, beta, s):
    """The state is overwritten by mul_ and add_; only o is returned."""
    out = []
    for t in range(q.shape[1]):
        s.mul_(g[:, t].exp().unsqueeze(-1))
        u = beta[:, t].unsqueeze(-1) * (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], s))
        s.add_(k[:, t].unsqueeze(-1) * u.unsqueeze(-2))
        out.append(torch.einsum("bhk,bhkv->bhv", q[:, t], s))
    return torch.stack(out, dim=1)


@spelling(arguments="q_tbhd k_tbhd v_tbhd g_tbhd beta_tbhd s0", results="o_tbhd state")
def time_first(q, k, v, g, beta, s):
    """[T, B, H, d], walked by zip; one subscript string for each product."""
    out = []
    for q_t, k_t, v_t, a_t, b_t in zip(q, k, v, g.exp(), beta, strict=True):
        s = torch.einsum("bhij,bhi->bhij", s, a_t)
        u = torch.einsum("bhj,bh->bhj", v_t - torch.einsum("bhij,bhi->bhj", s, k_t), b_t)
        s = s + torch.einsum("bhi,bhj->bhij", k_t, u)
        out.append(torch.einsum("bhij,bhi->bhj", s, q_t))
    return torch.stack(out), s


@spelling()
def state_read_once(q, k, v, g, beta, s):
    """k and q read the decayed state in one product; o is mended by (q . k) u instead of a second read."""
    out = []
    for t in range(q.shape[1]):
        s = s * g[:, t].exp().unsqueeze(-1)
        predicted, read = (torch.stack([k[:, t], q[:, t]], dim=-2) @ s).unbind(-2)
        u = beta[:, t].unsqueeze(-1) * (v[:, t] - predicted)
        out.append(read + (q[:, t] * k[:, t]).sum(-1, keepdim=True) * u)
        s = s + k[:, t].unsqueeze(-1) * u.unsqueeze(-2)
    return torch.stack(out, dim=1), s


@spelling(arguments="q_one k_one v_one g_one beta_one pool rows", results="o_one pool", phase="decode", lengths=(1,))
def rows_of_a_pool(q, k, v, g, beta, pool, rows):
    """A decode step on the rows of a state pool [P, H, V, K]: fetched by index_select, put back by index_copy."""
    s = pool.index_select(0, rows).transpose(-1, -2) * g.exp().unsqueeze(-1)
    u = (v - torch.einsum("nhkv,nhk->nhv", s, k)) * beta.unsqueeze(-1)
    s = s + torch.einsum("nhk,nhv->nhkv", k, u)
    o = torch.einsum("nhkv,nhk->nhv", s, q)
    return o, pool.index_copy(0, rows, s.transpose(-1, -2))


@spelling(
    arguments="q_one k_one v_one g_one beta_one pool rows",
    results="o_one",
    updates={"pool": "pool"},
    phase="decode",
    lengths=(1,),
)
def pool_by_indexing(q, k, v, g, beta, pool, rows):
    """The pool of states is indexed with a tensor and written by assignment; the math stays in [V, K]."""
    s = pool[rows] * torch.exp(g)[:, :, None, :]
    u = beta[:, :, None] * (v - torch.matmul(s, k[..., None])[..., 0])
    pool[rows] = s + u[..., None] * k[:, :, None, :]
    return torch.matmul(pool[rows], q[..., None])[..., 0]


@spelling(arguments="q k v g raw_beta s0", options={"beta": "doubled"})
def beta_up_to_two(q, k, v, g, raw_beta, s):
    """Beta = 2 sigmoid, so that a direction may be reflected."""
    beta, decay, out = 2.0 * torch.sigmoid(raw_beta), torch.exp(g), []
    for t in range(q.shape[1]):
        s = torch.einsum("bhk,bhkv->bhkv", decay[:, t], s)
        target = v[:, t] - torch.einsum("bhkv,bhk->bhv", s, k[:, t])
        s = s + torch.einsum("bh,bhk,bhv->bhkv", beta[:, t], k[:, t], target)
        out.append(torch.einsum("bhkv,bhk->bhv", s, q[:, t]))
    return torch.stack(out, dim=1), s


@spelling(arguments="q k v g beta", results="o state", options={"start": False, "scaled": True}, lengths=(5, 8))
def from_nothing(q, k, v, g, beta, initial_state=None):
    """No initial state: zeros are made inside; the output rows are joined by cat."""
    b, length, h, d = q.shape
    s = q.new_zeros(b, h, d, v.shape[-1]) if initial_state is None else initial_state
    o = v.new_zeros(b, 0, h, v.shape[-1])
    for t in range(length):
        s = s * torch.exp(g[:, t].unsqueeze(-1))
        u = (v[:, t] - torch.einsum("bhkv,bhk->bhv", s, k[:, t])) * beta[:, t].unsqueeze(-1)
        s = s + k[:, t].unsqueeze(-1) * u.unsqueeze(-2)
        o = torch.cat([o, torch.einsum("bhkv,bhk->bhv", s, q[:, t] * d**-0.5).unsqueeze(1)], dim=1)
    return o, s


@spelling(results="o")
def state_dropped(q, k, v, g, beta, s):
    """Only the outputs leave; the erasing and the writing product are subtracted and added apart."""
    out = []
    for t in range(q.shape[1]):
        s = s * g[:, t].exp().unsqueeze(-1)
        column, strength = k[:, t].unsqueeze(-1), beta[:, t, :, None, None]
        s = s - strength * column * (column * s).sum(-2, keepdim=True) + strength * column * v[:, t].unsqueeze(-2)
        out.append((q[:, t].unsqueeze(-1) * s).sum(-2))
    return torch.stack(out, dim=1)


def one_token(state, token):
    """A step as a function of the state and one token's tuple."""
    q, k, v, decay, beta = token
    state = state * decay.unsqueeze(-1)
    delta = beta * (v - torch.linalg.vecdot(state, k.unsqueeze(-1), dim=-2))
    state = state + k.unsqueeze(-1) * delta.unsqueeze(-2)
    return state, torch.linalg.vecdot(state, q.unsqueeze(-1), dim=-2)


@spelling()
def step_function(q, k, v, g, beta, state):
    """A helper makes one step with vecdot; the loop only carries the state."""
    decay, outputs = (g * LOG2E).exp2(), []
    for t in range(q.shape[1]):
        state, o = one_token(state, (q[:, t], k[:, t], v[:, t], decay[:, t], beta[:, t].unsqueeze(-1)))
        outputs.append(o)
    return torch.stack(outputs, dim=1), state


@spelling(results="state", lengths=(1, 5))
def state_read_ahead(q, k, v, g, beta, s):
    """A few tokens are read ahead: no query asks, and only the state leaves."""
    for t in range(k.shape[1]):
        s = s * g[:, t, :, :, None].exp()
        wanted = (v[:, t] - (k[:, t].unsqueeze(-2) @ s).squeeze(-2)) * beta[:, t, :, None]
        s = s + k[:, t].unsqueeze(-1) @ wanted.unsqueeze(-2)
    return s
