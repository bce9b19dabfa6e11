"""More near misses of the delta rule: other vectors, other numbers of steps, other states returned."""

import torch
from kda_recurrent_near_misses import loop, outer, read_by
from records import misser

near_miss = misser("kda_recurrent", arguments="q k v g beta s0", results="o state", phase="unrolled", lengths=(1, 5))


@near_miss(arguments="q k v g beta erase s0")
def erases_with_its_own_vector(q, k, v, g, beta, erase, s0):
    """A vector of its own erases and k writes; the operator would use k for both."""
    s, out = s0, []
    for t in range(q.shape[1]):
        s = s * g[:, t].exp().unsqueeze(-1)
        s = s + outer(k[:, t], beta[:, t].unsqueeze(-1) * (v[:, t] - read_by(s, erase[:, t])))
        out.append(read_by(s, q[:, t]))
    return torch.stack(out, dim=1), s


@near_miss(served_by="beta / sqrt(K) and value * sqrt(K)")
def key_scaled_for_the_prediction(q, k, v, g, beta, s0):
    """k / sqrt(K) predicts and k writes; the operator would erase with the full k."""

    def step(s, q, k, v, g, beta):
        s = s * g.exp().unsqueeze(-1)
        s = s + outer(k, beta * (v - read_by(s, k * k.shape[-1] ** -0.5)))
        return read_by(s, q), s

    return loop(step, q, k, v, g, beta, s0)


@near_miss(served_by="two steps, the second with gate 0")
def two_steps_a_token(q, k, v, g, beta, s0):
    """Each token is written twice over; the operator would make one step."""

    def step(s, q, k, v, g, beta):
        s = s * g.exp().unsqueeze(-1)
        for _ in range(2):
            s = s + outer(k, beta * (v - read_by(s, k)))
        return read_by(s, q), s

    return loop(step, q, k, v, g, beta, s0)


@near_miss(right="o")
def state_before_the_last_write(q, k, v, g, beta, s0):
    """The state returned lacks the last token; the operator would return it with that token."""
    s, out = s0, []
    for t in range(q.shape[1]):
        before = s * g[:, t].exp().unsqueeze(-1)
        s = before + outer(k[:, t], beta[:, t].unsqueeze(-1) * (v[:, t] - read_by(before, k[:, t])))
        out.append(read_by(s, q[:, t]))
    return torch.stack(out, dim=1), before


@near_miss(lengths=(5,))
def all_predict_from_the_start(q, k, v, g, beta, s0):
    """Every token predicts from the first state; the operator would predict from what its predecessors left."""
    s, out = s0, []
    for t in range(q.shape[1]):
        s = s * g[:, t].exp().unsqueeze(-1)
        first = s0 * g[:, : t + 1].sum(1).exp().unsqueeze(-1)
        s = s + outer(k[:, t], beta[:, t].unsqueeze(-1) * (v[:, t] - read_by(first, k[:, t])))
        out.append(read_by(s, q[:, t]))
    return torch.stack(out, dim=1), s


@near_miss()
def delta_is_clipped(q, k, v, g, beta, s0):
    """What is missing is clamped to [-1, 1]; the operator would write all of it."""

    def step(s, q, k, v, g, beta):
        s = s * g.exp().unsqueeze(-1)
        s = s + outer(k, beta * (v - read_by(s, k)).clamp(-1, 1))
        return read_by(s, q), s

    return loop(step, q, k, v, g, beta, s0)


@near_miss(served_by="one call a token for the state, normalised and read behind it")
def state_is_normalised(q, k, v, g, beta, s0):
    """The state is brought to unit columns after each write; the operator would not touch its size."""

    def step(s, q, k, v, g, beta):
        s = s * g.exp().unsqueeze(-1)
        s = torch.nn.functional.normalize(s + outer(k, beta * (v - read_by(s, k))), dim=-2)
        return read_by(s, q), s

    return loop(step, q, k, v, g, beta, s0)


@near_miss()
def writes_are_decayed_by_beta(q, k, v, g, beta, s0):
    """The old state is kept by 1 - beta, as a gated recurrent unit has it; the operator would only decay by g."""

    def step(s, q, k, v, g, beta):
        s = s * g.exp().unsqueeze(-1)
        s = s * (1 - beta).unsqueeze(-1) + outer(k, beta * v)
        return read_by(s, q), s

    return loop(step, q, k, v, g, beta, s0)


@near_miss(lengths=(5,))
def write_one_token_late(q, k, v, g, beta, s0):
    """A token's value goes to the key of the token before; the operator would pair those of one token."""
    late = torch.cat([k[:, :1], k[:, :-1]], dim=1)
    s, out = s0, []
    for t in range(q.shape[1]):
        s = s * g[:, t].exp().unsqueeze(-1)
        s = s + outer(late[:, t], beta[:, t].unsqueeze(-1) * (v[:, t] - read_by(s, k[:, t])))
        out.append(read_by(s, q[:, t]))
    return torch.stack(out, dim=1), s


@near_miss(results="state")
def state_read_ahead_by_the_query(q, k, v, g, beta, s0):
    """Only the state leaves, but the query predicts for the key; the operator predicts with what it writes."""
    s = s0
    for t in range(q.shape[1]):
        s = s * g[:, t].exp().unsqueeze(-1)
        s = s + outer(k[:, t], beta[:, t].unsqueeze(-1) * (v[:, t] - read_by(s, q[:, t])))
    return s


@near_miss(results="state")
def state_read_ahead_undecayed(q, k, v, g, beta, s0):
    """Only the state leaves, and it predicts before it decays; the operator decays first."""
    s = s0
    for t in range(q.shape[1]):
        predicted = read_by(s, k[:, t])
        s = s * g[:, t].exp().unsqueeze(-1)
        s = s + outer(k[:, t], beta[:, t].unsqueeze(-1) * (v[:, t] - predicted))
    return s


@near_miss()
def matrix_that_decays_last(q, k, v, g, beta, s0):
    """Diag(decay) (I - beta k k') erases before it decays; the operator decays first."""
    eye, s, out = torch.eye(k.shape[-1], dtype=s0.dtype), s0, []
    for t in range(q.shape[1]):
        erased = eye - beta[:, t, :, None, None] * outer(k[:, t], k[:, t])
        s = torch.diag_embed(g[:, t].exp()) @ erased @ s + outer(k[:, t], beta[:, t].unsqueeze(-1) * v[:, t])
        out.append(read_by(s, q[:, t]))
    return torch.stack(out, dim=1), s
