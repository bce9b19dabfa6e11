"""Almost the delta rule over a few tokens: each says what the operator would compute wrongly on these operands."""

import torch
from operands import LOG2E
from records import misser

near_miss = misser("kda_recurrent", arguments="q k v g beta s0", results="o state", phase="unrolled", lengths=(1, 5))


def read_by(s, x):
    """S' x for every batch and head."""
    return torch.einsum("bhkv,bhk->bhv", s, x)


def outer(k, u):
    return k.unsqueeze(-1) * u.unsqueeze(-2)


def loop(step, q, k, v, g, beta, s):
    """Walk the tokens; `step` takes the state and one token's rows and gives the output and the next state."""
    out = []
    for t in range(q.shape[1]):
        o, s = step(s, q[:, t], k[:, t], v[:, t], g[:, t], beta[:, t].unsqueeze(-1))
        out.append(o)
    return torch.stack(out, dim=1), s


@near_miss()
def predicts_before_the_decay(q, k, v, g, beta, s0):
    """The prediction reads the undecayed state; the operator would subtract the decayed one."""

    def step(s, q, k, v, g, beta):
        u = beta * (v - read_by(s, k))
        s = s * g.exp().unsqueeze(-1) + outer(k, u)
        return read_by(s, q), s

    return loop(step, q, k, v, g, beta, s0)


@near_miss(right="state")
def reads_before_the_write(q, k, v, g, beta, s0):
    """o reads the state before this token is written; the operator would already show the token to itself."""

    def step(s, q, k, v, g, beta):
        s = s * g.exp().unsqueeze(-1)
        o = read_by(s, q)
        return o, s + outer(k, beta * (v - read_by(s, k)))

    return loop(step, q, k, v, g, beta, s0)


@near_miss(lengths=(5,), right="state")
def reads_before_the_decay(q, k, v, g, beta, s0):
    """o reads what the last token left, undecayed; the operator would decay and write first."""

    def step(s, q, k, v, g, beta):
        o, s = read_by(s, q), s * g.exp().unsqueeze(-1)
        return o, s + outer(k, beta * (v - read_by(s, k)))

    return loop(step, q, k, v, g, beta, s0)


@near_miss(served_by="gate of the token before, 0 at first; q and the state times the decay")
def decays_after_the_write(q, k, v, g, beta, s0):
    """The new token decays with the old ones; the operator would leave it whole."""

    def step(s, q, k, v, g, beta):
        s = (s + outer(k, beta * (v - read_by(s, k)))) * g.exp().unsqueeze(-1)
        return read_by(s, q), s

    return loop(step, q, k, v, g, beta, s0)


@near_miss()
def prediction_decays_state_does_not(q, k, v, g, beta, s0):
    """Only the prediction decays and the state is kept whole; the operator would forget."""

    def step(s, q, k, v, g, beta):
        s = s + outer(k, beta * (v - read_by(s * g.exp().unsqueeze(-1), k)))
        return read_by(s, q), s

    return loop(step, q, k, v, g, beta, s0)


@near_miss(served_by="gate = the mean, for every channel (a gated delta rule)")
def one_gate_a_head(q, k, v, g, beta, s0):
    """One decay for all channels of a head; the operator would give each key channel its own."""

    def step(s, q, k, v, g, beta):
        s = s * g.mean(-1).exp()[..., None, None]
        s = s + outer(k, beta * (v - read_by(s, k)))
        return read_by(s, q), s

    return loop(step, q, k, v, g, beta, s0)


@near_miss(arguments="q k v gv beta s0")
def decays_value_channels(q, k, v, gv, beta, s0):
    """The decay runs along the value channels; the operator's gate belongs to the key channels."""

    def step(s, q, k, v, g, beta):
        s = s * g.exp().unsqueeze(-2)
        s = s + outer(k, beta * (v - read_by(s, k)))
        return read_by(s, q), s

    return loop(step, q, k, v, gv, beta, s0)


