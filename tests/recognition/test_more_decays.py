"""Decays of the delta rule: for two layers, one minus a sigmoid, flat with keys first, read by others; small sizes."""

import pytest
import torch
import torch.nn.functional as F
from running import relative_error, run

B, T, H, K, V = 2, 3, 5, 6, 7
KDA, SCALAR = "kda_recurrent", "gated_delta_recurrent"


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def operands(b=B, t=T, h=H, k=K, v=V):
    """Query, key, value, a raw gate, beta, a state."""
    vectors = [F.normalize(random(b, t, h, k, seed=i), dim=-1) for i in (1, 2)]
    beta = random(b, t, h, seed=5).sigmoid()
    return *vectors, random(b, t, h, v, seed=3), random(b, t, h, k, seed=4), beta, random(b, h, k, v, seed=6)


def recur(q, k, v, decay, beta, state):
    out = []
    for t in range(q.shape[1]):
        state = decay[:, t].unsqueeze(-1) * state
        update = beta[:, t].unsqueeze(-1) * (v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t]))
        state = state + k[:, t].unsqueeze(-1) * update.unsqueeze(-2)
        out.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(out, 1), state


def measure(program, *args, bound=1e-5):
    ran = run(program, *args, stable=False)
    for got, want in zip(ran.got, ran.want, strict=True):
        assert relative_error(got, want) < bound
    return ran


DECAYS = {
    "sigmoid": torch.sigmoid,
    "one minus a sigmoid": lambda raw: 1 - raw.sigmoid(),
    "one minus, by name": lambda raw: torch.rsub(torch.sigmoid(raw), 1.0),
    "exponential": lambda raw: (-F.softplus(raw)).exp(),
}


@pytest.mark.parametrize("kind", DECAYS)
@pytest.mark.parametrize("t", [1, 2, 3])
def test_a_decay(kind, t):
    def program(q, k, v, raw, beta, state):
        return recur(q, k, v, DECAYS[kind](raw), beta, state)

    ran = measure(program, *operands(t=t))
    assert ran.fused == {KDA: 1}, ran.reasons


@pytest.mark.parametrize("kind", DECAYS)
def test_two_layers_on_one_decay(kind):
    def program(q, k, v, raw, beta, state, weight):
        decay = DECAYS[kind](raw)
        out, first = recur(q, k, v, decay, beta, state)
        value = F.rms_norm(F.linear(out, weight), (V,))
        return *recur(k, q, value, decay, beta, state * 3), first

    ran = measure(program, *operands(), random(V, V, seed=9))
    assert ran.fused == {KDA: 2}, ran.reasons


@pytest.mark.parametrize("kind", DECAYS)
def test_two_states_beside_each_other(kind):
    def program(q, k, v, raw, beta, state):
        decay = DECAYS[kind](raw)
        return *recur(q, k, v, decay, beta, state), *recur(k, q, v * 2, decay, beta, state * 3)

    ran = measure(program, *operands())
    assert ran.fused == {KDA: 2}, ran.reasons


@pytest.mark.parametrize("kind", DECAYS)
@pytest.mark.parametrize("also", [torch.mean, lambda decay: decay, lambda decay: decay[:, 0].log()])
def test_a_decay_that_is_also_read(kind, also):
    def program(q, k, v, raw, beta, state):
        decay = DECAYS[kind](raw)
        return *recur(q, k, v, decay, beta, state), also(decay)

    ran = measure(program, *operands())
    assert ran.fused == {KDA: 1}, ran.reasons


def flat(order, h=H, k=K):
    """A gate [B, T, H * K] whose heads are split after the exponential."""

    def program(q, key, v, raw, beta, state):
        decay = raw.exp()
        split = decay.unflatten(-1, (h, k)) if order == "heads first" else decay.unflatten(-1, (k, h)).transpose(2, 3)
        return recur(q, key, v, split, beta, state)

    return program


@pytest.mark.parametrize("order", ["heads first", "keys first"])
@pytest.mark.parametrize(("h", "k"), [(H, K), (4, 4), (6, 3)])
def test_a_flat_gate(order, h, k):
    q, key, v, _, beta, state = operands(h=h, k=k)
    ran = measure(flat(order, h, k), q, key, v, -random(B, T, h * k, seed=4).abs(), beta, state)
    assert ran.fused == {KDA: 1}, ran.reasons


