"""Sums of experts that start from something, tokens [B, T, L], several sets behind one router, tied matrices."""

import pytest
import torch
import torch.nn.functional as F
from running import relative_error, run

OPERATOR = "grouped_experts"
BOTH = {OPERATOR: 1, "moe_gating_top_k": 1}
COUNT, WIDTH, INNER, CHOSEN = 6, 24, 8, 3


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def matrices(count=COUNT, inner=INNER, seed=0):
    """Gate, up and down of each expert."""
    sizes = ((inner, WIDTH), (inner, WIDTH), (WIDTH, inner))
    return [[random(*size, seed=10 * e + i + seed) * 0.3 for i, size in enumerate(sizes)] for e in range(count)]


def stacks(seed=0):
    return [torch.stack(parts) for parts in zip(*matrices(seed=seed), strict=True)]


def route(logits):
    return logits.softmax(-1).topk(CHOSEN, -1)


def expert(x, parts):
    gate, up, down = parts
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def share_of(number, indices, weights):
    return (weights * (indices == number)).sum(-1, keepdim=True)


def added(y, x, logits, experts, sign=1):
    weights, indices = route(logits)
    for e, parts in enumerate(experts):
        y = y + sign * share_of(e, indices, weights) * expert(x, parts)
    return y


def gathered(x, logits, gate, up, down):
    weights, indices = route(logits)
    g, u = (torch.einsum("...kil,...l->...ki", part[indices], x) for part in (gate, up))
    return torch.einsum("...kli,...ki,...k->...l", down[indices], F.silu(g) * u, weights)


def scattered(x, logits, gate, up, down):
    weights, indices = route(logits)
    dense = torch.zeros_like(logits).scatter(-1, indices, weights)
    g, u = torch.einsum("...l,eil->...ei", x, gate), torch.einsum("...l,eil->...ei", x, up)
    return torch.einsum("...ei,eli,...e->...l", F.silu(g) * u, down, dense)


def from_shared(x, logits, experts):
    return added(expert(x, experts[0]), x, logits, experts[1:])


def from_tokens(x, logits, experts):
    return added(x, x, logits, experts[1:])


def from_what_was_normed(x, logits, experts):
    return added(x, F.rms_norm(x, (WIDTH,)), logits, experts[1:])


def from_both(x, logits, experts):
    return added(x + expert(x, experts[0]), F.rms_norm(x, (WIDTH,)), logits, experts[1:])


def written_into_shared(x, logits, experts):
    """Pairs by index, added into what a shared expert gave."""
    weights, indices = route(logits)
    gate, up, down = (torch.stack(parts) for parts in zip(*experts[1:], strict=True))
    token, chosen = torch.arange(len(x)).repeat_interleave(CHOSEN), indices.flatten()
    rows = x[token].unsqueeze(-1)
    out = down[chosen] @ (F.silu(gate[chosen] @ rows) * (up[chosen] @ rows))
    return expert(x, experts[0]).index_add(0, token, out.squeeze(-1) * weights.flatten().unsqueeze(-1))


STARTS = [from_shared, from_tokens, from_what_was_normed, from_both]


def measure(program, *args, rows=(7,)):
    ran = run(program, random(*rows, WIDTH, seed=1), random(*rows, COUNT, seed=2), *args, stable=False)
    got, want = ran.got, ran.want
    if not isinstance(got, tuple):
        got, want = (got,), (want,)
    for one, other in zip(got, want, strict=True):
        assert one.shape == other.shape
        assert relative_error(one, other) < 1e-5
    return ran


@pytest.mark.parametrize("program", STARTS)
@pytest.mark.parametrize("rows", [(7,), (2, 4)])
def test_a_sum_that_starts_from_something(program, rows):
    assert measure(program, matrices(COUNT + 1), rows=rows).fused == BOTH


@pytest.mark.parametrize("program", [gathered, scattered])
@pytest.mark.parametrize("rows", [(2, 4), (1, 1), (6, 4), (3, 3)])
def test_tokens_that_are_never_flattened(program, rows):
    assert measure(program, *stacks(), rows=rows).fused == BOTH


