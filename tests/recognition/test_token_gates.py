"""Gates made inside of a loop over tokens: gathered, fused, and not where a token is treated otherwise."""

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

import k31compile
from k31compile.passes.recognise.token_gates import gather_token_functions

TOKENS = 4


def gathered(function, *arguments):
    """How many functions were gathered, and the graph's result before and after."""
    module = make_fx(function, pre_dispatch=True, tracing_mode="fake")(*arguments)
    before = module(*arguments)
    count = gather_token_functions(module.graph)
    module.graph.lint()
    module.graph.eliminate_dead_code()
    module.recompile()
    after = module(*arguments)
    for one, other in zip(before, after, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
    return count, module


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


G, BIAS, RATE = drawn(2, TOKENS, 3, 5), drawn(3, 5, seed=1), drawn(3, 1, seed=2)


def each(function):
    return lambda g, *others: tuple(function(g[:, t], *others) for t in range(TOKENS))


@pytest.mark.parametrize(
    ("function", "others", "count"),
    [
        (lambda g: (g * 1.4426950408889634).exp2(), (), 2),
        (lambda g: (-5 * torch.sigmoid(g)).exp(), (), 3),
        (lambda g, bias, rate: (rate * F.softplus(g + bias)).exp(), (BIAS, -RATE.exp()), 4),
        # The rate is made anew for each token, so that its product is no longer one of all.
        (lambda g, bias, rate: (-rate.exp() * F.softplus(g + bias)).exp(), (BIAS, RATE), 2),
        (lambda g, rows: (g + rows).exp(), (drawn(2, 1, 5, seed=3),), 2),
        (lambda g, rows: (rows - g).exp(), (drawn(2, 3, 1, seed=3),), 2),
        (lambda g: torch.clamp(g, min=-1.0).double().exp(), (), 3),
        (lambda g: g + 1, (), 0),  # leads to no gate
        (lambda g: g[..., :1].exp(), (), 0),  # is no function of the token element by element
        (lambda g: (g.cumsum(-1)).exp(), (), 0),
    ],
)
def test_functions_of_each_token(function, others, count):
    found, module = gathered(each(function), G, *others)
    assert found == count
    exponentials = [
        n for n in module.graph.nodes if n.target in (torch.ops.aten.exp.default, torch.ops.aten.exp2.default)
    ]
    if count and "rate" not in function.__code__.co_varnames:
        assert sum(node.meta["val"].shape == G.shape for node in exponentials) == 1


def test_unbound_tokens_and_negative_places():
    assert gathered(lambda g: tuple((g_t * 2).exp() for g_t in g.unbind(1)), G)[0] == 2
    assert gathered(lambda g: tuple((g[:, t - TOKENS] * 2).exp() for t in range(TOKENS)), G)[0] == 2
    assert gathered(lambda g: tuple((g.select(-3, t) * 2).exp() for t in reversed(range(TOKENS))), G)[0] == 2


@pytest.mark.parametrize(
    "function",
    [
        lambda g: tuple((g[:, t] * 2).exp() for t in range(TOKENS - 1)),
        lambda g: tuple((g[:, t] * (2 if t else 3)).exp() for t in range(TOKENS)),
        lambda g: tuple((g[:, t] - 1.0).exp() if t else (g[:, t] * 2).exp() for t in range(TOKENS)),
        lambda g: tuple((g[:, t] * g[:, t - 1]).exp() for t in range(TOKENS)),
        lambda g: tuple((g[:, t] / 2).exp() if t % 2 else (g[:, t] * 2).exp() for t in range(TOKENS)),
    ],
    ids=["one_left_out", "one_scaled_otherwise", "one_shifted", "two_tokens_at_once", "every_other"],
)
def test_what_is_not_the_same_for_all_tokens_stays(function):
    assert gathered(function, G)[0] == 0


def test_the_common_first_steps_are_gathered_and_the_rest_stays():
    count, _ = gathered(
        lambda g: tuple((g[:, t] * 2).exp() if t else (g[:, t] * 2).sigmoid() for t in range(TOKENS)), G
    )
    assert count == 1


DECAYS = {
    "exp2": lambda g, b, a: torch.exp2(g * 1.4426950408889634),
    "half": lambda g, b, a: (0.5 * g).exp(),
    "softplus": lambda g, b, a: (-a.exp() * F.softplus(g + b)).exp(),
    "bounded": lambda g, b, a: (-5.0 * torch.sigmoid(a.exp() * (g + b))).exp(),
    "clamped": lambda g, b, a: g.clamp(min=-5.0, max=0.0).exp(),
    "direct": lambda g, b, a: torch.sigmoid(g),
}


def recurrence(decay, beta=torch.sigmoid, lie=None):
    def run(q, k, v, g, b, bias, rate, state):
        out = []
        for t in range(q.shape[1]):
            kept = decay(g[:, t - 1] if lie == "gate of another token" else g[:, t], bias, rate)
            state = state * (kept.square() if lie == "one decays twice" and t == 2 else kept)[..., None]
            seen = torch.einsum("bhk,bhkv->bhv", k[:, t], state)
            strength = b[:, t] if lie == "one beta raw" and t == 1 else beta(b[:, t])
            update = (v[:, t] - seen) * strength[..., None]
            state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], update)
            out.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
        return torch.stack(out, 1), state

    return run


def operands(tokens=6):
    heads, width, depth = 3, 8, 12
    q, k, g = (drawn(2, tokens, heads, width, seed=s) for s in (1, 2, 3))
    k = F.normalize(k, dim=-1)
    state, v = drawn(2, heads, width, depth, seed=4), drawn(2, tokens, heads, depth, seed=5)
    return q, k, v, g, drawn(2, tokens, heads, seed=6), drawn(heads, width, seed=7), drawn(heads, 1, seed=8), state


def compiled(program):
    torch._dynamo.reset()
    arguments = operands()
    with torch.no_grad():
        got = torch.compile(program, backend="k31", options={"codegen": "ops"}, dynamic=False)(*arguments)
        expected = program(*arguments)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    return k31compile.last_report().fused


@pytest.mark.parametrize("name", DECAYS)
def test_a_gate_made_inside_the_loop_is_fused(name):
    assert compiled(recurrence(DECAYS[name])) == {"kda_recurrent": 1}


@pytest.mark.parametrize("lie", ["gate of another token", "one decays twice", "one beta raw"])
def test_a_lie_keeps_its_numbers(lie):
    compiled(recurrence(DECAYS["softplus"], lie=lie))