SMALL = [(2, 2, 5, 6, 7), (2, 2, 2, 4, 4), (1, 2, 2, 4, 4), (2, 1, 2, 4, 4), (2, 3, 3, 3, 3), (2, 2, 2, 2, 2)]


@pytest.mark.parametrize("sizes", SMALL)
@pytest.mark.parametrize("name", [KDA, SCALAR])
def test_sizes_that_are_alike(sizes, name):
    def program(q, k, v, gate, beta, state):
        decay = gate.exp()
        return recur(q, k, v, decay if name == KDA else decay.unsqueeze(-1), beta, state)

    q, k, v, raw, beta, state = operands(*sizes)
    gate = -raw.abs() if name == KDA else -raw[..., 0].abs()
    ran = measure(program, q, k, v, gate, beta, state)
    assert ran.fused == {name: 1}, ran.reasons


def other_gate_for_one_token(q, k, v, raw, beta, state):
    """The second token is decayed by the sigmoid, the others by one minus it."""
    decay = torch.stack([raw[:, 0], -raw[:, 1], raw[:, 2]], 1)
    return recur(q, k, v, 1 - decay.sigmoid(), beta, state)


def two_minus(q, k, v, raw, beta, state):
    return recur(q, k, v, 2 - raw.sigmoid(), beta, state)


def minus_one(q, k, v, raw, beta, state):
    """A decay below zero."""
    return recur(q, k, v, raw.sigmoid() - 1, beta, state)


def one_minus_tanh(q, k, v, raw, beta, state):
    return recur(q, k, v, 1 - raw.tanh(), beta, state)


def second_layer_shifted(q, k, v, raw, beta, state):
    """The second state is decayed by the gate of the token before."""
    decay = raw.sigmoid()
    return *recur(q, k, v, decay, beta, state), *recur(q, k, v, decay.roll(1, 1), beta, state * 2)


def second_layer_on_the_first_state(q, k, v, raw, beta, state):
    decay = raw.sigmoid()
    out, kept = recur(q, k, v, decay, beta, state)
    return *recur(q, k, out, decay, beta, kept), out


def states_exchanged(q, k, v, raw, beta, state):
    """Two states that change places after the first token."""
    decay, first, second, out = raw.sigmoid(), state, state * 3, []
    for t in range(T):
        first, second = second, first
        pairs = [
            recur(q[:, t : t + 1], k[:, t : t + 1], v[:, t : t + 1], decay[:, t : t + 1], beta[:, t : t + 1], one)
            for one in (first, second)
        ]
        out += [o for o, _ in pairs]
        first, second = (s for _, s in pairs)
    return torch.cat(out, 1), first, second


def read_between(q, k, v, raw, beta, state):
    """The decayed state of one token leaves too."""
    decay = raw.sigmoid()
    out, final = recur(q, k, v, decay, beta, state)
    return out, final, decay[:, 0].unsqueeze(-1) * state, decay


def decayed_twice(q, k, v, raw, beta, state):
    decay = raw.sigmoid()
    return recur(q, k, v, decay * (1 - decay), beta, state)


LIES = [
    other_gate_for_one_token,
    two_minus,
    minus_one,
    one_minus_tanh,
    second_layer_shifted,
    second_layer_on_the_first_state,
    states_exchanged,
    read_between,
    decayed_twice,
]


@pytest.mark.parametrize("program", LIES)
def test_a_lie_keeps_its_numbers(program):
    ran = measure(program, *operands())
    if program in (two_minus, minus_one, one_minus_tanh):
        assert not ran.fused


@pytest.mark.parametrize("lie", ["heads and keys exchanged", "one head rolled"])
def test_a_lie_about_a_flat_gate_keeps_its_numbers(lie):
    def program(q, k, v, raw, beta, state):
        decay = raw.exp().unflatten(-1, (4, 4))
        if lie == "one head rolled":
            decay = torch.cat([decay[..., :1, :].roll(1, -1), decay[..., 1:, :]], -2)
        else:
            decay = torch.where(torch.arange(4)[:, None] > 1, decay, decay.mT)
        return recur(q, k, v, decay, beta, state)

    q, key, v, _, beta, state = operands(h=4, k=4)
    ran = measure(program, q, key, v, -random(B, T, 16, seed=4).abs(), beta, state)
    assert not ran.fused or lie == "one head rolled"
