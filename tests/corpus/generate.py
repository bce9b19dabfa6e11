"""Random spellings of the delta rule, and random near misses with exactly one lie, put together from axes.

`spellings` and `near_misses` are hypothesis strategies; `compose` makes one program of named choices.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from drawing import record, strategies
from operands import LOG2E, LOWER_BOUND, K

# Names of operands, what is made of them before the loop, what is made of one token's row inside it.
DECAYS = {
    "exp inside": (("g",), lambda g, _: g, torch.exp),
    "exp before": (("g",), lambda g, _: g.exp(), lambda row: row),
    "exp2, scaled here": (("g",), lambda g, _: g * LOG2E, torch.exp2),
    "exp2, scaled outside": (("g_log2",), lambda bits, _: bits, torch.exp2),
    "bounded": (
        ("raw_g", "a_log", "dt_bias"),
        lambda raw, heads, a, bias: LOWER_BOUND * torch.sigmoid(heads(a.exp().unsqueeze(-1)) * (raw + heads(bias))),
        torch.exp,
    ),
    "softplus": (
        ("raw_g", "a_log", "dt_bias"),
        lambda raw, heads, a, bias: -heads(a.exp().unsqueeze(-1)) * F.softplus(raw + heads(bias)),
        torch.exp,
    ),
}

READS = {
    ("einsum", "kv"): lambda s, x: torch.einsum("bhkv,bhk->bhv", s, x),
    ("einsum", "vk"): lambda s, x: torch.einsum("bhvk,bhk->bhv", s, x),
    ("matmul", "kv"): lambda s, x: (x.unsqueeze(-2) @ s).squeeze(-2),
    ("matmul", "vk"): lambda s, x: (s @ x.unsqueeze(-1)).squeeze(-1),
    ("sum", "kv"): lambda s, x: (s * x.unsqueeze(-1)).sum(-2),
    ("sum", "vk"): lambda s, x: (s * x.unsqueeze(-2)).sum(-1),
}

WRITES = {
    "einsum": lambda s, left, right: s + torch.einsum("bhi,bhj->bhij", left, right),
    "broadcast": lambda s, left, right: s + left[..., :, None] * right[..., None, :],
    "addcmul": lambda s, left, right: torch.addcmul(s, left.unsqueeze(-1), right.unsqueeze(-2)),
    "matmul": lambda s, left, right: s + left.unsqueeze(-1) @ right.unsqueeze(-2),
}

AXES = {
    "layout": ("bthd", "bhtd"),
    "state": ("kv", "vk"),
    "decay": tuple(DECAYS),
    "read": ("einsum", "matmul", "sum"),
    "write": tuple(WRITES),
    "beta": ("on the delta", "on the key", "on value and key"),
    "scale": ("none", "on q", "on o"),
    "output": ("stacked", "filled", "joined"),
    "mended": (False, True),
    "length": (1, 4, 7),
}

# Each lie, from which other operands the operator could serve it all the same, and what it gets right anyway.
LIES = {
    "predicts before the decay": ("", ()),
    "decays after the write": ("gate of the token before, 0 at first; q and the state times the decay", ()),
    "reads before the write": ("", ("state",)),
    "forgets nothing": ("gate = 0", ()),
    "erases nothing": ("", ()),
    "predicts with the query": ("", ()),
    "keeps the prediction": ("beta = 1, value = beta times value", ()),
    "returns the state before": ("", ("o",)),
    "one gate a head": ("gate = log of the mean decay, for every channel", ()),
    "beta twice": ("beta = its square", ()),
    "decay squared": ("gate = 2 g", ()),
}


@dataclass(frozen=True)
class Step:
    """One token by the choices made, with at most one lie."""

    choice: Mapping
    lie: str | None

    def decay(self, row):
        """[B, H, K], as wide as the operator's gate but for a lie."""
        row = DECAYS[self.choice["decay"]][2](row)
        if self.lie == "one gate a head":
            row = row.mean(-1, keepdim=True)
        return row * row if self.lie == "decay squared" else row

    def decayed(self, s, decay):
        """The state times its decay along the key channels."""
        if self.lie == "forgets nothing":
            return s
        return s * decay.unsqueeze(-1 if self.choice["state"] == "kv" else -2)

    def read(self, s, x):
        """S' x."""
        return READS[self.choice["read"], self.choice["state"]](s, x)

    def write(self, s, k, u):
        """S + k u'."""
        left, right = (k, u) if self.choice["state"] == "kv" else (u, k)
        return WRITES[self.choice["write"]](s, left, right)

    def update(self, s, q, k, v, beta):
        """The key that is written and what is written to it."""
        key = q if self.lie == "predicts with the query" else k
        if self.lie == "beta twice":
            beta = beta * beta
        if self.lie == "erases nothing":
            return k, beta * v
        if self.lie == "keeps the prediction":
            return k, beta * v - self.read(s, key)
        if self.choice["beta"] == "on the delta":
            return k, beta * (v - self.read(s, key))
        if self.choice["beta"] == "on the key":
            return beta * k, v - self.read(s, key)
        return k, v * beta - self.read(s, key * beta)

    def __call__(self, s, q, k, v, beta, row):
        """The output of one token, the state after it, and the state that a liar would return."""
        decay = self.decay(row)
        kept = self.decayed(s, decay)
        early = self.lie in ("predicts before the decay", "decays after the write")
        key, u = self.update(s if early else kept, q, k, v, beta)
        if self.lie == "decays after the write":
            after = self.decayed(self.write(s, key, u), decay)
            return self.read(after, q), after, s
        after = self.write(kept, key, u)
        if self.lie == "reads before the write":
            return self.read(kept, q), after, s
        if self.choice["mended"]:
            return self.read(kept, q) + (q * key).sum(-1, keepdim=True) * u, after, s
        return self.read(after, q), after, s


