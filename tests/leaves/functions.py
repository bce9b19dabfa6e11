"""Functions as authors write them: the delta rule, what is close to it, and what no confirmation can vouch for."""

import random

import torch
import torch.nn.functional as F

HALF = 0.5
TABLE = {"scale": 1.0}
CALLS = []


def unit(x, eps=1e-6):
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps)


def kda_recurrent(q, k, v, g, beta, initial_state=None):
    """Token by token, [B, T, H, D]."""
    state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3]) if initial_state is None else initial_state
    out = []
    for t in range(q.shape[1]):
        state = state * g[:, t, :, :, None].exp()
        write = beta[:, t, :, None] * (v[:, t] - (state * k[:, t, :, :, None]).sum(-2))
        state = state + k[:, t, :, :, None] * write[:, :, None]
        out.append((state * q[:, t, :, :, None]).sum(-2))
    return torch.stack(out, 1), state


def kda_chunk(keys, queries, values, decay, lr, chunk=16, normalise=False):
    """In chunks that are filled up, heads before tokens, other names in another order."""
    if normalise:
        keys, queries = unit(keys), unit(queries)
    length = keys.shape[2]
    fill = -length % chunk
    queries, keys, values, decay = (F.pad(x, (0, 0, 0, fill)) for x in (queries, keys, values, decay))
    lr = F.pad(lr, (0, fill))
    cut = lambda x: x.unflatten(2, (-1, chunk))  # noqa: E731
    q, k, v, g, b = cut(queries) * HALF, cut(keys), cut(values), cut(decay).cumsum(-2), cut(lr)[..., None]
    ones = torch.ones(chunk, chunk, dtype=torch.bool)
    pairs = (g.unsqueeze(-2) - g.unsqueeze(-3)).masked_fill(ones.triu(1)[..., None], float("-inf")).exp()
    inner = torch.eye(chunk, dtype=q.dtype) + (b * (k.unsqueeze(-2) * k.unsqueeze(-3) * pairs).sum(-1)).tril(-1)
    w, u = (torch.linalg.solve_triangular(inner, b * x, upper=False) for x in (k * g.exp(), v))
    read = (q.unsqueeze(-2) * k.unsqueeze(-3) * pairs).sum(-1).tril()
    state, out = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1]), []
    for n in range(q.shape[2]):
        fresh = u[:, :, n] - w[:, :, n] @ state
        out.append((q[:, :, n] * g[:, :, n].exp()) @ state + read[:, :, n] @ fresh)
        last = g[:, :, n, -1:]
        state = state * last.exp().mT + (k[:, :, n] * (last - g[:, :, n]).exp()).mT @ fresh
    return torch.cat(out, 2)[:, :, :length]


def gated_delta_recurrent(q, k, v, beta, g, scale=None, initial_state=None, output_final_state=False):
    """One gate a head, and a state that only some callers want."""
    state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3]) if initial_state is None else initial_state
    out = torch.zeros_like(v)
    for t in range(q.shape[1]):
        state = state * g[:, t, :, None, None].exp()
        write = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t]))
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], write)
        out[:, t] = torch.einsum("bhkv,bhk->bhv", state, q[:, t] * (scale or q.shape[-1] ** -0.5))
    return out, state if output_final_state else None


def whole_chunks(q, k, v, g, beta):
    """Refuses lengths that are no multiple of 16."""
    assert q.shape[1] % 16 == 0
    turn = lambda x: x.transpose(1, 2)  # noqa: E731
    return turn(kda_chunk(turn(k), turn(q), turn(v), turn(g), turn(beta)))


# What is not the rule.


def predicts_before_decay(q, k, v, g, beta, initial_state):
    state, out = initial_state, []
    for t in range(q.shape[1]):
        write = beta[:, t, :, None] * (v[:, t] - (state * k[:, t, :, :, None]).sum(-2))
        state = state * g[:, t, :, :, None].exp() + k[:, t, :, :, None] * write[:, :, None]
        out.append((state * q[:, t, :, :, None]).sum(-2))
    return torch.stack(out, 1), state


