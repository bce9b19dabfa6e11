"""Attention over depth: spellings of the corpus become the operators, near misses do not, numbers stay eager's."""

import sys
from pathlib import Path

import pytest
import torch
from running import compiled, run
from torch.nn.functional import rms_norm
from torch.utils import _pytree as pytree

import k31compile
from k31compile.options import Options
from k31compile.passes.pipeline import run_pipeline

sys.path.insert(0, str(Path(__file__).parents[1] / "corpus"))
sys.path.insert(0, str(Path(__file__).parents[1] / "graph"))
from captured import operators, sketch
from catalogue import NEAR_MISSES, SPELLINGS
from operands import EPS, operands

SPELT = {name: program for name, program in SPELLINGS.items() if program.operator == "attn_res"}
MISSED = {name: program for name, program in NEAR_MISSES.items() if program.operator == "attn_res"}
OURS = {"attn_res_prepare", "attn_res_update"}


def assert_equals_eager(result, tolerance=1e-5):
    got, want = pytree.tree_leaves(result.got), pytree.tree_leaves(result.want)
    for mine, theirs in zip(got, want, strict=True):
        assert mine.dtype == theirs.dtype
        assert float((mine.double() - theirs.double()).abs().max() / theirs.double().abs().max()) < tolerance
    assert not [note for note in result.notes if "undone" in note]


def ours(result):
    return {name: count for name, count in result.fused.items() if name in OURS}


@pytest.mark.parametrize("length", [1, 7])
@pytest.mark.parametrize("name", SPELT)
def test_spelling(name, length):
    program = SPELT[name]
    result = run(program.fn, *operands(program, length, torch.float32), stable=False)
    assert ours(result) == program.counts
    assert_equals_eager(result)


@pytest.mark.parametrize("name", [name for name, program in SPELT.items() if program.half])
def test_spelling_in_bfloat16(name):
    program = SPELT[name]
    result = run(program.fn, *operands(program, 7, torch.bfloat16), stable=False)
    assert ours(result) == program.counts
    assert_equals_eager(result, 1e-2)


@pytest.mark.parametrize("length", [1, 7])
@pytest.mark.parametrize("name", MISSED)
def test_near_miss(name, length):
    program = MISSED[name]
    result = run(program.fn, *operands(program, length, torch.float32), stable=False)
    assert not (program.excluded and ours(result))
    assert_equals_eager(result)


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def over_depth(values, query, eps=EPS):
    logits = (values * query).sum(-1) * torch.rsqrt(values.square().mean(-1) + eps)
    return (logits.softmax(-1).unsqueeze(-1) * values).sum(-2)


def test_one_graph_serves_every_length():
    def program(bank, partial, query):
        return over_depth(torch.cat((bank, partial.unsqueeze(2)), 2), query)

    function = compiled(program, dynamic=True)
    for length in (3, 8, 21):
        given = normal(2, length, 4, 12, seed=length), normal(2, length, 12), normal(12)
        with torch.no_grad():
            torch.testing.assert_close(function(*given), program(*given), rtol=1e-5, atol=1e-5)
    assert len(k31compile.reports()) == 1
    assert k31compile.last_report().fused == {"attn_res_prepare": 1, "attn_res_update": 1}


def test_a_growing_buffer_of_symbolic_length():
    def program(bank, partial, query):
        return over_depth(torch.cat((bank, partial.unsqueeze(2)), 2), query)

    function = compiled(program, dynamic=True)
    for blocks in (3, 4, 7):
        given = normal(2, 5, blocks, 12, seed=blocks), normal(2, 5, 12), normal(12)
        with torch.no_grad():
            torch.testing.assert_close(function(*given), program(*given), rtol=1e-5, atol=1e-5)


def masked(bank, partial, query, valid):
    values = torch.cat((bank, partial.unsqueeze(2)), 2)
    logits = (values * query).sum(-1) * torch.rsqrt(values.square().mean(-1) + EPS)
    place = torch.arange(values.shape[2])
    hidden = (place >= valid) & (place < bank.shape[2])
    return (logits.masked_fill(hidden, -torch.inf).softmax(-1).unsqueeze(-1) * values).sum(-2)


