"""Random attention residuals (K3.1 spec 2.2 and 3.5), and random near misses with exactly one lie, from axes.

`spellings` and `near_misses` are hypothesis strategies; `compose` makes one program of named choices.
"""

import torch
import torch.nn.functional as F
from drawing import record, settled, strategies
from operands import BLOCKS, EPS, HIDDEN, SLOTS

# The operands that hold the frozen sums, which axis counts them, and what is stacked there with the running sum.
BANKS = {
    "list in front": (("bank_list",), 0, lambda rows, bank: torch.stack([*bank, *rows])),
    "list behind": (("bank_list",), 2, lambda rows, bank: torch.stack((*bank, *rows), dim=2)),
    "stack": (("bank",), 0, lambda rows, bank: torch.cat([bank, *(row.unsqueeze(0) for row in rows)])),
    "grown": (("bank_btnd",), 2, lambda rows, bank: torch.cat([bank, *(row.unsqueeze(-2) for row in rows)], dim=-2)),
    "cut": (
        ("buffer_btnd", "valid"),
        2,
        lambda rows, buffer, valid: torch.cat([buffer[:, :, :valid], *(row[:, :, None] for row in rows)], dim=2),
    ),
    "hidden": (
        ("buffer_btnd", "valid"),
        2,
        lambda rows, buffer, valid: torch.cat([buffer, *(row.unsqueeze(2) for row in rows)], 2),
    ),
}

# 1 / rms of rows [.., D], with the last axis kept.
INVERSES = {
    "rsqrt": lambda x: torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS),
    "root": lambda x: 1 / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS),
    "sum": lambda x: (x.square().sum(-1, keepdim=True) / x.shape[-1] + EPS).rsqrt(),
    "power": lambda x: x.pow(2).mean(-1, True).add(EPS).pow(-0.5),
}

# [.., N] by rows [.., N, D] and a query [D].
LOGITS = {
    "sum": lambda keys, query: (keys * query).sum(-1),
    "einsum": lambda keys, query: torch.einsum("...d,d->...", keys, query),
    "linear": lambda keys, query: F.linear(keys, query.unsqueeze(0)).squeeze(-1),
    "matmul": lambda keys, query: (keys @ query.unsqueeze(-1)).squeeze(-1),
    "vector": lambda keys, query: keys @ query,
}


def softmax_by_hand(logits, axis):
    """exp of what is left of the largest, by its sum."""
    parts = (logits - logits.amax(axis, keepdim=True)).exp()
    return parts / parts.sum(axis, keepdim=True)


SOFTMAXES = {
    "softmax": lambda logits, axis: torch.softmax(logits, dim=axis),
    "method": lambda logits, axis: logits.softmax(axis),
    "by hand": softmax_by_hand,
}


def mixed_by_product(p, values, axis):
    """A row of weights times a matrix of values."""
    return torch.matmul(p.movedim(axis, -1).unsqueeze(-2), values.movedim(axis, -2)).squeeze(-2)


def mixed_one_by_one(p, values, axis):
    """Source after source, from Python lists."""
    return sum(w.unsqueeze(-1) * v for w, v in zip(p.unbind(axis), values.unbind(axis), strict=True))


MIXES = {
    "sum": lambda p, values, axis: (p.unsqueeze(-1) * values).sum(axis),
    "einsum": lambda p, values, axis: torch.einsum(("nbt,nbtd" if axis == 0 else "btn,btnd") + "->btd", p, values),
    "matmul": mixed_by_product,
    "one by one": mixed_one_by_one,
}

AXES = {
    "bank": tuple(BANKS),
    "partial": ("given", "sum", "none"),
    "rms": ("rms_norm", *INVERSES),
    "weight": ("on the rows", "on the query", "on the product"),
    "divided": ("rows", "logits"),
    "logits": tuple(LOGITS),
    "softmax": tuple(SOFTMAXES),
    "mixed": tuple(MIXES),
    "behind": ("nothing", "norm"),
    "length": (7, 1),
}

# Each lie, from which other operands the operator could serve it all the same, and what it gets right anyway.
LIES = {
    "normed rows mixed": ("", ()),
    "logits of the raw rows": ("", ()),
    "keys lose their mean": ("", ()),
    "eps outside the root": ("", ()),
    "one norm for all sources": ("", ()),
    "sigmoid for softmax": ("", ()),
    "later sources favoured": ("", ()),
    "the largest alone": ("", ()),
    "logits of the source before": ("", ()),
    "squared logits": ("", ()),
    "query of each token": ("", ()),
    "logit of the sum before": ("", ("partial",)),
    "running sum forgotten": ("the running sum left out of the update", ("partial",)),
    "running sum kept beside": ("the result plus the running sum", ("partial",)),
    "weight twice": ("its square as the weight", ("partial",)),
    "first source left out": ("the others as the bank", ("partial",)),
}

WITH_PARTIAL = {"partial": {"none": "given"}, "behind": {"norm": "nothing"}}
OF_KEYS = {"rms": {"rms_norm": "rsqrt"}, "divided": {"logits": "rows"}}
# Which choices a lie cannot be told under, and what it is told under then.
NEEDS = {
    "keys lose their mean": OF_KEYS,
    "eps outside the root": OF_KEYS | {"length": {1: 7}},
    "one norm for all sources": OF_KEYS,
    "normed rows mixed": OF_KEYS,
    "logit of the sum before": {"partial": {"given": "sum", "none": "sum"}},
    "running sum forgotten": WITH_PARTIAL,
    "running sum kept beside": WITH_PARTIAL,
    "query of each token": {"partial": {"none": "given"}},
}


