"""Routers whose weights are a row over all experts, bounded sums, and the best one after another."""

import pytest
import torch
import torch.nn.functional as F
from running import relative_error, run

OPERATOR = "moe_gating_top_k"
BOTH = {OPERATOR: 1, "grouped_experts": 1}
COUNT, WIDTH, INNER, CHOSEN = 12, 16, 8, 3
BIAS = torch.randn(COUNT, generator=torch.Generator().manual_seed(9)) * 0.3


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def mask_of(indices):
    return F.one_hot(indices, COUNT).sum(-2)


def scores_times_mask(logits):
    scores = logits.softmax(-1)
    kept = scores * mask_of(scores.topk(CHOSEN, -1).indices)
    return kept / kept.sum(-1, keepdim=True)


def softmax_of_the_kept(logits):
    values, indices = logits.topk(CHOSEN, -1)
    return torch.full_like(logits, -torch.inf).scatter(-1, indices, values).softmax(-1)


def softmax_of_the_unmasked(logits):
    hidden = torch.ones_like(logits, dtype=torch.bool).scatter(-1, logits.topk(CHOSEN).indices, False)
    return logits.masked_fill(hidden, -torch.inf).softmax(-1)


def softmax_then_zeros(logits):
    scores = logits.softmax(-1)
    hidden = torch.ones_like(logits, dtype=torch.bool).scatter(-1, scores.topk(CHOSEN).indices, False)
    return scores.masked_fill(hidden, 0.0)


def normalized_with_a_bias(logits):
    scores = logits.sigmoid()
    mask = torch.zeros_like(scores).scatter(-1, (scores + BIAS).topk(CHOSEN, -1).indices, 1.0)
    return F.normalize(scores * mask, p=1, dim=-1) * 2.5


def bounded_by_hand(logits):
    scores = logits.sigmoid()
    kept = torch.where(mask_of((scores + BIAS).topk(CHOSEN, -1).indices) > 0, scores, 0.0)
    return kept / kept.sum(-1, keepdim=True).clamp(min=1e-6)


def by_hand_with_an_eps(logits):
    scores = logits.sigmoid()
    kept = scores * mask_of((scores + BIAS).argsort(-1, descending=True)[..., :CHOSEN])
    return kept / (kept.sum(-1, keepdim=True) + 1e-20) * 2.5


DENSE = [
    scores_times_mask,
    softmax_of_the_kept,
    softmax_of_the_unmasked,
    softmax_then_zeros,
    normalized_with_a_bias,
    bounded_by_hand,
    by_hand_with_an_eps,
]


def measure(program, *args):
    ran = run(program, *args, stable=False)
    pairs = zip(*(x if isinstance(x, tuple) else (x,) for x in (ran.got, ran.want)), strict=True)
    for got, want in pairs:
        assert got.dtype == want.dtype
        assert got.shape == want.shape
        assert relative_error(got, want) < 1e-5
    return ran


@pytest.mark.parametrize("router", DENSE)
@pytest.mark.parametrize("rows", [(1,), (7,), (2, 5)])
@pytest.mark.parametrize("shift", [0.0, -40.0])
def test_a_row_over_all_experts(router, rows, shift):
    """Far below zero the sum of sigmoids is below every bound."""
    ran = measure(router, random(*rows, COUNT) * 3 + shift)
    assert ran.fused == {OPERATOR: 1}, ran.reasons


def matrices():
    sizes = ((COUNT, INNER, WIDTH), (COUNT, INNER, WIDTH), (COUNT, WIDTH, INNER))
    return [random(*size, seed=20 + i) * 0.3 for i, size in enumerate(sizes)]


def all_experts(x, dense, gate, up, down):
    g, u = torch.einsum("...l,eil->...ei", x, gate), torch.einsum("...l,eil->...ei", x, up)
    return torch.einsum("...ei,eli,...e->...l", F.silu(g) * u, down, dense)


def expert_by_expert(x, dense, gate, up, down):
    out = torch.zeros_like(x)
    for e in range(COUNT):
        inner = F.silu(F.linear(x, gate[e])) * F.linear(x, up[e])
        out = out + dense[..., e : e + 1] * F.linear(inner, down[e])
    return out


