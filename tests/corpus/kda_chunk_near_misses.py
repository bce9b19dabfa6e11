"""Almost the chunk form of the delta rule: one matrix, one index or one decay is not what the operator has."""

import torch
from kda_chunk_styles import cut, joined
from records import misser

near_miss = misser("kda_chunk", arguments="q k v g beta s0", results="o state", phase="prefill", lengths=(48,))
CHUNK = 16


def pieces(q, k, v, g, beta):
    """The operands in chunks, the gate summed up within each, and exp(G_i - G_j) for i >= j."""
    q, k, v, g, beta = (cut(x, CHUNK) for x in (q, k, v, g, beta.unsqueeze(-1)))
    g = g.cumsum(-2)
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool).triu(1).unsqueeze(-1)
    decay = (g.unsqueeze(-2) - g.unsqueeze(-3)).masked_fill(later, float("-inf")).exp()
    return q, k, v, g, beta, decay


def pairs(rows, columns, decay):
    return (rows.unsqueeze(-2) * columns.unsqueeze(-3) * decay).sum(-1)


def solved(lower, right):
    return torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)


def walk(w, u, q_read, seen, tail, last, s):
    """The honest loop over chunks: what is fresh, what is read, what is kept."""
    out = []
    for n in range(u.shape[2]):
        fresh = u[:, :, n] - w[:, :, n] @ s
        out.append(q_read[:, :, n] @ s + seen[:, :, n] @ fresh)
        s = last[:, :, n].mT * s + tail[:, :, n].mT @ fresh
    return joined(torch.stack(out, 2)), s


@near_miss(right="state")
def token_does_not_see_itself(q, k, v, g, beta, s0):
    """Rows read strictly earlier tokens of their chunk; the operator's o holds the token itself."""
    q, k, v, g, beta, decay = pieces(q, k, v, g, beta)
    lower, seen = (beta * pairs(k, k, decay)).tril(-1), pairs(q, k, decay).tril(-1)
    w, u = solved(lower, beta * g.exp() * k), solved(lower, beta * v)
    return walk(w, u, q * g.exp(), seen, (g[..., -1:, :] - g).exp() * k, g[..., -1:, :].exp(), s0)


@near_miss(served_by="beta / (1 + beta |k|^2)")
def erases_itself_too(q, k, v, g, beta, s0):
    """The diagonal stays in L, so a token is also corrected by itself; the operator has it strictly lower."""
    q, k, v, g, beta, decay = pieces(q, k, v, g, beta)
    lower, seen = torch.eye(CHUNK, dtype=g.dtype) + (beta * pairs(k, k, decay)).tril(), pairs(q, k, decay)
    w, u = torch.linalg.solve(lower, beta * g.exp() * k), torch.linalg.solve(lower, beta * v)
    return walk(w, u, q * g.exp(), seen, (g[..., -1:, :] - g).exp() * k, g[..., -1:, :].exp(), s0)


@near_miss()
def no_inverse(q, k, v, g, beta, s0):
    """I - L stands for the inverse of I + L; the operator follows all chains of corrections."""
    q, k, v, g, beta, decay = pieces(q, k, v, g, beta)
    solver = torch.eye(CHUNK, dtype=g.dtype) - (beta * pairs(k, k, decay)).tril(-1)
    w, u = solver @ (beta * g.exp() * k), solver @ (beta * v)
    return walk(w, u, q * g.exp(), pairs(q, k, decay), (g[..., -1:, :] - g).exp() * k, g[..., -1:, :].exp(), s0)


@near_miss()
def wrong_sign_of_the_inverse(q, k, v, g, beta, s0):
    """(I - L)^-1: the corrections are added; the operator subtracts them."""
    q, k, v, g, beta, decay = pieces(q, k, v, g, beta)
    lower = -(beta * pairs(k, k, decay)).tril(-1)
    w, u = solved(lower, beta * g.exp() * k), solved(lower, beta * v)
    return walk(w, u, q * g.exp(), pairs(q, k, decay), (g[..., -1:, :] - g).exp() * k, g[..., -1:, :].exp(), s0)


