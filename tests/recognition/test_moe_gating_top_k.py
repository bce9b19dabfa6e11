"""Routers: every spelling of the corpus that is recognised, and every near miss left alone or served rightly."""

import pytest
import torch
from expert_programs import compiled, near_misses, spellings
from running import relative_error, run

OPERATOR = "moe_gating_top_k"
BIAS = torch.randn(20, generator=torch.Generator().manual_seed(1)) * 0.3


def at_lengths(programs):
    for name, program in programs.items():
        for length in program.lengths:
            yield pytest.param(program, length, id=f"{name}-{length}")


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("program", "length"), list(at_lengths(spellings(OPERATOR))))
def test_a_spelling_is_fused(program, length):
    ran, error = compiled(program, length)
    assert ran.fused == {OPERATOR: 1}, ran.reasons
    assert error < 1e-5


@pytest.mark.parametrize("name", near_misses(OPERATOR))
def test_a_near_miss_gives_its_own_numbers(name):
    program = near_misses(OPERATOR)[name]
    ran, error = compiled(program, 7)
    assert not (program.excluded and ran.fused)
    assert error < 1e-5


def routed(x, weight, bias=BIAS, k=4):
    scores = (x @ weight.T).sigmoid()
    experts = (scores + bias).topk(k, -1).indices
    weights = scores.gather(-1, experts)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20), experts


@pytest.mark.parametrize("count", [60, 128, 896])
@pytest.mark.parametrize("score", [torch.sigmoid, lambda logits: logits.softmax(-1)])
def test_many_experts_without_a_bias(score, count):
    ran = run(lambda x, w: score(x @ w.T).topk(4, -1), random(3, 9), random(count, 9, seed=1), stable=False)
    assert ran.fused == {OPERATOR: 1}, ran.reasons
    assert torch.equal(ran.got[1], ran.want[1])


def test_tokens_of_a_batch_stay_three_dimensional():
    ran = run(lambda x, w: routed(x, w), random(2, 5, 9), random(20, 9, seed=1), stable=False)
    assert ran.fused == {OPERATOR: 1}
    assert torch.equal(ran.got[1], ran.want[1])
    assert relative_error(ran.got[0], ran.want[0]) < 1e-5


def test_a_symbolic_number_of_tokens():
    x = random(7, 9)
    torch._dynamo.mark_dynamic(x, 0)
    ran = run(lambda x, w: routed(x, w), x, random(20, 9, seed=1), stable=False)
    assert ran.fused == {OPERATOR: 1}
    assert torch.equal(ran.got[1], ran.want[1])


def test_many_static_tokens_are_confirmed_at_fewer():
    ran = run(lambda x, w: routed(x, w), random(300, 9), random(20, 9, seed=1), stable=False)
    assert ran.fused == {OPERATOR: 1}
    assert ran.reports[0].to_dict()["confirmations"][0]["sizes"]["N"] == 37


def test_equal_layers_cost_one_confirmation(monkeypatch):
    from k31compile.passes.recognise.gating_reading import GatingReading

    begun = []
    begin = GatingReading.begin
    monkeypatch.setattr(GatingReading, "begin", lambda self, sizes: (begun.append(self), begin(self, sizes)))

    def two(x, v, w):
        return *routed(x, v), *routed(x, w)

    ran = run(two, random(7, 9), random(20, 9, seed=1), random(20, 9, seed=2), stable=False)
    assert ran.fused == {OPERATOR: 2}
    assert len(begun) == 1


ALMOST = {
    "an added number": lambda s: (
        s,
        (s + BIAS).topk(4, -1).indices,
        lambda w: w / (w.sum(-1, keepdim=True) + 1e-3) + 1e-6,
    ),
    "the sum bounded": lambda s: (
        s,
        (s + BIAS).topk(4, -1).indices,
        lambda w: w / w.sum(-1, keepdim=True).clamp_min(0.1),
    ),
    "scores bounded": lambda s: (s.clamp_min(1e-6), (s + BIAS).topk(4, -1).indices, lambda w: w * 2),
    "bias bounded": lambda s: (s, (s + BIAS.clamp(-8, 8)).topk(4, -1).indices, lambda w: w * 2),
    "one expert never": lambda s: (s, (s + BIAS)[:, :-1].topk(4, -1).indices, lambda w: w * 2),
    "squares": lambda s: (s, (s + BIAS).topk(4, -1).indices, lambda w: w * w),
}


@pytest.mark.parametrize("name", ALMOST)
def test_one_change_is_noticed(name):
    """What the whole claims may be served by raw weights with the change behind them, never by another form."""

    def program(x, w):
        scores, experts, finish = ALMOST[name]((x @ w.T).sigmoid())
        return finish(scores.gather(-1, experts)), experts

    ran = run(program, random(7, 9) * 20, random(20, 9, seed=1), stable=False)
    assert torch.equal(ran.got[1], ran.want[1])
    assert relative_error(ran.got[0], ran.want[0]) < 1e-5


def test_a_weight_read_before_it_is_finished_is_refused_with_a_sentence():
    def program(x, w):
        scores = torch.nn.functional.linear(x, w).sigmoid()
        experts = scores.topk(4, -1).indices
        weights = scores.gather(-1, experts)
        return weights / weights.sum(-1, keepdim=True), experts, weights * 3 + 1

    ran = run(program, random(7, 9), random(20, 9, seed=1), stable=False)
    assert ran.fused == {} or relative_error(ran.got[2], ran.want[2]) < 1e-5


def test_the_best_words_are_no_experts():
    def program(x, w):
        values, words = torch.nn.functional.linear(x, w).topk(4, -1)
        return values.softmax(-1), words

    assert run(program, random(2, 9), random(5000, 9, seed=1), stable=False).fused == {}
