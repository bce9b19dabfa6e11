"""Random routers (K3.1 spec 2.18 and 3.6), and random near misses with exactly one lie, put together from axes.

`spellings` and `near_misses` are hypothesis strategies; `compose` makes one program of named choices.
"""

import torch
import torch.nn.functional as F
from drawing import record, settled, strategies
from operands import CHOSEN, FACTOR, GROUPS, KEPT

LOGITS = {
    "given": lambda logits: logits,
    "linear": lambda x, router: F.linear(x.flatten(0, 1), router),
    "matmul": lambda x, router: (x @ router.mT).flatten(0, 1),
    "einsum": lambda x, router: torch.einsum("btd,ed->bte", x, router).flatten(0, 1),
}


def softmax_by_hand(logits):
    """exp of what is left of the largest, by its sum."""
    parts = (logits - logits.amax(-1, keepdim=True)).exp()
    return parts / parts.sum(-1, keepdim=True)


SCORES = {
    "sigmoid": torch.sigmoid,
    "expit": torch.special.expit,
    "sigmoid written out": lambda logits: 1 / (1 + torch.exp(-logits)),
    "softmax": lambda logits: logits.softmax(-1),
    "softmax written out": softmax_by_hand,
}
SIGMOIDS = ("sigmoid", "expit", "sigmoid written out")

VALUES = {
    "two best by topk": lambda grouped: grouped.topk(2, -1).values.sum(-1),
    "two best by sort": lambda grouped: grouped.sort(-1, descending=True).values[..., :2].sum(-1),
    "best by amax": lambda grouped: grouped.amax(-1),
    "best by max": lambda grouped: grouped.max(-1)[0],
}

KEEPS = {
    "scattered": lambda value, best: torch.zeros_like(value, dtype=torch.bool).scatter(1, best, True),
    "ones scattered": lambda value, best: torch.zeros_like(value).scatter_(1, best, 1).bool(),
    "one hot": lambda value, best: F.one_hot(best, GROUPS).sum(1) > 0,
    "compared": lambda value, best: (best.unsqueeze(-1) == torch.arange(GROUPS)).any(1),
}

HIDES = {
    "masked_fill": lambda choice, keep: choice.masked_fill(~keep, -torch.inf),
    "where": lambda choice, keep: torch.where(keep, choice, -torch.inf),
    "added": lambda choice, keep: choice + torch.zeros_like(choice).masked_fill(~keep, -torch.inf),
    "times 0": lambda choice, keep: choice * keep,
}

PICKS = {
    "topk": lambda choice, k: torch.topk(choice, k, dim=-1)[1],
    "topk in no order": lambda choice, k: choice.topk(k, sorted=False).indices,
    "sort": lambda choice, k: choice.sort(dim=-1, descending=True).indices[:, :k],
    "stable sort": lambda choice, k: torch.sort(choice, dim=-1, descending=True, stable=True)[1][..., :k],
    "argsort": lambda choice, k: choice.argsort(-1, descending=True)[:, :k],
}

FETCHES = {
    "gather": lambda scores, experts: scores.gather(-1, experts),
    "take_along_dim": lambda scores, experts: torch.take_along_dim(scores, experts, dim=-1),
    "by rows": lambda scores, experts: scores[torch.arange(len(scores))[:, None], experts],
    "one hot": lambda scores, experts: (F.one_hot(experts, scores.shape[-1]) * scores.unsqueeze(1)).sum(-1),
}

RENORMS = {
    "none": lambda weights, total: weights,
    "sum": lambda weights, total: weights / total,
    "sum and eps": lambda weights, total: weights / (total + 1e-20),
    "reciprocal": lambda weights, total: weights * total.reciprocal(),
}

FACTORS = {
    "none": lambda weights: weights,
    "behind": lambda weights: weights * FACTOR,
    "divided": lambda weights: weights / (1 / FACTOR),
    "in front": lambda weights: FACTOR * weights,
}

