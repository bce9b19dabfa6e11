"""The core of a KDA layer as one operator: the corpus, the house's layer, and glue that is only near."""

import pytest
import torch
from small_operators import NEAR_MISSES, PARTS, SPELLINGS, cases, fates, passed, through
from torch.nn.functional import normalize, silu, softplus

import k31compile
from k31compile.passes.recognise.mega_kda import MegaKdaRecogniser

NAME = "mega_kda"
H, K, V, TAPS, LB = 3, 6, 7, 4, -5.0
CHANNELS = 2 * H * K + H * V
LEFT_IN_PARTS = {
    "token_by_token": "value inside",  # a norm for each token
}
SERVED = {"output_gate_before_the_norm", "swish_output_gate", "window_of_activated_inputs"}
"""Near misses of a layer with a sigmoid behind the norm: the operator has a word for them, or they are outside."""


@pytest.mark.parametrize(("name", "length", "dtype"), cases(SPELLINGS, NAME))
def test_spelling(name, length, dtype):
    result = passed(NAME, SPELLINGS[name], length, dtype)
    assert result.error <= (2e-6 if dtype == torch.float32 else 1e-3)
    if name in LEFT_IN_PARTS:
        assert result.count(NAME) == 0
        assert result.reasons
        return
    assert result.count(NAME) == 1, result.reasons
    assert [result.count(part) for part in PARTS[NAME]] == [0, 0, 0]


@pytest.mark.parametrize(("name", "length", "dtype"), cases(NEAR_MISSES, NAME))
def test_near_miss(name, length, dtype):
    result = passed(NAME, NEAR_MISSES[name], length, dtype)
    assert result.error <= 1e-5
    assert result.count(NAME) == (name in SERVED)
    assert not NEAR_MISSES[name].excluded or name not in SERVED
    if name not in SERVED:
        assert result.count("kda_recurrent") == 1
        assert any("of a KDA layer" in reason or "no SiLU" in reason for reason in result.reasons), result.reasons