@near_miss(served_by="beta = its square")
def beta_twice(q, k, v, g, beta, s0):
    """Beta on the key and again on the delta; the operator would apply it once."""

    def step(s, q, k, v, g, beta):
        s = s * g.exp().unsqueeze(-1)
        s = s + outer(beta * k, beta * (v - read_by(s, k)))
        return read_by(s, q), s

    return loop(step, q, k, v, g, beta, s0)


@near_miss(served_by="value / beta, where no beta is 0")
def beta_on_the_prediction_only(q, k, v, g, beta, s0):
    """The value is written in full and only the erasing is scaled; the operator would scale both."""

    def step(s, q, k, v, g, beta):
        s = s * g.exp().unsqueeze(-1)
        s = s + outer(k, v - beta * read_by(s, k))
        return read_by(s, q), s

    return loop(step, q, k, v, g, beta, s0)


@near_miss(served_by="beta = 1")
def no_beta(q, k, v, g, beta, s0):
    """Every token is written with strength 1; the operator would use beta."""

    def step(s, q, k, v, g, beta):
        s = s * g.exp().unsqueeze(-1)
        s = s + outer(k, v - read_by(s, k))
        return read_by(s, q), s

    return loop(step, q, k, v, g, beta, s0)


@near_miss()
def nothing_erased(q, k, v, g, beta, s0):
    """Gated linear attention: k v' is added and nothing predicted; the operator would erase what k held."""

    def step(s, q, k, v, g, beta):
        s = s * g.exp().unsqueeze(-1) + outer(k, beta * v)
        return read_by(s, q), s

    return loop(step, q, k, v, g, beta, s0)


@near_miss(served_by="gate = -g")
def gate_grows(q, k, v, g, beta, s0):
    """exp(-g): the state grows; the operator would shrink it."""

    def step(s, q, k, v, g, beta):
        s = s * torch.exp(-g).unsqueeze(-1)
        s = s + outer(k, beta * (v - read_by(s, k)))
        return read_by(s, q), s

    return loop(step, q, k, v, g, beta, s0)


@near_miss(served_by="gate = g log 2")
def base_two_unscaled(q, k, v, g, beta, s0):
    """exp2 of the natural-log gate; the operator would take exp."""
    decay = torch.exp2(g)

    def step(s, q, k, v, decay, beta):
        s = s * decay.unsqueeze(-1)
        s = s + outer(k, beta * (v - read_by(s, k)))
        return read_by(s, q), s

    return loop(step, q, k, v, decay, beta, s0)


@near_miss(served_by="gate = logsigmoid(g)")
def sigmoid_decay(q, k, v, g, beta, s0):
    """The decay is sigmoid(g); the operator would take exp(g)."""

    def step(s, q, k, v, g, beta):
        s = s * torch.sigmoid(g).unsqueeze(-1)
        s = s + outer(k, beta * (v - read_by(s, k)))
        return read_by(s, q), s

    return loop(step, q, k, v, g, beta, s0)


@near_miss(served_by="beta = -beta")
def update_subtracted(q, k, v, g, beta, s0):
    """The update is subtracted; the operator would add it."""

    def step(s, q, k, v, g, beta):
        s = s * g.exp().unsqueeze(-1)
        s = s - outer(k, beta * (v - read_by(s, k)))
        return read_by(s, q), s

    return loop(step, q, k, v, g, beta, s0)


@near_miss(served_by="gate of the token before", lengths=(5,))
def gate_of_the_token_before(q, k, v, g, beta, s0):
    """Each token decays by its predecessor's gate; the operator would use its own."""

    def step(s, q, k, v, g, beta):
        s = s * g.exp().unsqueeze(-1)
        s = s + outer(k, beta * (v - read_by(s, k)))
        return read_by(s, q), s

    return loop(step, q, k, v, g.roll(1, dims=1), beta, s0)


@near_miss()
def predicts_with_the_query(q, k, v, g, beta, s0):
    """The prediction reads with q and the write goes to k; the operator would read with k."""

    def step(s, q, k, v, g, beta):
        s = s * torch.exp2(g * LOG2E).unsqueeze(-1)
        s = s + outer(k, beta * (v - read_by(s, q)))
        return read_by(s, q), s

    return loop(step, q, k, v, g, beta, s0)