def test_a_symbolic_batch_and_length():
    x, logits = random(2, 5, WIDTH, seed=1), random(2, 5, COUNT, seed=2)
    for tokens in (x, logits):
        torch._dynamo.mark_dynamic(tokens, 0)
        torch._dynamo.mark_dynamic(tokens, 1)
    ran = run(gathered, x, logits, *stacks(), stable=False)
    assert ran.fused == BOTH, ran.reasons
    assert relative_error(ran.got, ran.want) < 1e-5


def summed_up(x, weights, indices, experts):
    return sum(share_of(e, indices, weights) * expert(x, parts) for e, parts in enumerate(experts))


def fetched(x, weights, indices, gate, up, down):
    g, u = (torch.einsum("nkil,nl->nki", part[indices], x) for part in (gate, up))
    return torch.einsum("nkli,nki,nk->nl", down[indices], F.silu(g) * u, weights)


def two_lists(x, logits, first, second):
    choice = route(logits)
    return summed_up(x, *choice, first), summed_up(x.cos(), *choice, second)


def two_lists_added(x, logits, first, second):
    choice = route(logits)
    return summed_up(x, *choice, first) - summed_up(x.cos(), *choice, second)


def two_stacks(x, logits, first, second):
    choice = route(logits)
    return fetched(x, *choice, *first), fetched(x.cos(), *choice, *second)


def two_stacks_added(x, logits, first, second):
    choice = route(logits)
    return fetched(x, *choice, *first) * 3 + fetched(x.cos(), *choice, *second)


@pytest.mark.parametrize("program", [two_lists, two_lists_added, two_stacks, two_stacks_added])
def test_two_sets_behind_one_router(program):
    make = stacks if "stacks" in program.__name__ else matrices
    sets = [make(), make(seed=500)]
    ran = measure(program, *sets)
    assert ran.fused == {OPERATOR: 2, "moe_gating_top_k": 1}, ran.reasons


def tied(which, part=None):
    """Matrices of which one expert has another one's, all of them or one part."""
    experts = matrices()
    if part is None:
        experts[which[0]] = experts[which[1]]
    else:
        experts[which[0]][part] = experts[which[1]][part]
    return experts


def summed(x, logits, experts):
    return added(torch.zeros_like(x), x, logits, experts)


@pytest.mark.parametrize("part", [None, 0, 1, 2])
@pytest.mark.parametrize("which", [(4, 1), (0, 5), (3, 2)])
def test_experts_that_share_matrices(which, part):
    assert measure(summed, tied(which, part)).fused == BOTH


def test_one_down_projection_for_all_experts():
    experts = matrices()
    for parts in experts:
        parts[2] = experts[0][2]
    assert measure(summed, experts).fused == BOTH


def biased_linear(x, logits, gate, up, down, bias):
    weights, indices = route(logits)
    out = torch.zeros_like(x)
    for e in range(COUNT):
        inner = F.silu(F.linear(x, gate[e], bias[e])) * F.linear(x, up[e])
        out = out + share_of(e, indices, weights) * F.linear(inner, down[e])
    return out


def biased_list(x, logits, experts, biases):
    weights, indices = route(logits)
    return sum(share_of(e, indices, weights) * (expert(x, experts[e]) + biases[e]) for e in range(COUNT))


def biased_gather(x, logits, gate, up, down, bias):
    weights, indices = route(logits)
    g, u = (torch.einsum("nkil,nl->nki", part[indices], x) for part in (gate, up))
    out = torch.einsum("nkli,nki->nkl", down[indices], F.silu(g + bias[indices]) * u)
    return (out * weights.unsqueeze(-1)).sum(1)


@pytest.mark.parametrize("rows", [(7,), (2, 4)])
def test_biases_of_a_list_are_named(rows):
    ran = measure(biased_list, matrices(), list(random(COUNT, WIDTH, seed=7)), rows=rows)
    assert OPERATOR not in ran.fused
    assert "biases" in ran.reasons


@pytest.mark.parametrize("program", [biased_linear, biased_gather])
def test_biases_of_a_stack_are_named(program):
    ran = measure(program, *stacks(), random(COUNT, INNER, seed=7))
    assert OPERATOR not in ran.fused
    assert "biases" in ran.reasons


def lied_share(x, logits, experts):
    """The tokens that the sum starts from are weighted by an expert's share."""
    weights, indices = route(logits)
    return added(x * share_of(2, indices, weights), x, logits, experts)