def drawn(length=1, dtype=torch.float32, batch=2, seed=0):
    """Arguments of `layer`: streams and caches of `dtype`, weights and the state in float32."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    activations = [(CHANNELS,), (H * K,), (H,), (H * V,)]
    streams = [normal(batch, length, *shape).to(dtype) for shape in activations]
    weights = [normal(CHANNELS, TAPS), normal(H), normal(H, K), normal(V)]
    return [*streams, normal(batch, TAPS - 1, CHANNELS).to(dtype), normal(batch, H, K, V), *weights]


def unit(x, eps=1e-6):
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def bounded(raw, rate, shift):
    return LB * torch.sigmoid(rate.exp()[:, None] * (raw.float() + shift))


def step(q, k, v, g, beta, state):
    out = []
    for t in range(q.shape[1]):
        state = g[:, t].exp()[..., None] * state
        update = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t]))
        state = state + k[:, t, :, :, None] * update[:, :, None]
        out.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(out, 1), state


def layer(
    of_query=lambda q: unit(q.float()) * K**-0.5,
    of_key=lambda k: unit(k.float()),
    of_value=lambda v: v,
    decay=bounded,
    of_beta=lambda b: b.float().sigmoid(),
    of_core=lambda o: o,
    more=lambda **values: (),
):
    """A KDA layer between its projections, one piece of its glue exchanged; `more` is returned beside its results."""

    def call(x, raw, raw_beta, opening, before, state, taps, rate, shift, weight):
        window = torch.cat([before, x], 1)
        length = x.shape[1]
        y = silu(sum(window[:, i : i + length].float() * taps[:, i] for i in range(TAPS))).to(x.dtype)
        q, k, v = (part.unflatten(-1, (H, -1)) for part in y.split([H * K, H * K, H * V], -1))
        q, k, v = of_query(q), of_key(k), of_value(v)
        g, beta = decay(raw.unflatten(-1, (H, K)), rate, shift), of_beta(raw_beta)
        core, state = step(q.float(), k.float(), v.float(), g.float(), beta.float(), state)
        rows = of_core(core).float()
        normed = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + 1e-5) * weight
        out = (normed * opening.unflatten(-1, (H, V)).float().sigmoid()).to(x.dtype).flatten(-2)
        beside = more(y=y, q=q, k=k, g=g, beta=beta, core=core, normed=normed, out=out)
        return out, state, window[:, length:], *beside

    return call


def run(fn, dtype=torch.float32, length=1):
    return through(NAME, fn, lambda: drawn(length, dtype, seed=4))


RIGHT = {
    "as the operator has it": ({}, {"lower_bound": LB, "scale": K**-0.5}),
    "another eps": ({"of_query": lambda q: unit(q, 1e-3), "of_key": lambda k: unit(k, 1e-3)}, {"l2_eps": 1e-3}),
    "no scale": ({"of_query": unit}, {}),
    "the scale behind": ({"of_query": unit, "of_core": lambda o: o * 0.3}, {"scale": 0.3}),
    "another bound": ({"decay": lambda *of: bounded(*of) * 0.5}, None),
    "softplus": ({"decay": lambda raw, rate, shift: -rate.exp()[:, None] * softplus(raw + shift)}, {}),
    "no bias": ({"decay": lambda raw, rate, _: LB * torch.sigmoid(rate.exp()[:, None] * raw)}, {"lower_bound": LB}),
    "beta twice as large": ({"of_beta": lambda b: 2 * b.sigmoid()}, {"beta_factor": 2.0}),
}


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("length", [1, 5])
def test_glue_that_the_operator_has_words_for(name, length):
    changes, options = RIGHT[name]
    result = run(layer(**changes), length=length)
    assert result.error <= 2e-6
    if options is None:  # two constants, and the bound is neither: it stays in parts
        assert result.count(NAME) == 0
        return
    assert result.count(NAME) == 1, result.reasons
    kwargs = result.call(NAME).kwargs
    assert {name: kwargs[name] for name in options} == pytest.approx(options)


WRONG = {
    "two different eps": {"of_query": lambda q: unit(q, 1e-3)},
    "keys as they are": {"of_key": lambda k: k * 0.5},
    "queries as they are": {"of_query": lambda q: q * 0.5},
    "a smallest length": {"of_key": lambda k: normalize(k, dim=-1, eps=1e-3)},
    "values normalised": {"of_value": lambda v: unit(v)},
    "values scaled": {"of_value": lambda v: v * 2},
    "keys clamped": {"of_key": lambda k: unit(k.clamp(-2, 2))},
    "the head before": {"of_key": lambda k: unit(k.roll(1, 2))},
    "beta squared": {"of_beta": lambda b: b.sigmoid().square()},
    "beta with a threshold": {"of_beta": lambda b: b.sigmoid().clamp_max(0.9)},
    "a steeper beta": {"of_beta": lambda b: (1.1 * b).sigmoid()},
    "one and a half beta": {"of_beta": lambda b: 1.5 * b.sigmoid()},
    "a bias behind the rate": {"decay": lambda raw, rate, shift: LB * (rate.exp()[:, None] * raw + shift).sigmoid()},
    "no rate": {"decay": lambda raw, rate, shift: LB * (raw + shift + 0 * rate[:, None]).sigmoid()},
    "a rate without exp": {"decay": lambda raw, rate, shift: LB * (rate[:, None] * (raw + shift)).sigmoid()},
    "a floor under the gate": {"decay": lambda *of: bounded(*of).clamp_min(-4.9)},
    "softplus of the rate": {"decay": lambda raw, rate, shift: -softplus(rate)[:, None] * softplus(raw + shift)},
    "a steeper softplus": {"decay": lambda raw, rate, shift: -rate.exp()[:, None] * softplus(raw + shift, beta=2.0)},
    "a skip around the rule": {"of_core": lambda o: o + 1},
    "a tanh before the norm": {"of_core": torch.tanh},
    "a clamp before the norm": {"of_core": lambda o: o.clamp(-9, 9)},
}


@pytest.mark.parametrize("name", WRONG)
def test_other_glue_stays_in_parts_with_a_sentence(name):
    result = run(layer(**WRONG[name]))
    assert result.error <= 2e-6
    assert result.count(NAME) == 0
    assert result.count("kda_recurrent") == 1
    assert any(result.reasons)


READ = {
    "unit queries": lambda q, **_: (q,),
    "the convolution": lambda y, **_: (y * 2,),
    "the values in it": lambda y, **_: (y[..., -1],),
    "log decays": lambda g, **_: (g.sum(),),
    "beta": lambda beta, **_: (2 * beta,),
    "the output before its norm": lambda core, **_: (core.mean(),),
    "the normed rows before their gate": lambda normed, **_: (normed,),
}


@pytest.mark.parametrize("name", READ)
def test_a_value_that_someone_else_reads(name):
    result = run(layer(more=READ[name]))
    assert result.error <= 2e-6
    assert result.count(NAME) == 0
    if name != "the normed rows before their gate":  # then there is no gated norm either
        assert any("a value inside the layer, is also read by" in reason for reason in result.reasons)


def test_results_may_have_any_readers():
    result = run(layer(more=lambda out, **_: (out * 2, out.sum())))
    assert (result.count(NAME), result.reasons) == (1, [])
    assert result.error <= 2e-6


@pytest.mark.parametrize("length", [1, 5])
def test_the_author_s_roundings(length):
    """Streams in bfloat16, beta's sigmoid and the core rounded too, as transformers' kimi_linear has it."""
    rounded = layer(of_beta=lambda b: b.sigmoid(), of_core=lambda o: o.to(torch.bfloat16))
    result = run(rounded, torch.bfloat16, length)
    assert result.count(NAME) == 1, result.reasons
    kwargs = result.call(NAME).kwargs
    assert (kwargs["beta_dtype"], kwargs["core_dtype"]) == (torch.bfloat16, torch.bfloat16)
    assert result.error <= 2**-8
    plain = run(layer(), torch.bfloat16, length)
    assert plain.count(NAME) == 1, plain.reasons
    assert not {"beta_dtype", "core_dtype"} & set(plain.call(NAME).kwargs)
    assert plain.error <= 2**-8


OTHER_ROUNDINGS = {
    "unit queries": {"of_query": lambda q: unit(q) * K**-0.5},
    "unit keys": {"of_key": lambda k: unit(k.float()).to(torch.bfloat16)},
    "log decays": {"decay": lambda *of: bounded(*of).to(torch.bfloat16)},
    "shifted gates": {"decay": lambda raw, rate, shift: bounded(raw + shift.to(raw.dtype), rate, 0.0)},
}


@pytest.mark.parametrize("name", OTHER_ROUNDINGS)
def test_other_roundings_stay_in_parts(name):
    result = run(layer(**OTHER_ROUNDINGS[name]), torch.bfloat16)
    assert result.count(NAME) == 0
    assert any("rounds elsewhere" in reason for reason in result.reasons), result.reasons


def test_one_graph_serves_every_batch():
    torch._dynamo.reset()
    known = len(k31compile.reports())
    compiled = torch.compile(layer(), backend="k31", options={"codegen": "ops"})
    for batch in (5, 4):
        given = drawn(batch=batch)
        for activation in given[:6]:
            torch._dynamo.mark_dynamic(activation, 0)
        with torch.no_grad():
            for got, want in zip(compiled(*given), layer()(*given), strict=True):
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert [report.fused for report in k31compile.reports()[known:]] == [{NAME: 1}]


def test_padded_tokens_stay_in_parts():
    def padded(x, raw, raw_beta, opening, before, state, taps, rate, shift, weight, lengths):
        pad = ~(torch.arange(x.shape[1]) < lengths[:, None])[..., None]
        given = (x, raw.masked_fill(pad, -torch.inf), raw_beta.masked_fill(pad, -torch.inf))
        return layer()(*given, opening, before, state, taps, rate, shift, weight)

    result = through(NAME, padded, lambda: [*drawn(5), torch.tensor([5, 2])])
    assert result.count(NAME) == 0
    assert result.reasons


def test_equal_layers_cost_one_confirmation(monkeypatch):
    from k31compile.passes.recognise.mega_reading import MegaReading

    runs = []
    run_of = MegaReading.run
    monkeypatch.setattr(MegaReading, "run", lambda self, *a: runs.append(1) or run_of(self, *a))
    both = lambda *args: tuple(y for i in (0, 10) for y in layer()(*args[i : i + 10]))  # noqa: E731
    result = through(NAME, both, lambda: [*drawn(seed=1), *drawn(seed=2)])
    assert result.count(NAME) == 2
    assert len(runs) == 6


def test_the_report_counts_it_and_its_parts():
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(layer(), backend="k31", options={"codegen": "ops"})(*drawn())
    report = k31compile.last_report()
    assert report.fused == {NAME: 1}
    assert report.contains == {"gated_rms_norm": 1, "kda_recurrent": 1, "short_conv": 1}
    assert report.providers.keys() == {NAME}


def test_without_its_fusion_the_parts_stay():
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(layer(), backend="k31", options={"codegen": "ops", "fuse": PARTS[NAME]})(*drawn())
    report = k31compile.last_report()
    assert report.fused == {"gated_rms_norm": 1, "kda_recurrent": 1, "short_conv": 1}
    assert report.contains == {}


@pytest.mark.parametrize(("name", "length"), [("state_read_once_in_a_layer", 1)])
def test_sampled_mutants(name, length):
    hold(name, length, every=9)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "length"), [("state_read_once_in_a_layer", 5), ("three_convolutions", 1)])
def test_all_mutants(name, length):
    hold(name, length, every=1)


def hold(name, length, every):
    count, false = fates(MegaKdaRecogniser(), SPELLINGS[name], length, every)
    assert not false, "\n".join(f"{verdict.name}: {verdict.detail}" for verdict in false)
    assert count["killed"] > 0.4 * count.total()
