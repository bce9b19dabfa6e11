"""Almost the router: another choice, or the right choice with other weights."""

import torch
import torch.nn.functional as F
from operands import CHOSEN, FACTOR, GROUPS, KEPT
from records import misser

near_miss = misser(
    "moe_gating_top_k", arguments="logits bias", results="weights experts", phase="prefill", lengths=(7,)
)


def renormed(weights):
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) * FACTOR


def kept_groups(choice, value):
    """-inf outside the KEPT groups of the largest value."""
    best = value.topk(KEPT, -1).indices
    keep = torch.zeros_like(value, dtype=torch.bool).scatter(-1, best, True)
    return choice.masked_fill(~keep.repeat_interleave(choice.shape[-1] // GROUPS, -1), -torch.inf)


@near_miss(right="experts")
def bias_in_the_weights(logits, bias):
    """The weights are taken from score and bias; the operator weighs by the score alone."""
    weights, experts = (logits.sigmoid() + bias).topk(CHOSEN, -1)
    return renormed(weights), experts


@near_miss(served_by="logits + bias, no bias")
def bias_on_the_logits(logits, bias):
    """The bias is added before the sigmoid; the operator adds it to the score, for the choice only."""
    weights, experts = (logits + bias).sigmoid().topk(CHOSEN, -1)
    return renormed(weights), experts


@near_miss()
def renormed_before_the_choice(logits, bias):
    """The scores of all experts are made to add up to 1 before the bias; the operator divides the chosen ones after."""
    scores = logits.sigmoid()
    scores = scores / scores.sum(-1, keepdim=True)
    experts = (scores + bias).topk(CHOSEN, -1).indices
    return renormed(scores.gather(-1, experts)), experts


@near_miss(options={"grouped": True})
def groups_by_their_mean(logits, bias):
    """Groups are ranked by the mean of all their experts; the operator takes the two best."""
    scores = logits.sigmoid()
    choice = scores + bias
    experts = kept_groups(choice, choice.unflatten(-1, (GROUPS, -1)).mean(-1)).topk(CHOSEN, -1).indices
    return renormed(scores.gather(-1, experts)), experts


@near_miss(options={"grouped": True})
def groups_without_the_bias(logits, bias):
    """Groups are ranked by score alone and experts by score and bias; the operator ranks both with the bias."""
    scores = logits.sigmoid()
    value = scores.unflatten(-1, (GROUPS, -1)).topk(2, -1).values.sum(-1)
    experts = kept_groups(scores + bias, value).topk(CHOSEN, -1).indices
    return renormed(scores.gather(-1, experts)), experts


@near_miss(
    arguments="logits low_bias",
    options={"grouped": True, "bias": "low_bias"},
    served_by="other groups filled with 0, ties among those left open",
)
def other_groups_at_zero(logits, low_bias):
    """Experts outside the best groups get choice 0 and so beat negative ones; the operator shuts them out."""
    scores = logits.sigmoid()
    choice = scores + low_bias
    kept = kept_groups(choice, choice.unflatten(-1, (GROUPS, -1)).topk(2, -1).values.sum(-1))
    experts = kept.masked_fill(kept == -torch.inf, 0.0).topk(CHOSEN, -1).indices
    return renormed(scores.gather(-1, experts)), experts


@near_miss(options={"grouped": True}, served_by="group_count=1")
def groups_ignored(logits, bias):
    """All experts may be chosen; the operator, told of groups, leaves some out."""
    scores = logits.sigmoid()
    experts = (scores + bias).topk(CHOSEN, -1).indices
    return renormed(scores.gather(-1, experts)), experts


@near_miss(served_by="norm_type=0")
def softmax_scores(logits, bias):
    """The scores are a softmax over all experts; the operator, told nothing else, takes the sigmoid."""
    scores = logits.softmax(-1)
    experts = (scores + bias).topk(CHOSEN, -1).indices
    return renormed(scores.gather(-1, experts)), experts


@near_miss(right="experts", served_by="renorm=False, a softmax behind it")
def softmax_over_chosen_scores(logits, bias):
    """The chosen scores pass a softmax; the operator divides them by their sum."""
    scores = logits.sigmoid()
    experts = (scores + bias).topk(CHOSEN, -1).indices
    return scores.gather(-1, experts).softmax(-1) * FACTOR, experts


@near_miss(served_by="norm_type=0 for the experts, their sigmoid behind it")
def sigmoid_chosen_by_softmax(logits, bias):
    """A softmax and the bias choose, the sigmoid weighs; the operator chooses and weighs by one score."""
    experts = (logits.softmax(-1) + bias).topk(CHOSEN, -1).indices
    return renormed(logits.sigmoid().gather(-1, experts)), experts


@near_miss()
def root_of_softplus(logits, bias):
    """The score is sqrt(softplus); the operator has sigmoid and softmax."""
    scores = F.softplus(logits).sqrt()
    experts = (scores + bias).topk(CHOSEN, -1).indices
    return renormed(scores.gather(-1, experts)), experts


@near_miss()
def worst_experts(logits, bias):
    """The k smallest are chosen; the operator takes the largest."""
    scores = logits.sigmoid()
    experts = (scores + bias).topk(CHOSEN, -1, largest=False).indices
    return renormed(scores.gather(-1, experts)), experts


@near_miss(results="spread")
def experts_choose_tokens(logits, bias):
    """Each expert takes its best tokens; the operator lets each token take its best experts."""
    scores = logits.sigmoid()
    tokens = (scores + bias).topk(CHOSEN, dim=0).indices
    kept = torch.zeros_like(scores).scatter(0, tokens, 1.0) * scores
    return kept / (kept.sum(-1, keepdim=True) + 1e-20) * FACTOR


@near_miss(right="experts", served_by="renorm=False, divided by the largest behind it")
def best_one_kept_whole(logits, bias):
    """Divided by the largest chosen score; the operator divides by the sum."""
    scores = logits.sigmoid()
    experts = (scores + bias).topk(CHOSEN, -1).indices
    weights = scores.gather(-1, experts)
    return weights / weights.amax(-1, keepdim=True) * FACTOR, experts


@near_miss(results="spread")
def all_that_tie_for_the_last_place(logits, bias):
    """Everything not below the k-th best stays: where several tie for its place, as here, they are more than k."""
    scores = logits.round().sigmoid()
    floor = scores.topk(CHOSEN, dim=-1).values[:, -1:]
    kept = torch.where(scores >= floor, scores, torch.zeros_like(scores))
    return FACTOR * kept / kept.sum(-1, keepdim=True)
