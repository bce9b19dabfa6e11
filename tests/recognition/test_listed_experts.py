"""Experts with matrices of their own, in a Python list: whose matrix is whose, and what is said to no expert."""

import pytest
import torch
import torch.nn.functional as F
from running import relative_error, run

OPERATOR = "grouped_experts"
COUNT = 6


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def matrices(count=COUNT, width=24, inner=8):
    """Gate, up and down of each expert."""
    sizes = ((inner, width), (inner, width), (width, inner))
    return [[random(*size, seed=10 * e + i) * 0.3 for i, size in enumerate(sizes)] for e in range(count)]


def expert(x, parts):
    gate, up, down = parts
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def share_of(number, indices, weights):
    return (weights * (indices == number)).sum(-1, keepdim=True)


def looped(x, indices, weights, experts, order=None):
    out = torch.zeros_like(x)
    for e in order or range(len(experts)):
        out = out + share_of(e, indices, weights) * expert(x, experts[e])
    return out


def reversed_loop(x, indices, weights, experts):
    return looped(x, indices, weights, experts, range(len(experts))[::-1])


def shares_first(x, indices, weights, experts):
    shares = [share_of(e, indices, weights) for e in range(len(experts))]
    return torch.stack([share * expert(x, parts) for share, parts in zip(shares, experts, strict=True)]).sum(0)


def weight_inside(x, indices, weights, experts):
    out = 0
    for e, (gate, up, down) in enumerate(experts):
        inner = F.silu(F.linear(x, gate)) * F.linear(x, up) * share_of(e, indices, weights)
        out = out + F.linear(inner, down)
    return out


def turned_matrices(x, indices, weights, experts):
    out = torch.zeros_like(x)
    for e, (gate, up, down) in enumerate([part.mT for part in parts] for parts in experts):
        out += (indices.eq(e) * weights).sum(1)[:, None] * ((F.silu(x @ gate) * (x @ up)) @ down)
    return out


def stacked(x, indices, weights, experts):
    rows = torch.stack([expert(x, parts) for parts in experts], dim=1)
    return (torch.take_along_dim(rows, indices.unsqueeze(-1), dim=1) * weights.unsqueeze(-1)).sum(1)


FUSED = [looped, reversed_loop, shares_first, weight_inside, turned_matrices, stacked]


def routed(body, **options):
    """The body behind a router."""

    def program(x, logits, experts):
        weights, indices = logits.softmax(-1).topk(3, -1)
        return body(x, indices, weights, experts, **options)

    return program


def measure(program, count=COUNT, rows=7, routes=COUNT, width=24, inner=8):
    ran = run(program, random(rows, width, seed=1), random(rows, routes, seed=2), matrices(count, width, inner))
    assert relative_error(ran.got, ran.want) < 1e-5
    return ran


@pytest.mark.parametrize("body", FUSED)
def test_a_list_of_experts_is_fused(body):
    ran = measure(routed(body))
    assert ran.fused == {OPERATOR: 1, "moe_gating_top_k": 1}, ran.reasons


@pytest.mark.parametrize("body", FUSED)
@pytest.mark.parametrize("rows", [1, 4])
def test_experts_that_the_caller_chooses(body, rows):
    """Nothing rules a number out here: the same one twice in a row, or none that is an expert's."""
    indices = torch.randint(0, COUNT, (rows, 3), generator=torch.Generator().manual_seed(3))
    if body is not stacked:
        indices[0] = torch.tensor([COUNT, -1, 2])
    ran = run(body, random(rows, 24, seed=1), indices, random(rows, 3, seed=4), matrices())
    assert ran.fused == {OPERATOR: 1}, ran.reasons
    assert relative_error(ran.got, ran.want) < 1e-5


def test_a_router_by_sigmoid_whose_weights_are_gathered():
    def program(x, logits, experts):
        scores = logits.sigmoid()
        indices = (scores.square() + scores.cos()).topk(3, -1).indices
        return looped(x, indices, scores.gather(1, indices), experts)

    ran = measure(program)
    assert ran.fused == {OPERATOR: 1}, ran.reasons


