"""Random sparse attentions (K3.1 spec 2.7, 2.9, 3.2), and random near misses with exactly one lie, from axes.

`spellings` and `near_misses` are hypothesis strategies; `compose` makes one program of named choices.
"""

import torch
import torch.nn.functional as F
from drawing import record, settled, strategies
from operands import BEST_KEYS, CACHED

SCALE = 0.3

# Operands of queries and of caches; the definition's options.
FORMS = {
    "latent": (("q_latent", "cache"), {}),
    "with rope": (("q_latent", "q_rope", "cache", "rope_cache"), {"rope": True}),
    "joint": (("q_joint", "joint_cache"), {"rope": True}),
    "joint in pages": (("q_joint", "joint_pages", "joint_table"), {"rope": True}),
    "own heads": (("q_latent", "head_keys", "head_values"), {"own_heads": True}),
}

# Which keys are chosen, bool [B, T, S].
KEEPS = {
    "zeros": lambda chosen, shape: torch.zeros(shape, dtype=torch.bool).scatter(-1, chosen, True),
    "zeros in place": lambda chosen, shape: torch.zeros(shape, dtype=torch.bool).scatter_(2, chosen, True),
    "ones": lambda chosen, shape: ~torch.ones(shape, dtype=torch.bool).scatter(-1, chosen, False),
    "floats": lambda chosen, shape: torch.zeros(shape).scatter_(-1, chosen, 1.0) > 0,
    "infinities": lambda chosen, shape: torch.full(shape, -torch.inf).scatter_(-1, chosen, 0.0) == 0,
}


def flat_rows(cache, chosen):
    """One flat list of rows over the batch."""
    flat = (chosen + torch.arange(len(cache))[:, None, None] * cache.shape[1]).reshape(-1)
    return cache.flatten(0, 1).index_select(0, flat).view(*chosen.shape, -1)


def expanded_rows(cache, chosen):
    """torch.gather on an expanded cache."""
    wide = cache.unsqueeze(1).expand(-1, chosen.shape[1], -1, -1)
    return torch.gather(wide, 2, chosen.unsqueeze(-1).expand(-1, -1, -1, cache.shape[-1]))


# The chosen rows [B, T, K, D] of a cache [B, S, D].
FETCHES = {
    "by rows": lambda cache, chosen: cache[torch.arange(len(cache))[:, None, None], chosen],
    "take_along_dim": lambda cache, chosen: torch.take_along_dim(cache.unsqueeze(1), chosen.unsqueeze(-1), dim=2),
    "gather": expanded_rows,
    "index_select": flat_rows,
}

# These read the last key at -1, where the operator reads none.
WRAPPING = ("by rows", "take_along_dim")

HIDES = {
    "masked_fill": lambda logits, keep: logits.masked_fill(~keep, -torch.inf),
    "where": lambda logits, keep: torch.where(keep, logits, -torch.inf),
    "lowest": lambda logits, keep: logits.masked_fill(~keep, torch.finfo(logits.dtype).min),
    "added": lambda logits, keep: logits + torch.zeros(keep.shape, dtype=logits.dtype).masked_fill(~keep, -torch.inf),
}


def softmax_by_hand(logits):
    """exp of what is left of the largest, by its sum."""
    parts = (logits - logits.max(dim=-1, keepdim=True).values).exp()
    return parts / parts.sum(-1, keepdim=True)


SOFTMAXES = {
    "softmax": lambda logits: F.softmax(logits, dim=-1),
    "method": lambda logits: logits.softmax(-1),
    "by hand": softmax_by_hand,
}

AXES = {
    "form": tuple(FORMS),
    "chosen": ("given", "given with marks", "by an indexer"),
    "kept": (*KEEPS, *FETCHES),
    "hidden": tuple(HIDES),
    "scale": ("behind the dots", "on q", "divided", "behind the mask"),
    "dots": ("einsum", "matmul"),
    "softmax": tuple(SOFTMAXES),
    "mixed": ("einsum", "matmul"),
    "length": (7, 1, 11),
}

