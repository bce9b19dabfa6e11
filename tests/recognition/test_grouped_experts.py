"""Routed experts: every spelling of the corpus that is one graph, and every near miss left alone or served rightly."""

import pytest
import torch
import torch.nn.functional as F
from expert_programs import compiled, near_misses, spellings
from running import relative_error, run

OPERATOR = "grouped_experts"


def at_lengths(programs):
    for name, program in programs.items():
        for length in program.lengths:
            yield pytest.param(program, length, id=f"{name}-{length}")


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("program", "length"), list(at_lengths(spellings(OPERATOR))))
def test_a_spelling_is_fused(program, length):
    half = program.name == "grouped_products"
    ran, error = compiled(program, length, torch.bfloat16 if half else torch.float32)
    assert ran.fused == {OPERATOR: 1}, ran.reasons
    assert error < (2e-2 if half else 1e-5)


@pytest.mark.parametrize("name", near_misses(OPERATOR))
def test_a_near_miss_gives_its_own_numbers(name):
    program = near_misses(OPERATOR)[name]
    for length in program.lengths:
        ran, error = compiled(program, length)
        assert not (program.excluded and ran.fused)
        assert error < 1e-5


def dense(x, logits, gate_up, down, k=3):
    """Router and experts; whom a top-k chose is named once in a row."""
    weights, experts = logits.softmax(-1).topk(k, -1)
    gate, up = (x @ gate_up.mT).chunk(2, dim=-1)
    out = (F.silu(gate) * up) @ down.mT
    spread = torch.zeros_like(logits).scatter(1, experts, weights)
    return torch.einsum("ne,enl->nl", spread, out)


def looped(x, logits, gate_up, down, k=3):
    """A loop over all experts, each weighed by a mask."""
    weights, experts = logits.softmax(-1).topk(k, -1)
    out = torch.zeros_like(x)
    for e in range(gate_up.shape[0]):
        share = (weights * (experts == e)).sum(-1, keepdim=True)
        gate, up = F.linear(x, gate_up[e]).chunk(2, dim=-1)
        out = out + share * F.linear(F.silu(gate) * up, down[e])
    return out


def gathered(x, logits, gate_up, down, k=3):
    weights, experts = logits.softmax(-1).topk(k, -1)
    gate, up = torch.einsum("nkil,nl->nki", gate_up[experts], x).chunk(2, dim=-1)
    return torch.einsum("nkli,nki,nk->nl", down[experts], F.silu(gate) * up, weights)


def layer(rows=7, experts=12, width=24, inner=8):
    return (
        random(rows, width),
        random(rows, experts, seed=1),
        random(experts, 2 * inner, width, seed=2),
        random(experts, width, inner, seed=3),
    )


@pytest.mark.parametrize("program", [dense, looped, gathered])
def test_router_and_experts(program):
    ran = run(program, *layer(), stable=False)
    assert ran.fused == {OPERATOR: 1, "moe_gating_top_k": 1}, ran.reasons
    assert relative_error(ran.got, ran.want) < 1e-5


@pytest.mark.parametrize("program", [dense, gathered])
def test_experts_behind_a_router_that_is_no_operator(program):
    def squared(x, logits, *matrices):
        return program(x, -logits.square().log(), *matrices)

    ran = run(squared, *layer(), stable=False, options={"fuse": [OPERATOR]})
    assert ran.fused == {OPERATOR: 1}, ran.reasons
    assert relative_error(ran.got, ran.want) < 1e-5


@pytest.mark.parametrize("program", [dense, gathered])
def test_large_experts_are_confirmed_at_smaller_sizes(program):
    ran = run(program, *layer(70, 40, 256, 160), stable=False)
    assert ran.fused == {OPERATOR: 1, "moe_gating_top_k": 1}, ran.reasons
    assert relative_error(ran.got, ran.want) < 1e-5
    sizes = [one["sizes"] for one in ran.reports[0].to_dict()["confirmations"] if one["name"] == OPERATOR]
    assert sizes == [{"N": 7, "E": 11, "K": 3, "L": 20}]


def test_a_number_of_experts_that_small_sizes_would_not_reach():
    """The weights of experts from 20 on are dropped: eleven experts would not show it."""

    def program(x, logits, gate_up, down):
        weights, experts = logits.softmax(-1).topk(3, -1)
        weights = weights.unsqueeze(-1) * (experts < 20).unsqueeze(-1)
        gate, up = torch.einsum("nkil,nl->nki", gate_up[experts], x).chunk(2, dim=-1)
        return (torch.einsum("nkli,nki->nkl", down[experts], F.silu(gate) * up) * weights).sum(1)

    ran = run(program, *layer(70, 40, 256, 160), stable=False)
    assert OPERATOR not in ran.fused
    assert relative_error(ran.got, ran.want) < 1e-5


@pytest.mark.parametrize("last", [11, 0])
def test_an_expert_that_gives_nothing_is_noticed(last):
    def program(x, logits, gate_up, down):
        weights, experts = logits.softmax(-1).topk(3, -1)
        kept = (experts != last).unsqueeze(-1)
        gate, up = torch.einsum("nkil,nl->nki", gate_up[experts], x).chunk(2, dim=-1)
        out = torch.einsum("nkli,nki->nkl", down[experts], F.silu(gate) * up) * kept
        return (out * weights.unsqueeze(-1)).sum(1)

    ran = run(program, *layer(1), stable=False)
    assert OPERATOR not in ran.fused
    assert relative_error(ran.got, ran.want) < 1e-5


def test_what_one_expert_gives_is_read_by_another():
    def program(x, logits, gate_up, down):
        weights, experts = logits.softmax(-1).topk(3, -1)
        gate, up = torch.einsum("nkil,nl->nki", gate_up[experts], x).chunk(2, dim=-1)
        inner = F.silu(gate) * up
        return torch.einsum("nkli,nki,nk->nl", down[experts], inner, weights), inner

    assert OPERATOR not in run(program, *layer(), stable=False).fused


def test_a_symbolic_number_of_tokens():
    x, logits, *matrices = layer()
    for rows in (x, logits):
        torch._dynamo.mark_dynamic(rows, 0)
    ran = run(gathered, x, logits, *matrices, stable=False)
    assert ran.fused == {OPERATOR: 1, "moe_gating_top_k": 1}, ran.reasons
    assert relative_error(ran.got, ran.want) < 1e-5


@pytest.mark.parametrize("widened", [("x", "gate_up", "down"), ("down",)], ids=str)
def test_an_author_who_computes_bfloat16_experts_in_float32_keeps_the_digits(widened):
    """The activation of bfloat16 experts is rounded before `down`; not that of an author who rounds nothing."""

    def widening(x, logits, gate_up, down):
        weights, experts = logits.softmax(-1).topk(3, -1)
        if "x" in widened:
            x, gate_up = x.float(), gate_up.float()
        gate, up = torch.einsum("nkil,nl->nki", gate_up[experts], x).float().chunk(2, dim=-1)
        return torch.einsum("nkli,nki,nk->nl", down.float()[experts], F.silu(gate) * up, weights)

    x, logits, gate_up, down = layer()
    args = (x.bfloat16(), logits, gate_up.bfloat16(), down.bfloat16())
    ran = run(widening, *args, stable=False)
    assert ran.fused[OPERATOR] == 1, ran.reasons
    exact = widening(*(arg.float() for arg in args))
    assert relative_error(ran.got, exact) < 1e-5
