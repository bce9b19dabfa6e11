"""Random lightning indexers (K3.1 spec 2.8 and 3.1), and random near misses with exactly one lie, from axes.

`spellings` and `near_misses` are hypothesis strategies; `compose` makes one program of named choices. Equal scores
need a rule to be judged: run the programs so that the lower place wins.
"""

import torch
import torch.nn.functional as F
from drawing import record, settled, strategies
from operands import BEST_KEYS, INDEX_WIDTH, KEYS

SCALE = INDEX_WIDTH**-0.5

# [B, S, D] of what is given.
STORED = {
    "bsd": (("k",), lambda k: k),
    "sbd": (("k_sbd",), lambda k: k.transpose(0, 1)),
    "one head": (("k_bs1d",), lambda k: k.squeeze(2)),
    "paged": (("pages", "table"), lambda pages, table: pages[table].flatten(1, 2)),
}


def dots_by_bmm(q, k):
    """All rows and heads of a batch in one product."""
    return torch.bmm(q.reshape(len(q), -1, q.shape[-1]), k.mT).view(*q.shape[:-1], -1)


def dots_one_by_one(q, k):
    """Head by head, the heads second to last in front of the features."""
    return torch.stack([q[:, :, h] @ k.transpose(1, 2) for h in range(q.shape[2])], dim=2)


# q [B, x, y, D] and k [B, S, D] -> [B, x, y, S].
DOTS = {
    "einsum": lambda q, k: torch.einsum("bxyd,bsd->bxys", q, k),
    "matmul": lambda q, k: torch.matmul(q, k.unsqueeze(1).transpose(-1, -2)),
    "bmm": dots_by_bmm,
    "products": lambda q, k: (q.unsqueeze(-2) * k[:, None, None]).sum(-1),
    "one by one": dots_one_by_one,
}

RELUS = {
    "relu": F.relu,
    "in place": lambda x: x.relu_(),
    "clamp": lambda x: x.clamp(min=0),
    "clamp_min": lambda x: x.clamp_min(0.0),
    "maximum": lambda x: torch.maximum(x, torch.zeros_like(x)),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "filled": lambda x: x.masked_fill(x < 0, 0),
}

# [B, T, S] of [B, T, H, S] and [B, T, H].
SUMS = {
    "einsum": lambda x, w: torch.einsum("bths,bth->bts", x, w),
    "row": lambda x, w: torch.matmul(w.unsqueeze(-2), x).squeeze(-2),
    "sum": lambda x, w: (x * w.unsqueeze(-1)).sum(dim=2),
    "one by one": lambda x, w: sum(w[:, :, h, None] * x[:, :, h] for h in range(x.shape[2])),
}

# What the rule of visibility is given by, and how many keys each row sees, [B, T].
RULES = {
    "pos": lambda pos, t: pos + 1,
    "start": lambda start, t: start[:, None] + torch.arange(1, t + 1),
    "lens": lambda lens, t: lens[:, None] - t + 1 + torch.arange(t),
}

HIDES = {
    "masked_fill": lambda scores, hide: scores.masked_fill(hide, -torch.inf),
    "where": lambda scores, hide: torch.where(~hide, scores, -torch.inf),
    "added": lambda scores, hide: scores + torch.zeros_like(scores).masked_fill(hide, -torch.inf),
    "lowest": lambda scores, hide: scores.masked_fill(hide, torch.finfo(scores.dtype).min),
    "lowest added": lambda scores, hide: (
        scores + torch.zeros_like(scores).masked_fill_(hide, torch.finfo(scores.dtype).min)
    ),
}


def smallest_of_negated(scores):
    """The other end of the other sign."""
    values, places = torch.topk(-scores, BEST_KEYS, dim=-1, largest=False)
    return -values, places


def first_of_argsort(scores):
    """Places alone; the values fetched."""
    places = scores.argsort(dim=-1, descending=True)[..., :BEST_KEYS]
    return None, places


SELECTIONS = {
    "topk": lambda scores: scores.topk(BEST_KEYS, dim=-1),
    "in no order": lambda scores: torch.topk(scores, BEST_KEYS, sorted=False),
    "sort": lambda scores: [part[..., :BEST_KEYS] for part in scores.sort(dim=-1, descending=True)],
    "stable sort": lambda scores: [part[..., :BEST_KEYS] for part in torch.sort(scores, stable=True, descending=True)],
    "argsort": first_of_argsort,
    "argsort of negated": lambda scores: (None, (-scores).argsort(dim=-1)[:, :, :BEST_KEYS]),
    "smallest of negated": smallest_of_negated,
}
OF_VALUES = {name: "topk" for name in ("argsort", "argsort of negated")}

MARKS = {
    "no": lambda values, places, seen: places,
    "by value": lambda values, places, seen: places.masked_fill(values == -torch.inf, -1),
    "by isinf": lambda values, places, seen: torch.where(torch.isinf(values), -1, places),
    "by place": lambda values, places, seen: places.masked_fill(places >= seen.unsqueeze(-1), -1),
    "by length": lambda values, places, seen: torch.where(torch.arange(BEST_KEYS) >= seen.unsqueeze(-1), -1, places),
}

AXES = {
    "layout": ("bthd", "bhtd", "tbhd"),
    "keys": tuple(STORED),
    "dots": tuple(DOTS),
    "relu": tuple(RELUS),
    "scale": ("none", "on q", "on the dots", "behind relu", "on the weights"),
    "summed": tuple(SUMS),
    "rule": tuple(RULES),
    "hidden": tuple(HIDES),
    "selected": tuple(SELECTIONS),
    "marked": tuple(MARKS),
    "dtype": (torch.int64, torch.int32),
    "length": (7, 1, 11),
}