# Each lie, from which other operands the operator could serve it all the same, and what it gets right anyway.
LIES = {
    "sigmoid for softmax": ("", ()),
    "softmax over all keys": ("", ()),
    "softmax over the heads": ("", ()),
    "a sink beside": ("", ()),
    "logits bounded": ("", ()),
    "squared logits": ("", ()),
    "later keys favoured": ("", ()),
    "unchosen only dampened": ("", ()),
    "one place too many": ("lengths one longer", ()),
    "no rule": ("lengths of the whole cache", ()),
    "last choice left out": ("its indices", ()),
    "twice the scale": ("twice the scale", ()),
    "a temperature for each head": ("the queries scaled", ()),
    "keys of length one": ("keys of length one", ()),
    "values of the place before": ("the values rolled", ()),
    "values of the first feature": ("the values changed", ()),
    "twice the result": ("the result doubled behind it", ()),
}

MASKED = {"kept": {name: "zeros" for name in FETCHES}}
SEVERAL = {"length": {1: 7}}
# Which choices a lie cannot be told under, and what it is told under then.
NEEDS = {
    "softmax over all keys": MASKED | SEVERAL,
    "unchosen only dampened": MASKED | SEVERAL,
    "one place too many": SEVERAL,
    "no rule": SEVERAL,
    "keys of length one": {"form": {"with rope": "latent"}},
}


class Attention:
    """A softmax over the chosen by the choices made, with at most one lie."""

    def __init__(self, choice, lie):
        self.choice, self.lie = choice, lie

    def operands(self, operands):
        """Queries, pairs of a query and its keys, and values."""
        form = self.choice["form"]
        if form == "latent":
            q, cache = operands
            return [(q, cache)], cache
        if form == "with rope":
            q, rope, cache, turned = operands
            return [(q, cache), (rope, turned)], cache
        if form == "joint":
            q, joint = operands
            return [(q, joint)], joint[..., :CACHED]
        if form == "joint in pages":
            q, pages, table = operands
            joint = pages[table].flatten(1, 2)
            return [(q, joint)], joint[..., :CACHED]
        q, keys, values = operands
        return [(q, keys)], values

    def dots(self, q, keys):
        """[B, T, H, n] of q [B, T, H, D] and keys [B, n, D], [B, n, H, D] or [B, T, n, D]."""
        own = self.choice["form"] == "own heads"
        if self.choice["dots"] == "einsum":
            rule = "bthd,bshd->bths" if own else "bthd,bsd->bths" if keys.dim() == 3 else "bthd,btkd->bthk"
            return torch.einsum(rule, q, keys)
        if own:
            return (q.transpose(1, 2) @ keys.permute(0, 2, 3, 1)).transpose(1, 2)
        return q @ (keys.unsqueeze(1) if keys.dim() == 3 else keys).transpose(-1, -2)

    def mix(self, p, values):
        """[B, T, H, V]."""
        own = self.choice["form"] == "own heads"
        if self.choice["mixed"] == "einsum":
            rule = "bths,bshd->bthd" if own else "bths,bsd->bthd" if values.dim() == 3 else "bthk,btkd->bthd"
            return torch.einsum(rule, p, values)
        if own:
            return (p.transpose(1, 2) @ values.transpose(1, 2)).transpose(1, 2)
        return p @ (values.unsqueeze(1) if values.dim() == 3 else values)

    def logits(self, pairs):
        """The scaled dots of all parts."""
        scale = 2 * SCALE if self.lie == "twice the scale" else SCALE
        if self.lie == "keys of length one":
            pairs = [(q, F.normalize(keys, dim=-1)) for q, keys in pairs]
        if self.lie == "a temperature for each head":
            heat = torch.linspace(0.5, 2.0, pairs[0][0].shape[2]).view(-1, 1)
            pairs = [(q * heat, keys) for q, keys in pairs]
        if self.choice["scale"] == "on q":
            return sum(self.dots(q * scale, keys) for q, keys in pairs)
        logits = sum(self.dots(q, keys) for q, keys in pairs)
        if self.choice["scale"] == "behind the mask":
            return logits
        return logits / (1 / scale) if self.choice["scale"] == "divided" else logits * scale

    def changed(self, logits):
        """The logits, but for a lie."""
        if self.lie == "logits bounded":
            return torch.tanh(logits)
        if self.lie == "squared logits":
            return logits.square()
        if self.lie == "later keys favoured":
            return logits + 0.3 * torch.arange(logits.shape[-1])
        return logits

    def shares(self, logits, keep):
        """What each key weighs; `keep` [B, T, 1, n]."""
        logits = HIDES[self.choice["hidden"]](self.changed(logits), keep)
        if self.choice["scale"] == "behind the mask":
            logits = logits * (2 * SCALE if self.lie == "twice the scale" else SCALE)
        if self.lie == "sigmoid for softmax":
            return logits.sigmoid()
        if self.lie == "softmax over the heads":
            return torch.where(keep, logits, 0.0).softmax(2) * keep
        if self.lie == "a sink beside":
            return F.pad(logits, (1, 0)).softmax(-1)[..., 1:]
        return SOFTMAXES[self.choice["softmax"]](logits)

    def masked(self, pairs, values, chosen, seen):
        """All keys, and a mask of those that count."""
        logits, size = self.logits(pairs), values.shape[1]
        kept = KEEPS[self.choice["kept"]](chosen, (*chosen.shape[:2], size)).unsqueeze(2)
        visible = (torch.arange(size) < seen.unsqueeze(-1)).unsqueeze(2)
        if self.lie == "softmax over all keys":
            return self.mix(self.shares(logits, visible) * kept, values)
        if self.lie == "unchosen only dampened":
            return self.mix(self.shares(logits.masked_fill(~kept, -1.0), visible), values)
        return self.mix(self.shares(logits, kept & visible), values)

    def gathered(self, pairs, values, chosen, seen):
        """The chosen rows, and a mask of those that are visible."""
        fetch = FETCHES[self.choice["kept"]]
        visible = (chosen < seen.unsqueeze(-1)).unsqueeze(2)
        if self.choice["chosen"] == "given with marks":
            visible, chosen = visible & (chosen >= 0).unsqueeze(2), chosen.clamp(min=0)
        rows = [(q, fetch(keys, chosen)) for q, keys in pairs]
        if values is pairs[0][1]:
            mixed = rows[0][1]
        elif self.choice["form"].startswith("joint") and self.lie is None:
            mixed = rows[0][1][..., :CACHED]
        else:
            mixed = fetch(values, chosen)
        return self.mix(self.shares(self.logits(rows), visible), mixed)

    def __call__(self, operands, chosen, pos):
        """[B, T, H, V]."""
        pairs, values = self.operands(operands)
        if self.lie == "values of the place before":
            values = values.roll(1, 1)
        if self.lie == "values of the first feature":
            values = values + values[..., :1]
        if self.lie == "last choice left out":
            chosen = chosen[..., :-1]
        seen = pos + {"one place too many": 2, "no rule": values.shape[1]}.get(self.lie, 1)
        way = self.gathered if self.choice["kept"] in FETCHES else self.masked
        out = way(pairs, values, chosen, seen)
        return 2 * out if self.lie == "twice the result" else out