@near_miss()
def beta_of_the_column(q, k, v, g, beta, s0):
    """L carries the earlier token's beta; the operator carries that of the token which is corrected."""
    q, k, v, g, beta, decay = pieces(q, k, v, g, beta)
    lower = (pairs(k, k, decay) * beta.mT).tril(-1)
    w, u = solved(lower, beta * g.exp() * k), solved(lower, beta * v)
    return walk(w, u, q * g.exp(), pairs(q, k, decay), (g[..., -1:, :] - g).exp() * k, g[..., -1:, :].exp(), s0)


@near_miss(served_by="value / beta, where no beta is 0")
def value_without_beta(q, k, v, g, beta, s0):
    """The values enter at full strength and only the erasing has beta; the operator scales both."""
    q, k, v, g, beta, decay = pieces(q, k, v, g, beta)
    lower = (beta * pairs(k, k, decay)).tril(-1)
    w, u = solved(lower, beta * g.exp() * k), solved(lower, v)
    return walk(w, u, q * g.exp(), pairs(q, k, decay), (g[..., -1:, :] - g).exp() * k, g[..., -1:, :].exp(), s0)


@near_miss()
def prediction_from_the_undecayed_state(q, k, v, g, beta, s0):
    """W lacks exp(G), so the chunk predicts from the state as it came; the operator decays it up to each token."""
    q, k, v, g, beta, decay = pieces(q, k, v, g, beta)
    lower = (beta * pairs(k, k, decay)).tril(-1)
    w, u = solved(lower, beta * k), solved(lower, beta * v)
    return walk(w, u, q * g.exp(), pairs(q, k, decay), (g[..., -1:, :] - g).exp() * k, g[..., -1:, :].exp(), s0)


@near_miss(right="state")
def state_read_undecayed(q, k, v, g, beta, s0):
    """q reads the chunk's first state without exp(G); the operator decays it up to each token."""
    q, k, v, g, beta, decay = pieces(q, k, v, g, beta)
    lower = (beta * pairs(k, k, decay)).tril(-1)
    w, u = solved(lower, beta * g.exp() * k), solved(lower, beta * v)
    return walk(w, u, q, pairs(q, k, decay), (g[..., -1:, :] - g).exp() * k, g[..., -1:, :].exp(), s0)


@near_miss()
def tail_decays_from_the_start(q, k, v, g, beta, s0):
    """What is kept of a token decays by exp(G_i); the operator decays it from i to the chunk's end."""
    q, k, v, g, beta, decay = pieces(q, k, v, g, beta)
    lower = (beta * pairs(k, k, decay)).tril(-1)
    w, u = solved(lower, beta * g.exp() * k), solved(lower, beta * v)
    return walk(w, u, q * g.exp(), pairs(q, k, decay), g.exp() * k, g[..., -1:, :].exp(), s0)


@near_miss()
def state_not_decayed_between_chunks(q, k, v, g, beta, s0):
    """The old state passes a chunk whole; the operator decays it by the whole chunk."""
    q, k, v, g, beta, decay = pieces(q, k, v, g, beta)
    lower = (beta * pairs(k, k, decay)).tril(-1)
    w, u = solved(lower, beta * g.exp() * k), solved(lower, beta * v)
    whole = torch.ones_like(g[..., -1:, :])
    return walk(w, u, q * g.exp(), pairs(q, k, decay), (g[..., -1:, :] - g).exp() * k, whole, s0)


@near_miss()
def gate_never_reset(q, k, v, g, beta, s0):
    """The gate is summed up over the whole prompt; the operator starts anew in each chunk."""
    whole = cut(g.cumsum(1), CHUNK)
    q, k, v, _, beta, decay = pieces(q, k, v, g, beta)
    lower = (beta * pairs(k, k, decay)).tril(-1)
    w, u = solved(lower, beta * whole.exp() * k), solved(lower, beta * v)
    tail, last = (whole[..., -1:, :] - whole).exp() * k, whole[..., -1:, :].exp()
    return walk(w, u, q * whole.exp(), pairs(q, k, decay), tail, last, s0)


@near_miss(served_by="gate of the token before, 0 for the first of a chunk")
def gate_sum_without_its_own_token(q, k, v, g, beta, s0):
    """The sums leave out a token's own gate; the operator decays before it writes."""
    before = cut(g, CHUNK)
    q, k, v, g, beta, _ = pieces(q, k, v, g, beta)
    g = g - before
    decay = (g.unsqueeze(-2) - g.unsqueeze(-3)).clamp(max=0).exp()
    lower, seen = (beta * pairs(k, k, decay)).tril(-1), pairs(q, k, decay).tril()
    w, u = solved(lower, beta * g.exp() * k), solved(lower, beta * v)
    return walk(w, u, q * g.exp(), seen, (g[..., -1:, :] - g).exp() * k, g[..., -1:, :].exp(), s0)