def lied_start_inside(x, logits, experts):
    """Every step adds the start again."""
    weights, indices = route(logits)
    y = x
    for e, parts in enumerate(experts):
        y = y + share_of(e, indices, weights) * expert(x, parts) + 0.01 * x
    return y


def lied_growing(x, logits, experts):
    """Each expert reads what the ones before it left."""
    weights, indices = route(logits)
    y = x
    for e, parts in enumerate(experts):
        y = y + share_of(e, indices, weights) * expert(y, parts)
    return y


def lied_order(x, logits, experts):
    """The last expert's share is that of the first."""
    weights, indices = route(logits)
    y = expert(x, experts[0])
    for e, parts in enumerate(experts):
        y = y + share_of(e % (COUNT - 1), indices, weights) * expert(x, parts)
    return y


def lied_start_scaled(x, logits, experts):
    return added(x, x, logits, experts) + x


def lied_tied_part(x, logits, experts):
    """Expert 4 has expert 1's gate, but its own up read twice."""
    mixed = [list(parts) for parts in experts]
    mixed[4] = [experts[1][0], experts[4][1] * 2, experts[4][2]]
    return summed(x, logits, mixed)


LIES = [lied_share, lied_start_inside, lied_growing, lied_order, lied_start_scaled, lied_tied_part]


@pytest.mark.parametrize("program", LIES)
@pytest.mark.parametrize("rows", [(7,), (2, 4)])
def test_a_lie_keeps_its_numbers(program, rows):
    ran = measure(program, matrices(), rows=rows)
    if program in (lied_start_inside, lied_growing, lied_order):
        assert OPERATOR not in ran.fused


@pytest.mark.parametrize("program", [gathered, scattered])
@pytest.mark.parametrize("lie", ["roll", "swap", "token"])
def test_a_lie_about_tokens_of_a_batch_keeps_its_numbers(program, lie):
    def lying(x, logits, gate, up, down):
        if lie == "roll":
            return program(x, logits, gate, up, down.roll(1, 0))
        if lie == "swap":
            return program(x.transpose(0, 1), logits.transpose(0, 1), gate, up, down).transpose(0, 1)
        return program(x.roll(1, 1), logits, gate, up, down)

    measure(lying, *stacks(), rows=(4, 4))


@pytest.mark.parametrize("lie", ["second router", "shares exchanged", "tokens exchanged"])
def test_a_lie_about_two_sets_keeps_its_numbers(lie):
    def program(x, logits, first, second):
        weights, indices = route(logits)
        other, tokens, others = indices, x, second
        if lie == "second router":
            other = (indices + 1) % COUNT
        if lie == "shares exchanged":
            others = [first[0], *second[1:]]
        if lie == "tokens exchanged":
            tokens = x.roll(1, 0)
        return fetched(x, weights, indices, *first) + fetched(tokens, weights, other, *others)

    measure(program, stacks(), stacks(seed=500))


def test_a_row_that_names_an_expert_twice_keeps_the_last_weight():
    def program(x, logits, indices, weights, gate, up, down):
        dense = torch.zeros_like(logits).scatter(1, indices, weights)
        g, u = torch.einsum("nl,eil->nei", x, gate), torch.einsum("nl,eil->nei", x, up)
        return torch.einsum("nei,eli,ne->nl", F.silu(g) * u, down, dense)

    indices = torch.tensor([[1, 1, 1], [0, 5, 0], [2, 3, 4], [3, 3, 2], [5, 4, 5], [0, 0, 1], [1, 2, 2]])
    assert measure(program, indices, random(7, CHOSEN, seed=5), *stacks()).fused == {OPERATOR: 1}


def test_a_row_that_adds_up_what_names_an_expert_twice():
    def program(x, logits, indices, weights, gate, up, down):
        dense = torch.zeros_like(logits).scatter_add(1, indices, weights)
        g, u = torch.einsum("nl,eil->nei", x, gate), torch.einsum("nl,eil->nei", x, up)
        return torch.einsum("nei,eli,ne->nl", F.silu(g) * u, down, dense)

    indices = torch.tensor([[1, 1, 1], [0, 5, 0], [2, 3, 4], [3, 3, 2], [5, 4, 5], [0, 0, 1], [1, 2, 2]])
    assert measure(program, indices, random(7, CHOSEN, seed=5), *stacks()).fused == {OPERATOR: 1}