def gather(output, rows, axis):
    """The outputs of all tokens as one tensor."""
    if output == "stacked":
        return torch.stack(rows, dim=axis)
    if output == "joined":
        return torch.cat([row.unsqueeze(axis) for row in rows], dim=axis)
    shape = list(rows[0].shape)
    shape.insert(axis, len(rows))
    filled = torch.zeros(shape, dtype=rows[0].dtype)
    for t, row in enumerate(rows):
        filled.select(axis, t).copy_(row)
    return filled


def compose(choice, lie=None):
    """The program of these choices: a `Spelling`, or a `NearMiss` where `lie` names one of `LIES`."""
    step, axis = Step(choice, lie), 1 if choice["layout"] == "bthd" else 2
    names, prepare, _ = DECAYS[choice["decay"]]

    def heads(x):
        """[H, n] beside [B, T, H, n] or [B, H, T, n]."""
        return x if axis == 1 else x.unsqueeze(1)

    def drawn(q, k, v, beta, s, gate, *parameters):
        rows, gates = [], prepare(gate, heads, *parameters)
        if choice["scale"] == "on q":
            q = q * K**-0.5
        for t in range(q.shape[axis]):
            tokens = (x.select(axis, t) for x in (q, k, v, beta.unsqueeze(-1), gates))
            o, s, before = step(s, *tokens)
            rows.append(o)
        o = gather(choice["output"], rows, axis)
        if choice["scale"] == "on o":
            o = o / K**0.5
        return o, before if lie == "returns the state before" else s

    return record(drawn, "kda_recurrent", choice, facts_of(choice, names), lie, LIES)


def facts_of(choice, gate_names):
    """How to call the drawn function and how to judge it."""
    layout = "_bhtd" if choice["layout"] == "bhtd" else ""
    state = "_vk" if choice["state"] == "vk" else ""
    gate = choice["decay"] if choice["decay"] in ("bounded", "softplus") else "given"
    laid_out = [f"{name}{layout}" for name in ("q", "k", "v", "beta")]
    return {
        "arguments": (*laid_out, f"s0{state}", f"{gate_names[0]}{layout}", *gate_names[1:]),
        "results": (f"o{layout}", f"state{state}"),
        "phase": "unrolled",
        "options": {"gate": gate, "scaled": choice["scale"] != "none"},
    }


spellings, near_misses = strategies(compose, AXES, LIES)