@pytest.mark.parametrize("router", DENSE)
@pytest.mark.parametrize("experts", [all_experts, expert_by_expert])
def test_all_experts_on_all_tokens_become_the_chosen_ones(router, experts):
    ran = measure(
        lambda x, logits, *rest: experts(x, router(logits), *rest), random(7, WIDTH), random(7, COUNT), *matrices()
    )
    assert ran.fused == BOTH, ran.reasons


def test_tokens_of_a_batch():
    def program(x, logits, *rest):
        return all_experts(x, scores_times_mask(logits), *rest)

    ran = measure(program, random(2, 5, WIDTH), random(2, 5, COUNT), *matrices())
    assert ran.fused == BOTH, ran.reasons


def rounds(logits, joined=torch.cat, exclude=-torch.inf, keep=True):
    scores, experts, weights = logits.sigmoid(), [], []
    left = scores + BIAS
    for _ in range(CHOSEN):
        best = left.argmax(-1, keepdim=keep)
        column = best if keep else best.unsqueeze(-1)
        experts.append(best)
        weights.append(scores.gather(-1, column))
        left = left.scatter(-1, column, exclude)
    weights = torch.cat(weights, -1)
    return weights / weights.sum(-1, keepdim=True), joined(experts, -1)


def rounds_stacked(logits):
    return rounds(logits, torch.stack, keep=False)


def rounds_by_max(logits):
    scores, left, experts, weights = logits.softmax(-1), logits.softmax(-1), [], []
    for _ in range(CHOSEN):
        best = left.max(dim=-1, keepdim=True).indices
        experts.append(best)
        weights.append(scores.gather(-1, best))
        left = left.masked_fill(F.one_hot(best.squeeze(-1), COUNT).bool(), -torch.inf)
    return torch.cat(weights, -1), torch.cat(experts, -1)


def rounds_with_values(logits):
    left, experts, weights = logits.softmax(-1), [], []
    for _ in range(CHOSEN):
        value, best = left.max(dim=-1, keepdim=True)
        experts.append(best)
        weights.append(value)
        left = left * (1 - F.one_hot(best.squeeze(-1), COUNT))
    weights = torch.cat(weights, -1)
    return weights / weights.sum(-1, keepdim=True), torch.cat(experts, -1)


@pytest.mark.parametrize("router", [rounds, rounds_stacked, rounds_by_max, rounds_with_values])
@pytest.mark.parametrize("rows", [(1,), (7,), (2, 5)])
def test_the_best_one_after_another(router, rows):
    ran = measure(router, random(*rows, COUNT))
    assert ran.fused == {OPERATOR: 1}, ran.reasons


def lied_bound(logits):
    """Bounded from above."""
    scores = logits.sigmoid()
    kept = scores * mask_of((scores + BIAS).topk(CHOSEN, -1).indices)
    return kept / kept.sum(-1, keepdim=True).clamp(max=0.9)


def lied_neighbour(logits):
    """The experts beside the best ones."""
    scores = logits.sigmoid()
    kept = scores * mask_of(((scores + BIAS).topk(CHOSEN, -1).indices + 1) % COUNT)
    return kept / kept.sum(-1, keepdim=True)


def lied_order(logits):
    """The weights in ascending order go to experts in descending order."""
    values, indices = logits.softmax(-1).topk(CHOSEN, -1)
    return torch.zeros_like(logits).scatter(-1, indices, values.flip(-1))


def lied_sum(logits):
    """Divided by the sum of all scores."""
    scores = logits.sigmoid()
    return scores * mask_of((scores + BIAS).topk(CHOSEN, -1).indices) / scores.sum(-1, keepdim=True)


def lied_rest(logits):
    """The others keep a small weight."""
    scores = logits.sigmoid()
    kept = scores * mask_of((scores + BIAS).topk(CHOSEN, -1).indices).clamp(min=1e-7)
    return kept / kept.sum(-1, keepdim=True)