class Depths:
    """A softmax over the sources of each token, by the choices made, with at most one lie."""

    def __init__(self, choice, lie):
        self.choice, self.lie = choice, lie
        self.names, self.axis, self.stack = BANKS[choice["bank"]]

    def inverse(self, values):
        """1 / rms of each row."""
        if self.lie == "eps outside the root":
            return 1 / (values.square().mean(-1, keepdim=True).sqrt() + EPS)
        if self.lie == "one norm for all sources":
            return torch.rsqrt(values.square().mean((self.axis, -1), keepdim=True) + EPS)
        return INVERSES[self.choice["rms"]](values)

    def normed(self, values, weight):
        """The keys, [.., D]."""
        if self.choice["rms"] == "rms_norm":
            return F.rms_norm(values, (HIDDEN,), weight, EPS)
        if self.lie == "keys lose their mean":
            values = values - values.mean(-1, keepdim=True)
        normed = values * self.inverse(values)
        return normed if weight is None else normed * weight

    def product(self, keys, query, prefix):
        """One number a row."""
        if self.lie == "query of each token":
            own = prefix.unsqueeze(self.axis if self.axis == 0 else -2)
            return (keys * query * own).sum(-1)
        return LOGITS[self.choice["logits"]](keys, query)

    def logits(self, values, query, weight, prefix):
        """One number for each source."""
        if self.lie == "weight twice":
            weight = weight * weight
        query = query.squeeze(0)
        if self.choice["weight"] == "on the query":
            query, weight = query * weight, None
        if self.lie == "logits of the raw rows":
            return self.product(values if weight is None else values * weight, query, prefix)
        if self.choice["rms"] != "rms_norm" and self.choice["divided"] == "logits":
            keys = values if weight is None else values * weight
            return self.product(keys, query, prefix) * self.inverse(values).squeeze(-1)
        if self.choice["weight"] == "on the product" and weight is not None:
            return self.product(self.normed(values, None) * weight, query, prefix)
        return self.product(self.normed(values, weight), query, prefix)

    def shares(self, logits):
        """What each source weighs."""
        if self.lie == "squared logits":
            logits = logits.square()
        if self.lie == "logits of the source before":
            logits = logits.roll(1, self.axis)
        if self.lie == "later sources favoured":
            place = torch.arange(logits.shape[self.axis]) * 0.5
            logits = logits + (place[:, None, None] if self.axis == 0 else place)
        if self.choice["bank"] == "hidden":
            place = torch.arange(logits.shape[-1])
            logits = logits.masked_fill((place >= BLOCKS) & (place < SLOTS), -torch.inf)
        if self.lie == "sigmoid for softmax":
            return logits.sigmoid()
        p = SOFTMAXES[self.choice["softmax"]](logits, self.axis)
        return (p == p.amax(self.axis, keepdim=True)).to(p.dtype) if self.lie == "the largest alone" else p

    def __call__(self, rows, banks, query, weight, earlier):
        """The mixture of the bank and of `rows`, the running sum or nothing; `earlier` is the sum before the add."""
        if self.lie == "first source left out":
            bank, *rest = banks
            banks = (bank[1:] if self.axis == 0 or isinstance(bank, list) else bank[:, :, 1:], *rest)
        values = self.stack([] if self.lie == "running sum forgotten" else rows, *banks)
        seen = self.stack([earlier], *banks) if self.lie == "logit of the sum before" else values
        logits = self.logits(seen, query, weight, rows[0] if rows else None)
        if self.lie == "normed rows mixed":
            values = self.normed(values, weight)
        return MIXES[self.choice["mixed"]](self.shares(logits), values, self.axis)


def compose(choice, lie=None):
    """The program of these choices: a `Spelling`, or a `NearMiss` where `lie` names one of `LIES`."""
    choice = settled(choice, NEEDS.get(lie, {}))
    if lie in ("first source left out", "running sum forgotten"):
        # Where places are counted by hand, one fewer would be a second lie.
        choice = settled(choice, {"bank": {"hidden": "grown", "cut": "grown"}})
    depths = Depths(choice, lie)

    def drawn(query, weight, *operands):
        banks, rest = operands[: len(depths.names)], list(operands[len(depths.names) :])
        norm = rest.pop() if choice["behind"] == "norm" else None
        earlier = rest[0] if rest else None
        rows = [] if choice["partial"] == "none" else [rest[0] + rest[1] if choice["partial"] == "sum" else rest[0]]
        h = depths(rows, banks, query, weight, earlier)
        if lie == "running sum kept beside":
            h = h + rows[0]
        h = h if norm is None else F.rms_norm(h, (HIDDEN,), norm, EPS)
        return (h, rows[0]) if choice["partial"] == "sum" else h

    return record(drawn, "attn_res", choice, facts_of(choice, depths.names), lie, LIES)


def facts_of(choice, bank_names):
    """How to call the drawn function and how to judge it."""
    partial = {"given": ("prefix",), "sum": ("prefix", "delta"), "none": ()}[choice["partial"]]
    norm = ("norm_weight",) if choice["behind"] == "norm" else ()
    # The last source of a list may be a running sum as well as any.
    has_update = choice["partial"] != "none" or choice["bank"].startswith("list")
    return {
        "arguments": ("query", "res_norm", *bank_names, *partial, *norm),
        "results": ("normed" if norm else "h", *(("partial",) if choice["partial"] == "sum" else ())),
        "options": {
            "source": "sum" if choice["partial"] == "sum" else "prefix",
            "with_partial": choice["partial"] != "none",
        },
        "counts": {"attn_res_prepare": 1} | ({"attn_res_update": 1} if has_update else {}),
    }


spellings, near_misses = strategies(compose, AXES, LIES)