def test_how_many_blocks_count_may_change_from_call_to_call():
    """A mask that was learned for one number of blocks must not serve another."""
    bank, partial, query = normal(2, 5, 6, 12), normal(2, 5, 12, seed=1), normal(12, seed=2)
    function = compiled(masked, dynamic=True)
    for valid in (3, 4, 6):
        with torch.no_grad():
            want = masked(bank, partial, query, valid)
            torch.testing.assert_close(function(bank, partial, query, valid), want, rtol=1e-5, atol=1e-5)


def test_the_number_of_blocks_may_be_a_tensor():
    given = normal(2, 5, 6, 12), normal(2, 5, 12, seed=1), normal(12, seed=2), torch.tensor(4)
    assert_equals_eager(run(masked, *given, stable=False))


def test_blocks_in_the_middle_may_be_hidden():
    def program(bank, partial, query):
        values = torch.cat((bank, partial.unsqueeze(2)), 2)
        logits = (values * query).sum(-1) * torch.rsqrt(values.square().mean(-1) + EPS)
        hidden = torch.tensor([False, True, False, True, False])
        return (logits.masked_fill(hidden, -torch.inf).softmax(-1).unsqueeze(-1) * values).sum(-2)

    result = run(program, normal(2, 5, 4, 12), normal(2, 5, 12, seed=1), normal(12, seed=2), stable=False)
    assert ours(result) == {"attn_res_prepare": 1, "attn_res_update": 1}
    assert_equals_eager(result)


def test_long_prompts_are_confirmed_at_fewer_tokens():
    def program(bank, partial, query):
        return over_depth(torch.cat((bank, partial.unsqueeze(2)), 2), query)

    result = run(program, normal(2, 700, 3, 40), normal(2, 700, 40, seed=1), normal(40), stable=False)
    assert ours(result) == {"attn_res_prepare": 1, "attn_res_update": 1}
    (confirmation,) = [c for report in result.reports for c in report.confirmations]
    assert confirmation["sizes"]["M"] < 100
    assert_equals_eager(result)


def clamped(values, query):
    logits = (values * query).sum(-1) * torch.rsqrt(values.square().mean(-1) + EPS)
    return (logits.clamp(-40, 40).softmax(-1).unsqueeze(-1) * values).sum(-2)


def nearly_another_eps(values, query):
    logits = (values * query).sum(-1) * torch.rsqrt(values.square().mean(-1).clamp_min(1e-6) + EPS)
    return (logits.softmax(-1).unsqueeze(-1) * values).sum(-2)


def zeros_left_out(values, query):
    logits = (values * query).sum(-1) * torch.rsqrt(values.square().mean(-1) + EPS)
    logits = torch.where(values.abs().sum(-1) == 0, -torch.inf, logits)
    return (logits.softmax(-1).unsqueeze(-1) * values).sum(-2)


def first_token_apart(values, query):
    logits = (values * query).sum(-1) * torch.rsqrt(values.square().mean(-1) + EPS)
    logits = logits * (torch.arange(values.shape[1])[:, None] > 0)
    return (logits.softmax(-1).unsqueeze(-1) * values).sum(-2)


def squared_weights(values, query):
    logits = (values * query).sum(-1) * torch.rsqrt(values.square().mean(-1) + EPS)
    return (logits.softmax(-1).square().unsqueeze(-1) * values).sum(-2)


OTHERS = (clamped, nearly_another_eps, zeros_left_out, first_token_apart, squared_weights)


@pytest.mark.parametrize("tokens", [5, 100])
@pytest.mark.parametrize("fn", OTHERS, ids=lambda fn: fn.__name__)
def test_other_functions_are_left_alone(fn, tokens):
    def program(bank, partial, query):
        return fn(torch.cat((bank, partial.unsqueeze(2)), 2), query)

    result = run(program, normal(2, tokens, 3, 12), normal(2, tokens, 12, seed=1), normal(12), stable=False)
    assert not ours(result)
    assert_equals_eager(result)


def test_weights_that_are_returned_are_left_alone():
    def program(bank, partial, query):
        values = torch.cat((bank, partial.unsqueeze(2)), 2)
        logits = (values * query).sum(-1) * torch.rsqrt(values.square().mean(-1) + EPS)
        weights = logits.softmax(-1)
        return (weights.unsqueeze(-1) * values).sum(-2), weights

    result = run(program, normal(2, 5, 3, 12), normal(2, 5, 12, seed=1), normal(12), stable=False)
    assert not ours(result)
    assert_equals_eager(result)