def choose(q, k, w, pos):
    """A plain indexer."""
    scores = (torch.einsum("bthd,bsd->bths", q, k).relu() * w.unsqueeze(-1)).sum(2)
    return scores.masked_fill(torch.arange(k.shape[1]) > pos[..., None], -torch.inf).topk(BEST_KEYS, dim=-1).indices


def compose(choice, lie=None):
    """The program of these choices: a `Spelling`, or a `NearMiss` where `lie` names one of `LIES`."""
    choice = settled(choice, NEEDS.get(lie, {}))
    if choice["form"] == "own heads":
        choice = settled(choice, MASKED)
    if choice["scale"] == "behind the mask":
        # The lowest number times a scale is no longer the lowest.
        choice = settled(choice, {"hidden": {"lowest": "masked_fill"}})
    if choice["kept"] in WRAPPING:
        choice = settled(choice, {"chosen": {"given": "given with marks"}})
    if choice["kept"] in KEEPS:
        choice = settled(choice, {"chosen": {"given with marks": "given"}})
    attention, is_given = Attention(choice, lie), choice["chosen"] != "by an indexer"

    def drawn(pos, *operands):
        chosen = operands[0] if is_given else choose(*operands[:3], pos)
        return attention(operands[1 if is_given else 3 :], chosen, pos)

    return record(drawn, "sparse_flash_attention", choice, facts_of(choice), lie, LIES)


def facts_of(choice):
    """How to call the drawn function and how to judge it."""
    names, options = FORMS[choice["form"]]
    is_given = choice["chosen"] != "by an indexer"
    return {
        "arguments": ("pos", *(("chosen",) if is_given else ("index_q", "index_k", "index_w")), *names),
        "results": ("out",),
        "options": options | {"scale": SCALE},
        "counts": {"sparse_flash_attention": 1} | ({} if is_given else {"lightning_indexer": 1}),
    }


spellings, near_misses = strategies(compose, AXES, LIES)