AXES = {
    "logits": tuple(LOGITS),
    "score": tuple(SCORES),
    "bias": ("added", "as a row", "none"),
    "groups": ("none", *VALUES),
    "kept": tuple(KEEPS),
    "spread": ("repeated", "expanded", "in groups"),
    "hidden": tuple(HIDES),
    "picked": tuple(PICKS),
    "fetched": tuple(FETCHES),
    "renormed": ("sum", "none", "sum and eps", "reciprocal"),
    "factor": tuple(FACTORS),
    "dtype": (torch.int64, torch.int32),
    "length": (7, 1, 11),
}

# Each lie, from which other operands the operator could serve it all the same, and what it gets right anyway.
LIES = {
    "bias on the logits": ("logits + bias, no bias", ()),
    "twice the logits": ("twice the logits", ()),
    "scores made to add up to 1 first": ("", ()),
    "score times the bias": ("", ()),
    "bias of the next expert": ("the bias rolled", ()),
    "groups by their mean": ("", ()),
    "groups without the bias": ("", ()),
    "bias for the groups only": ("", ()),
    "groups of every fourth expert": ("", ()),
    "one group fewer": ("k_group less 1", ()),
    "worst experts": ("", ()),
    "best one left out": ("one more, the first cut off behind it", ()),
    "bias in the weights": ("", ("experts",)),
    "weights of the next slot": ("its weights rolled", ("experts",)),
    "squared weights": ("renorm=False, the rest behind it", ("experts",)),
    "divided by the largest": ("renorm=False, divided behind it", ("experts",)),
    "divided by all scores": ("renorm=False, divided behind it", ("experts",)),
    "divided by the sum with the bias": ("renorm=False, divided behind it", ("experts",)),
    "factor twice": ("its square as the factor", ("experts",)),
}

BIASED = {"bias": {"none": "added"}}
GROUPED = {"groups": {"none": "two best by topk"}}
RENORMED = {"renormed": {"none": "sum"}}
SIGMOID = {"score": {"softmax": "sigmoid", "softmax written out": "sigmoid"}}
SEVERAL = {"length": {1: 7}}
# Which choices a lie cannot be told under, and what it is told under then.
NEEDS = {
    "bias on the logits": BIASED,
    "scores made to add up to 1 first": BIASED | SIGMOID,
    "score times the bias": BIASED,
    "bias of the next expert": BIASED,
    "groups by their mean": GROUPED | SEVERAL,
    "groups without the bias": GROUPED | BIASED | SEVERAL,
    "bias for the groups only": GROUPED | BIASED,
    "groups of every fourth expert": GROUPED | SEVERAL,
    "one group fewer": {"groups": {"none": "two best by topk"}} | SEVERAL,
    "bias in the weights": BIASED,
    "divided by all scores": RENORMED | SIGMOID,
    "divided by the sum with the bias": RENORMED | BIASED,
    "factor twice": {"factor": {"none": "behind"}},
}