@near_miss(served_by="each chunk as a sequence of its own")
def chunks_forget(q, k, v, g, beta, s0):
    """Every chunk starts from the first state; the operator hands the state on."""
    q, k, v, g, beta, decay = pieces(q, k, v, g, beta)
    lower = (beta * pairs(k, k, decay)).tril(-1)
    fresh = solved(lower, beta * v) - solved(lower, beta * g.exp() * k) @ s0.unsqueeze(2)
    o = (q * g.exp()) @ s0.unsqueeze(2) + pairs(q, k, decay) @ fresh
    tail = (g[..., -1:, :] - g).exp() * k
    return joined(o), g[:, :, -1, -1, :, None].exp() * s0 + tail[:, :, -1].mT @ fresh[:, :, -1]


@near_miss(right="o")
def state_before_the_last_chunk(q, k, v, g, beta, s0):
    """The state returned lacks the last chunk; the operator returns it with that chunk."""
    q, k, v, g, beta, decay = pieces(q, k, v, g, beta)
    lower = (beta * pairs(k, k, decay)).tril(-1)
    w, u = solved(lower, beta * g.exp() * k), solved(lower, beta * v)
    seen, tail, last = pairs(q, k, decay), (g[..., -1:, :] - g).exp() * k, g[..., -1:, :].exp()
    o, _ = walk(w, u, q * g.exp(), seen, tail, last, s0)
    return o, walk(*(x[:, :, :-1] for x in (w, u, q * g.exp(), seen, tail, last)), s0)[1]


@near_miss(right="state")
def future_decays_too(q, k, v, g, beta, s0):
    """|G_i - G_j| and no mask on the readout: rows see later tokens; the operator is causal."""
    q, k, v, g, beta, decay = pieces(q, k, v, g, beta)
    lower = (beta * pairs(k, k, decay)).tril(-1)
    w, u = solved(lower, beta * g.exp() * k), solved(lower, beta * v)
    both = (-(g.unsqueeze(-2) - g.unsqueeze(-3)).abs()).exp()
    return walk(w, u, q * g.exp(), pairs(q, k, both), (g[..., -1:, :] - g).exp() * k, g[..., -1:, :].exp(), s0)


@near_miss(served_by="gate = the mean, for every channel (a gated delta rule)")
def one_gate_a_head_in_chunks(q, k, v, g, beta, s0):
    """One decay for all channels, so it comes out of the products; the operator decays each key channel."""
    q, k, v, g, beta = (cut(x, CHUNK) for x in (q, k, v, g.mean(-1, keepdim=True), beta.unsqueeze(-1)))
    g = g.cumsum(-2)
    decay = (g - g.mT).tril().exp().tril()
    lower = (beta * (k @ k.mT) * decay).tril(-1)
    w, u = solved(lower, beta * g.exp() * k), solved(lower, beta * v)
    return walk(w, u, q * g.exp(), (q @ k.mT) * decay, (g[..., -1:, :] - g).exp() * k, g[..., -1:, :].exp(), s0)


@near_miss()
def map_that_decays_by_the_first_token(q, k, v, g, beta, s0):
    """A chunk's affine map has the decay up to its first token on the diagonal; the operator has that of the chunk."""
    q, k, v, g, beta, decay = pieces(q, k, v, g, beta)
    lower, seen = (beta * pairs(k, k, decay)).tril(-1), pairs(q, k, decay)
    w, u = solved(lower, beta * g.exp() * k), solved(lower, beta * v)
    tail = ((g[..., -1:, :] - g).exp() * k).mT
    move, add = torch.diag_embed(g[..., 0, :].exp()) - tail @ w, tail @ u
    states = [s0]
    for n in range(q.shape[2]):
        states.append(move[:, :, n] @ states[-1] + add[:, :, n])
    before = torch.stack(states[:-1], dim=2)
    return joined((q * g.exp()) @ before + seen @ (u - w @ before)), states[-1]
