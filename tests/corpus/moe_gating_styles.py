"""Routers as different authors would write them (K3.1 spec 2.18 and 3.6): which experts, and with which weights."""

import torch
import torch.nn.functional as F
from operands import CHOSEN, FACTOR, GROUPS, KEPT
from records import speller

spelling = speller(
    "moe_gating_top_k", arguments="logits bias", results="weights experts", phase="prefill", lengths=(1, 7)
)


@spelling(arguments="x router bias", half=True, ordered=False)
def router_inside(x, router, bias):
    """The router's product in float32, sigmoid, the bias for the choice, 1e-20 in the denominator."""
    scores = F.linear(x.flatten(0, -2).float(), router.float()).sigmoid()
    experts = torch.topk(scores + bias, CHOSEN, dim=-1, sorted=False).indices
    weights = scores.gather(1, experts)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) * FACTOR, experts


@spelling(options={"grouped": True}, ordered=False)
def groups_by_two_best(logits, bias):
    """Groups by the sum of their two best, a mask of floats scattered and spread, the others at -inf."""
    scores = logits.sigmoid()
    choice = scores + bias.unsqueeze(0)
    groups = choice.view(-1, GROUPS, choice.shape[-1] // GROUPS).topk(2, dim=-1)[0].sum(dim=-1)
    best = torch.topk(groups, k=KEPT, dim=-1, sorted=False)[1]
    mask = torch.zeros_like(groups)
    mask.scatter_(1, best, 1)
    mask = mask.unsqueeze(-1).expand(-1, GROUPS, choice.shape[-1] // GROUPS).reshape(choice.shape)
    chosen = torch.topk(choice.masked_fill(~mask.bool(), float("-inf")), k=CHOSEN, dim=-1, sorted=False)[1]
    weights = scores.gather(1, chosen)
    weights /= weights.sum(dim=-1, keepdim=True) + 1e-20
    return weights * FACTOR, chosen


@spelling(options={"grouped": True, "best": 1, "biased": False}, arguments="logits")
def groups_by_their_best(logits):
    """Groups by their largest score, no bias, other groups multiplied by 0: legal, for a sigmoid is above 0."""
    scores = torch.sigmoid(logits)
    largest = scores.unflatten(-1, (GROUPS, -1)).amax(-1)
    keep = F.one_hot(largest.topk(KEPT, -1).indices, GROUPS).sum(1)
    values, experts = (scores * keep.repeat_interleave(scores.shape[-1] // GROUPS, dim=1)).topk(CHOSEN, dim=-1)
    return values / values.sum(-1, keepdim=True) * FACTOR, experts


@spelling(options={"norm": "softmax", "biased": False, "renorm": False, "factor": 1.0}, arguments="logits")
def softmax_and_top_k(logits):
    """Softmax over all experts, the best of it as it is."""
    values, experts = torch.topk(torch.softmax(logits, dim=-1, dtype=torch.float32), CHOSEN, dim=-1)
    return values, experts.to(torch.int32)


@spelling(options={"norm": "softmax", "biased": False, "factor": 1.0}, arguments="logits")
def softmax_of_the_chosen(logits):
    """Top-k of the logits, softmax over those: the renormalised softmax of all."""
    best, experts = logits.topk(CHOSEN)
    return best.softmax(-1), experts


@spelling(options={"grouped": True})
def sorted_and_sliced(logits, bias):
    """A stable descending sort for the choice, groups left out by a bool mask, reciprocal of the sum."""
    scores = 1 / (1 + torch.exp(-logits))
    choice = (scores + bias).unflatten(1, (GROUPS, -1))
    value = choice.sort(dim=-1, descending=True).values[..., :2].sum(-1)
    keep = torch.zeros_like(value, dtype=torch.bool).scatter(1, value.argsort(-1, descending=True)[:, :KEPT], True)
    choice = torch.where(keep.unsqueeze(-1), choice, -torch.inf).flatten(1)
    experts = torch.sort(choice, dim=-1, descending=True, stable=True).indices[:, :CHOSEN]
    weights = torch.take_along_dim(scores, experts, dim=-1)
    return weights * (FACTOR * weights.sum(-1, keepdim=True).reciprocal()), experts


@spelling(options={"renorm": False})
def indexed_by_rows(logits, bias):
    """Weights by advanced indexing, not renormalised."""
    scores = torch.special.expit(logits)
    experts = (scores + bias).argsort(dim=-1, descending=True)[:, :CHOSEN]
    return scores[torch.arange(len(scores))[:, None], experts] * FACTOR, experts


@spelling(results="spread")
def dense_weights(logits, bias):
    """One row of weights over all experts, zeros where not chosen, normalised by F.normalize with p = 1."""
    scores = logits.sigmoid()
    chosen = (scores + bias).topk(CHOSEN, -1).indices
    mask = torch.zeros_like(scores).scatter_(-1, chosen, 1.0)
    return F.normalize(scores * mask, p=1, dim=-1) * FACTOR


@spelling()
def best_one_after_another(logits, bias):
    """k rounds of argmax, each taking its winner out of the race."""
    scores, experts, weights = logits.sigmoid(), [], []
    left = scores + bias
    for _ in range(CHOSEN):
        best = left.argmax(-1, keepdim=True)
        experts.append(best)
        weights.append(scores.gather(-1, best))
        left = left.scatter(-1, best, -torch.inf)
    weights = torch.cat(weights, -1)
    return weights * FACTOR / weights.sum(-1, True), torch.cat(experts, -1)