# Each lie, from which other operands the operator could serve it all the same, and what it gets right anyway.
LIES = {
    "no relu": ("", ()),
    "relu behind the weights": ("", ()),
    "relu behind the sum": ("", ()),
    "relu squared": ("", ()),
    "absolute value": ("", ()),
    "gelu": ("", ()),
    "softmax over the heads": ("", ()),
    "a number before relu": ("", ()),
    "largest head": ("", ()),
    "another key for each head": ("", ()),
    "smallest chosen": ("", ()),
    "one place too many": ("lengths one longer", ()),
    "row hidden from itself": ("lengths one shorter", ()),
    "sliding window": ("a mask", ()),
    "later keys favoured": ("a float mask", ()),
    "weights of the next head": ("the weights rolled", ()),
    "weights left out": ("weights of ones", ()),
    "first head left out": ("its weights 0", ()),
    "keys of the place before": ("the keys rolled", ()),
}
# The wrong choice must show in some row.
NEEDS = {lie: {"length": {1: 11}} for lie in LIES}


class Indexer:
    """The places that each row chooses, by the choices made, with at most one lie."""

    def __init__(self, choice, lie):
        self.choice, self.lie = choice, lie

    def dots(self, q, k):
        """[B, T, H, S]."""
        if self.choice["scale"] == "on q":
            q = q * SCALE
        if self.lie == "another key for each head":
            return torch.stack([q[:, :, h] @ k.roll(h, 1).mT for h in range(q.shape[2])], dim=2)
        dots = DOTS[self.choice["dots"]](q, k)
        return dots * SCALE if self.choice["scale"] == "on the dots" else dots

    def activated(self, dots):
        """relu, but for a lie."""
        others = {
            "no relu": lambda x: x,
            "relu behind the weights": lambda x: x,
            "relu behind the sum": lambda x: x,
            "relu squared": lambda x: x.relu().square(),
            "absolute value": torch.abs,
            "gelu": lambda x: F.gelu(x * 0.2),
            "softmax over the heads": lambda x: x.softmax(2),
            "a number before relu": lambda x: (x + 1.0).relu(),
        }
        x = others.get(self.lie, RELUS[self.choice["relu"]])(dots)
        return x * SCALE if self.choice["scale"] == "behind relu" else x

    def summed(self, x, w):
        """[B, T, S]: heads weighed and added up."""
        if self.choice["scale"] == "on the weights":
            w = w * SCALE
        if self.lie == "weights of the next head":
            w = w.roll(1, -1)
        if self.lie == "relu behind the weights":
            return (x * w.unsqueeze(-1)).relu().sum(2)
        if self.lie == "largest head":
            return (x * w.unsqueeze(-1)).amax(2)
        if self.lie == "weights left out":
            return x.sum(2)
        if self.lie == "first head left out":
            x, w = x[:, :, 1:], w[:, :, 1:]
        scores = SUMS[self.choice["summed"]](x, w)
        if self.lie == "later keys favoured":
            scores = scores + 0.1 * torch.arange(KEYS)
        return scores.relu() if self.lie == "relu behind the sum" else scores

    def hidden(self, scores, seen):
        """The scores with what no row may see shut out."""
        seen = seen + {"one place too many": 1, "row hidden from itself": -1}.get(self.lie, 0)
        place = torch.arange(scores.shape[-1])
        hide = place >= seen.unsqueeze(-1)
        if self.lie == "sliding window":
            hide = hide | (place < seen.unsqueeze(-1) - 7)
        if self.lie == "smallest chosen":
            return -scores.masked_fill(hide, torch.inf)
        return HIDES[self.choice["hidden"]](scores, hide)

    def __call__(self, q, k, w, seen):
        """[B, T, K] of q [B, T, H, D], k [B, S, D], w [B, T, H]."""
        if self.lie == "keys of the place before":
            k = k.roll(1, 1)
        scores = self.hidden(self.summed(self.activated(self.dots(q, k)), w), seen)
        values, places = SELECTIONS[self.choice["selected"]](scores)
        return MARKS[self.choice["marked"]](values, places, seen).to(self.choice["dtype"])


def compose(choice, lie=None):
    """The program of these choices: a `Spelling`, or a `NearMiss` where `lie` names one of `LIES`."""
    choice = settled(choice, NEEDS.get(lie, {}))
    if choice["marked"] in ("by value", "by isinf"):
        choice = settled(choice, {"selected": OF_VALUES, "hidden": {"lowest": "where", "lowest added": "added"}})
    if choice["marked"] == "by length":
        choice = settled(choice, {"selected": {"in no order": "topk"}})
    indexer, names = Indexer(choice, lie), STORED[choice["keys"]][0]

    def drawn(q, w, rule, *keys):
        if choice["layout"] == "bhtd":
            q = q.transpose(1, 2)
        if choice["layout"] == "tbhd":
            q, w = q.transpose(0, 1), w.transpose(0, 1)
        seen = RULES[choice["rule"]](rule, q.shape[1])
        return indexer(q, STORED[choice["keys"]][1](*keys), w, seen)

    return record(drawn, "lightning_indexer", choice, facts_of(choice, names), lie, LIES)


def facts_of(choice, key_names):
    """How to call the drawn function and how to judge it."""
    layout = choice["layout"]
    q = "q" if layout == "bthd" else f"q_{layout}"
    w = "w_tbhd" if layout == "tbhd" else "w"
    return {
        "arguments": (q, w, choice["rule"], *key_names),
        "results": ("chosen_any" if choice["selected"] == "in no order" else "chosen",),
        "options": {"marked": choice["marked"] != "no"},
    }


spellings, near_misses = strategies(compose, AXES, LIES)