def forgets_after_48(q, k, v, g, beta, initial_state):
    if q.shape[1] > 48:
        initial_state = torch.zeros_like(initial_state)
    return kda_recurrent(q, k, v, g, beta, initial_state)


def special_for_one_sequence(q, k, v, g, beta, initial_state):
    if q.shape[0] == 1:
        g = g * 0.5
    return kda_recurrent(q, k, v, g, beta, initial_state)


def other_in_half_precision(q, k, v, g, beta, initial_state):
    if q.dtype == torch.bfloat16:
        g = g * 0.5
    return kda_recurrent(q, k, v, g, beta, initial_state)


def clamps_keys(q, k, v, g, beta, initial_state):
    return kda_recurrent(q, k.clamp(-3, 3), v, g, beta, initial_state)


# What cannot be vouched for.


def long_lengths_differ(q, k, v, g, beta, initial_state):
    return kda_recurrent(q, k, v, g if q.shape[1] < 5000 else g * 2, beta, initial_state)


def long_lengths_differ_by_a_float(q, k, v, g, beta, initial_state):
    return kda_recurrent(q, k, v, g if q.shape[1] < 5e3 else g * 2, beta, initial_state)


def writes_its_state(q, k, v, g, beta, initial_state):
    out, state = kda_recurrent(q, k, v, g, beta, initial_state)
    return out, initial_state.copy_(state)


def reads_a_table(q, k, v, g, beta, initial_state):
    return kda_recurrent(q * TABLE["scale"], k, v, g, beta, initial_state)


def reads_through_a_helper(q, k, v, g, beta, initial_state):
    return reads_a_table(q, k, v, g, beta, initial_state)


def draws(q, k, v, g, beta, initial_state):
    return kda_recurrent(q + 1e-9 * torch.randn_like(q), k, v, g, beta, initial_state)


def draws_by_dropout(q, k, v, g, beta, initial_state):
    return kda_recurrent(F.dropout(q, 0.1, training=True), k, v, g, beta, initial_state)


def draws_by_python(q, k, v, g, beta, initial_state):
    return kda_recurrent(q * random.random(), k, v, g, beta, initial_state)


def counts(q, k, v, g, beta, initial_state):
    counts.calls = 1
    return kda_recurrent(q, k, v, g, beta, initial_state)


def appends(q, k, v, g, beta, initial_state):
    CALLS.append(1)
    return kda_recurrent(q, k, v, g, beta, initial_state)


def asks_who_calls(q, k, v, g, beta, initial_state):
    return kda_recurrent(q if torch.compiler.is_compiling() else 2 * q, k, v, g, beta, initial_state)


def changeable_default(q, k, v, g, beta, initial_state, factors=[1.0]):  # noqa: B006
    return kda_recurrent(q * factors[0], k, v, g, beta, initial_state)


def enclosing(factor):
    def inside(q, k, v, g, beta, initial_state):
        return kda_recurrent(q * factor, k, v, g, beta, initial_state)

    return inside


def operands(length, batch=2, heads=3, k=10, v=7, scalar=False, heads_first=False, dtype=torch.float32):
    """q, k, v, g, beta, state."""
    generator = torch.Generator().manual_seed(length)
    rows = (batch, length, heads)
    q, key = (F.normalize(torch.randn(*rows, k, generator=generator), dim=-1) for _ in "qk")
    value = torch.randn(*rows, v, generator=generator)
    gate = -torch.rand(*rows, *(() if scalar else (k,)), generator=generator)
    beta, state = torch.rand(*rows, generator=generator), torch.randn(batch, heads, k, v, generator=generator)
    found = [q, key, value, gate, beta]
    if heads_first:
        found = [x.transpose(1, 2).contiguous() for x in found]
    return [x.to(dtype) for x in (*found, state)]