@pytest.mark.parametrize("body", [looped, stacked])
def test_large_experts_are_confirmed_at_smaller_sizes(body):
    ran = measure(routed(body), count=20, rows=70, routes=20, width=256, inner=160)
    assert ran.fused == {OPERATOR: 1, "moe_gating_top_k": 1}, ran.reasons
    sizes = [one["sizes"] for one in ran.reports[0].to_dict()["confirmations"] if one["name"] == OPERATOR]
    assert sizes == [{"N": 7, "E": 20, "K": 3, "L": 20}]


@pytest.mark.slow
def test_more_experts_than_a_window_of_the_graph_holds():
    ran = measure(routed(looped), count=90, rows=3, routes=90)
    assert ran.fused == {OPERATOR: 1, "moe_gating_top_k": 1}, ran.reasons


def test_a_symbolic_number_of_tokens():
    arguments = random(7, 24, seed=1), random(7, COUNT, seed=2), matrices()
    for rows in arguments[:2]:
        torch._dynamo.mark_dynamic(rows, 0)
    ran = run(routed(looped), *arguments, stable=False)
    assert ran.fused == {OPERATOR: 1, "moe_gating_top_k": 1}, ran.reasons
    assert relative_error(ran.got, ran.want) < 1e-5


def test_two_layers_with_shared_experts_beside():
    def program(x, logits, first, second):
        weights, indices = logits.softmax(-1).topk(3, -1)
        x = x + looped(x, indices, weights, first[1:]) + expert(x, first[0])
        weights, indices = (logits - 1).square().softmax(-1).topk(3, -1)
        return x + reversed_loop(x, indices, weights, second[1:]) + expert(x, second[0])

    x, logits = random(7, 24, seed=1), random(7, COUNT, seed=2)
    ran = run(program, x, logits, matrices(COUNT + 1), matrices(COUNT + 1)[::-1])
    assert ran.fused == {OPERATOR: 2, "moe_gating_top_k": 2}, ran.reasons
    assert relative_error(ran.got, ran.want) < 1e-5


def test_an_expert_that_is_left_out():
    """Whether it is fused or not: nobody's matrices take its place."""
    for missing in range(COUNT):
        measure(routed(looped, order=[e for e in range(COUNT) if e != missing]))


def test_an_expert_that_comes_twice():
    measure(routed(looped, order=[0, 1, 2, 3, 3, 4, 5]))


def scaled(x, indices, weights, experts):
    return looped(x, indices, weights, experts) + 0.01 * share_of(4, indices, weights) * expert(x, experts[4])


def identity_beyond(x, indices, weights, experts):
    beyond = (weights * (indices >= len(experts))).sum(-1, keepdim=True)
    return looped(x, indices, weights, experts) + beyond * x


def identity_of_one_beyond(x, indices, weights, experts):
    return looped(x, indices, weights, experts) + share_of(len(experts) + 1, indices, weights) * x


def gelu_in_one(x, indices, weights, experts):
    gate, up, down = experts[5]
    other = F.linear(F.gelu(F.linear(x, gate)) * F.linear(x, up), down)
    return looped(x, indices, weights, experts, range(5)) + share_of(5, indices, weights) * other


@pytest.mark.parametrize("body", [scaled, identity_beyond, identity_of_one_beyond, gelu_in_one])
def test_one_that_differs_keeps_all_of_them_as_they_are(body):
    ran = measure(routed(body), routes=COUNT + 3)
    assert OPERATOR not in ran.fused


def test_a_stack_with_tokens_that_pass_beyond_the_last_expert():
    def program(x, logits, gates, ups, downs):
        weights, indices = logits.softmax(-1).topk(3, -1)
        return identity_beyond(x, indices, weights, list(zip(gates, ups, downs, strict=True)))

    stacks = [torch.stack(parts) for parts in zip(*matrices(), strict=True)]
    ran = run(program, random(7, 24, seed=1), random(7, COUNT + 3, seed=2), *stacks)
    assert OPERATOR not in ran.fused
    assert relative_error(ran.got, ran.want) < 1e-5


@pytest.mark.parametrize("body", [looped, stacked, shares_first])
def test_matrices_of_two_experts_exchanged(body):
    """Right either way, since the exchange is in the graph."""

    def program(x, indices, weights, experts):
        mixed = [list(parts) for parts in experts]
        mixed[1][2], mixed[4][2] = mixed[4][2], mixed[1][2]
        return body(x, indices, weights, mixed)

    measure(routed(program))