def lied_softmax(logits):
    """The others take part in the softmax with a logit of 0."""
    values, indices = logits.topk(CHOSEN, -1)
    return torch.zeros_like(logits).scatter(-1, indices, values).softmax(-1)


def lied_square(logits):
    scores = logits.sigmoid()
    kept = scores * mask_of((scores + BIAS).topk(CHOSEN, -1).indices)
    return F.normalize(kept, p=2, dim=-1)


def lied_last(logits):
    """The best expert is left out of the row."""
    scores = logits.sigmoid()
    return scores * mask_of((scores + BIAS).topk(CHOSEN, -1).indices[..., 1:])


LIES = [lied_bound, lied_neighbour, lied_order, lied_sum, lied_rest, lied_softmax, lied_square, lied_last]


@pytest.mark.parametrize("router", LIES)
def test_a_lie_about_a_row_keeps_its_numbers(router):
    """Rows of raw scores may be served, with what is wrong behind them."""
    measure(
        lambda x, logits, *rest: all_experts(x, router(logits), *rest), random(7, WIDTH), random(7, COUNT), *matrices()
    )
    measure(router, random(7, COUNT) * 20)
    if router in (lied_neighbour, lied_softmax, lied_last):
        assert OPERATOR not in run(router, random(7, COUNT), stable=False).fused


def lied_rounds_again(logits):
    """The winner of the first round stays in the race."""
    scores = logits.sigmoid()
    first = (scores + BIAS).argmax(-1, keepdim=True)
    second = (scores + BIAS).scatter(-1, first, 0.4).argmax(-1, keepdim=True)
    experts = torch.cat([first, second], -1)
    return scores.gather(-1, experts), experts


def lied_rounds_weight(logits):
    """The second weight is that of the first winner."""
    scores = logits.sigmoid()
    first = (scores + BIAS).argmax(-1, keepdim=True)
    second = (scores + BIAS).scatter(-1, first, -torch.inf).argmax(-1, keepdim=True)
    return torch.cat([scores.gather(-1, first), scores.gather(-1, first)], -1), torch.cat([first, second], -1)


def lied_rounds_worst(logits):
    """The second is the worst one."""
    scores = logits.sigmoid()
    first = (scores + BIAS).argmax(-1, keepdim=True)
    second = (-scores - BIAS).scatter(-1, first, -torch.inf).argmax(-1, keepdim=True)
    experts = torch.cat([first, second], -1)
    return scores.gather(-1, experts), experts


def lied_rounds_order(logits):
    """The second best first."""
    weights, experts = rounds(logits)
    return weights.flip(-1), experts.flip(-1)


def lied_rounds_zero(logits):
    """The winner's choice becomes 0, which with a bias may win again."""
    return rounds(logits - 6, exclude=0.0)


@pytest.mark.parametrize(
    "router", [lied_rounds_again, lied_rounds_weight, lied_rounds_worst, lied_rounds_order, lied_rounds_zero]
)
def test_a_lie_about_rounds_keeps_its_numbers(router):
    ran = measure(router, random(9, COUNT) * 2)
    if router is not lied_rounds_order:
        assert OPERATOR not in ran.fused


def test_a_threshold_is_refused_with_a_sentence():
    def router(x, weight):
        scores = F.linear(x, weight).sigmoid()
        floor = scores.topk(CHOSEN, -1).values[..., -1:]
        return torch.where(scores >= floor, scores, 0.0)

    x = random(7, WIDTH)
    x[2:4] = 0  # every expert ties: the author keeps all of them
    ran = measure(router, x, random(COUNT, WIDTH, seed=1))
    assert ran.fused == {}
    assert "ties" in ran.reasons


def test_attention_over_chosen_keys_is_no_router():
    def attend(q, k, v):
        logits = torch.einsum("td,sd->ts", q, k)
        values, keys = logits.topk(CHOSEN, -1)
        return torch.full_like(logits, -torch.inf).scatter(-1, keys, values).softmax(-1) @ v

    ran = measure(attend, random(7, WIDTH), random(COUNT, WIDTH, seed=1), random(COUNT, WIDTH, seed=2))
    assert OPERATOR not in ran.fused