class Router:
    """Who is chosen and with what weight, by the choices made, with at most one lie."""

    def __init__(self, choice, lie):
        self.choice, self.lie = choice, lie

    def scores(self, logits, bias):
        """[N, E] of the logits."""
        if self.lie == "bias on the logits":
            logits = logits + bias
        scores = SCORES[self.choice["score"]](2 * logits if self.lie == "twice the logits" else logits)
        return scores / scores.sum(-1, keepdim=True) if self.lie == "scores made to add up to 1 first" else scores

    def biased(self, scores, bias):
        """What decides who is chosen."""
        if bias is None or self.lie == "bias on the logits":
            return scores
        if self.lie == "score times the bias":
            return scores * (1 + bias)
        bias = bias.roll(1) if self.lie == "bias of the next expert" else bias
        return scores + (bias.unsqueeze(0) if self.choice["bias"] == "as a row" else bias)

    def in_groups(self, x):
        """[N, G, E / G]."""
        if self.lie == "groups of every fourth expert":
            return x.unflatten(-1, (-1, GROUPS)).mT
        return x.view(-1, GROUPS, x.shape[-1] // GROUPS)

    def kept(self, ranked):
        """Which groups may be chosen from, [N, G]."""
        grouped = self.in_groups(ranked)
        value = grouped.mean(-1) if self.lie == "groups by their mean" else VALUES[self.choice["groups"]](grouped)
        best = value.topk(KEPT - (self.lie == "one group fewer"), -1, sorted=False).indices
        return KEEPS[self.choice["kept"]](value, best)

    def shut(self, choice, ranked):
        """The choice with the other groups out of reach."""
        keep, size = self.kept(ranked), choice.shape[-1] // GROUPS
        hide = HIDES[self.choice["hidden"]]
        if self.lie == "groups of every fourth expert":
            return hide(choice, keep.repeat(1, size))
        if self.choice["spread"] == "in groups":
            return hide(self.in_groups(choice), keep.unsqueeze(-1)).flatten(1)
        if self.choice["spread"] == "repeated":
            return hide(choice, keep.repeat_interleave(size, dim=1))
        return hide(choice, keep.unsqueeze(-1).expand(-1, -1, size).reshape(choice.shape))

    def experts(self, scores, choice):
        """The numbers of the chosen, [N, k]."""
        if self.choice["groups"] != "none":
            ranked = scores if self.lie == "groups without the bias" else choice
            choice = self.shut(scores if self.lie == "bias for the groups only" else choice, ranked)
        if self.lie == "worst experts":
            return choice.masked_fill(choice == -torch.inf, torch.inf).topk(CHOSEN, largest=False).indices
        if self.lie == "best one left out":
            return choice.topk(CHOSEN + 1).indices[:, 1:]
        return PICKS[self.choice["picked"]](choice, CHOSEN)

    def weights(self, scores, choice, experts):
        """What the chosen weigh, [N, k]."""
        weights = FETCHES[self.choice["fetched"]](choice if self.lie == "bias in the weights" else scores, experts)
        if self.lie == "squared weights":
            weights = weights * weights
        total = weights.sum(-1, keepdim=True)
        if self.lie == "divided by all scores":
            total = scores.sum(-1, keepdim=True)
        if self.lie == "divided by the sum with the bias":
            total = choice.gather(-1, experts).sum(-1, keepdim=True)
        if self.lie == "divided by the largest":
            weights = weights / weights.amax(-1, keepdim=True)
        else:
            weights = RENORMS[self.choice["renormed"]](weights, total)
        weights = FACTORS[self.choice["factor"]](weights)
        weights = weights * FACTOR if self.lie == "factor twice" else weights
        return weights.roll(1, -1) if self.lie == "weights of the next slot" else weights

    def __call__(self, logits, bias):
        """Weights and experts."""
        scores = self.scores(logits, bias)
        choice = self.biased(scores, bias)
        experts = self.experts(scores, choice)
        return self.weights(scores, choice, experts), experts.to(self.choice["dtype"])


def compose(choice, lie=None):
    """The program of these choices: a `Spelling`, or a `NearMiss` where `lie` names one of `LIES`."""
    choice = settled(choice, NEEDS.get(lie, {}))
    if choice["bias"] != "none" or choice["score"] not in SIGMOIDS:
        # A product with 0 leaves others out only where everything else is far above it.
        choice = settled(choice, {"hidden": {"times 0": "masked_fill"}})
    router = Router(choice, lie)

    def drawn(*operands):
        *operands, bias = operands if choice["bias"] != "none" else (*operands, None)
        return router(LOGITS[choice["logits"]](*operands), bias)

    return record(drawn, "moe_gating_top_k", choice, facts_of(choice), lie, LIES)


def facts_of(choice):
    """How to call the drawn function and how to judge it."""
    biased = choice["bias"] != "none"
    best = 1 if choice["groups"].startswith("best") else 2
    return {
        "arguments": (
            *(("logits",) if choice["logits"] == "given" else ("x", "router")),
            *(("bias",) if biased else ()),
        ),
        "results": ("weights", "experts"),
        "options": {
            "norm": "sigmoid" if choice["score"] in SIGMOIDS else "softmax",
            "biased": biased,
            "grouped": choice["groups"] != "none",
            "best": best,
            "renorm": choice["renormed"] != "none",
            "factor": 1.0 if choice["factor"] == "none" else FACTOR,
        },
    }


spellings, near_misses = strategies(compose, AXES, LIES)