def test_what_is_done_to_the_sums_before_stays():
    def program(bank, partial, query):
        return over_depth(torch.cat((bank, partial.unsqueeze(2)), 2).clamp(-0.5, 0.5), query)

    result = run(program, normal(2, 5, 3, 12), normal(2, 5, 12, seed=1), normal(12), stable=False)
    assert ours(result) == {"attn_res_prepare": 1}
    assert_equals_eager(result)


@pytest.mark.parametrize("make", [lambda partial, query: query, lambda partial, query: partial * query])
def test_one_token_of_one_request(make):
    """A row of activations then has the shape of a learned vector."""

    def program(bank, partial, query):
        return over_depth(torch.cat((bank, partial.unsqueeze(2)), 2), make(partial, query))

    result = run(program, normal(1, 1, 3, 12), normal(1, 1, 12, seed=1), normal(12, seed=2), stable=False)
    assert_equals_eager(result)
    assert len(ours(result)) in (0, 2)


def test_a_query_that_the_mixture_makes_is_not_shared():
    """The second query is made from the first result: both cannot be asked at once."""

    def program(bank, partial, query):
        first = over_depth(torch.cat((bank, partial.unsqueeze(2)), 2), query)
        later = first.sum((0, 1)) + query
        return over_depth(torch.cat((bank, (partial + first).unsqueeze(2)), 2), later)

    result = run(program, normal(2, 5, 3, 12), normal(2, 5, 12, seed=1), normal(12), stable=False)
    assert_equals_eager(result)
    assert ours(result).get("attn_res_prepare") == ours(result).get("attn_res_update")


def test_another_eps_is_not_shared():
    def program(bank, partial, query):
        values = torch.cat((bank, partial.unsqueeze(2)), 2)
        return over_depth(values, query), over_depth(values, query * 2, eps=1e-3)

    result = run(program, normal(2, 5, 3, 12), normal(2, 5, 12, seed=1), normal(12), stable=False)
    assert ours(result) == {"attn_res_prepare": 2, "attn_res_update": 2}
    assert_equals_eager(result)


def test_attention_with_normed_keys_and_a_router_are_not_mentioned():
    def program(x, key, router, norm):
        queries, keys = rms_norm(x, x.shape[-1:], norm, EPS), rms_norm(key, key.shape[-1:], norm, EPS)
        attended = (queries @ keys.mT).softmax(-1) @ key
        return (rms_norm(attended, x.shape[-1:], norm, EPS) @ router.mT).softmax(-1)

    result = run(program, normal(2, 5, 12), normal(2, 9, 12, seed=1), normal(6, 12), normal(12, seed=3), stable=False)
    assert not result.fused
    assert not result.refused, result.reasons


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_residual_add_goes_into_the_update(dtype):
    def program(bank, partial, delta, query):
        partial = partial + delta
        return over_depth(torch.cat((bank, partial.unsqueeze(2)), 2).float(), query), partial, partial.relu()

    given = [x.to(dtype) for x in (normal(2, 5, 3, 12), normal(2, 5, 12, seed=1), normal(2, 5, 12, seed=2), normal(12))]
    module = sketch(program, *given).module
    rewritten, _ = run_pipeline(module, Options(), "cpu")
    assert "add" not in operators(rewritten)
    assert "k31.attn_res_update" in operators(rewritten)
    rewritten.recompile()
    mixed, partial, positive = rewritten(*given)
    want = program(*given)
    torch.testing.assert_close(mixed, want[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(partial, want[1])
    assert torch.equal(positive, want[2])


def test_an_add_that_the_bank_reads_too_stays():
    def program(bank, partial, delta, query):
        partial = partial + delta
        return over_depth(torch.stack((*bank.unbind(2), partial.neg(), partial), 2), query)

    given = normal(2, 5, 3, 12), normal(2, 5, 12, seed=1), normal(2, 5, 12, seed=2), normal(12)
    result = run(program, *given, stable=False)
    assert ours(result) == {"attn_res_prepare": 1, "attn_res_update": 1}
    assert_equals_eager(result)
