"""Random gated RMS norms (K3.1 spec 2.3 and 3.8), and random near misses with exactly one lie, put together from axes.

`spellings` and `near_misses` are hypothesis strategies; `compose` makes one program of named choices.
"""

import torch
import torch.nn.functional as F
from drawing import record, settled, strategies
from operands import EPS

# The mean square of rows [.., V], with the last axis kept.
MEANS = {
    "pow": lambda x: x.pow(2).mean(-1, keepdim=True),
    "square": lambda x: x.square().mean(dim=-1, keepdim=True),
    "product": lambda x: torch.mean(x * x, -1, True),
    "sum": lambda x: torch.sum(x * x, dim=-1, keepdim=True) / x.shape[-1],
    "vector_norm": lambda x: torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() / x.shape[-1],
}

# The row by its mean square.
DIVISIONS = {
    "rsqrt": lambda x, mean: x * torch.rsqrt(mean + EPS),
    "method": lambda x, mean: (mean + EPS).rsqrt() * x,
    "root": lambda x, mean: x / torch.sqrt(mean + EPS),
    "reciprocal": lambda x, mean: x * (1 / (mean + EPS).sqrt()),
    "power": lambda x, mean: x * torch.pow(mean.add(EPS), -0.5),
}

# What opens, and whether it is SiLU.
GATES = {
    "sigmoid": (torch.sigmoid, False),
    "written out": (lambda gate: 1.0 / (1.0 + torch.exp(-gate)), False),
    "silu": (F.silu, True),
    "silu written out": (lambda gate: gate * gate.sigmoid(), True),
    "silu by a quotient": (lambda gate: gate / (1 + (-gate).exp()), True),
}

AXES = {
    "layout": ("heads", "flat", "rows"),
    "mean": tuple(MEANS),
    "divided": tuple(DIVISIONS),
    "gate": tuple(GATES),
    "place": ("behind", "in front"),
    "weight": ("plain", "less one", "with the gate"),
    "library": (False, True),
    "length": (7, 1),
}

# Each lie, from which other operands the operator could serve it all the same, and what it gets right anyway.
LIES = {
    "mean taken off": ("x less its mean", ()),
    "eps outside the root": ("", ()),
    "eps as a floor": ("", ()),
    "mean of magnitudes": ("", ()),
    "largest magnitude": ("", ()),
    "no root": ("", ()),
    "sum for mean": ("weight / sqrt(V) and eps / V", ()),
    "one mean for all heads": ("one head of H * V, the weight repeated", ()),
    "statistics of the gate": ("", ()),
    "tanh gate": ("", ()),
    "steeper gate": ("a steeper gate as its operand", ()),
    "gate less one half": ("", ()),
    "gate and row exchanged": ("x and gate exchanged", ()),
    "gate of the next head": ("the gate rolled", ()),
    "weight of the next channel": ("the weight rolled", ()),
    "weight and one more": ("the weight and one more", ()),
    "gate on the other side": ("norm_before_gate the other way", ()),
}

BY_HAND = {"library": {True: False}}
OF_HEADS = {"layout": {"rows": "heads"}}
# Which choices a lie cannot be told under, and what it is told under then.
NEEDS = {
    "eps outside the root": BY_HAND,
    "eps as a floor": BY_HAND,
    "mean of magnitudes": BY_HAND,
    "largest magnitude": BY_HAND,
    "no root": BY_HAND,
    "sum for mean": BY_HAND,
    "one mean for all heads": BY_HAND | OF_HEADS,
    "statistics of the gate": BY_HAND,
    "gate of the next head": OF_HEADS,
}


class Norm:
    """Gated rows of length one by the choices made, with at most one lie; everything [B, T, H, V]."""

    def __init__(self, choice, lie):
        self.choice, self.lie = choice, lie

    def normed(self, x, gate, weight):
        """The rows by their root mean square, weighed where a weight is given."""
        if self.lie == "mean taken off":
            x = x - x.mean(-1, keepdim=True)
        if self.choice["library"]:
            return F.rms_norm(x, (x.shape[-1],), weight, EPS)
        normed = self.divided(x, gate)
        return normed if weight is None else normed * weight

    def divided(self, x, gate):
        """The rows by their root mean square."""
        mean = MEANS[self.choice["mean"]]
        others = {
            "eps outside the root": lambda: x / (mean(x).sqrt() + EPS),
            "eps as a floor": lambda: x * torch.rsqrt(mean(x).clamp_min(EPS)),
            "mean of magnitudes": lambda: x / (x.abs().mean(-1, keepdim=True) + EPS),
            "largest magnitude": lambda: x / (x.abs().amax(-1, keepdim=True) + EPS),
            "no root": lambda: x / (mean(x) + EPS),
            "sum for mean": lambda: x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS),
            "one mean for all heads": lambda: x * torch.rsqrt(x.square().mean((-2, -1), keepdim=True) + EPS),
            "statistics of the gate": lambda: x * torch.rsqrt(mean(gate) + EPS),
        }
        if self.lie in others:
            return others[self.lie]()
        return DIVISIONS[self.choice["divided"]](x, mean(x))

    def opened(self, gate):
        """What the rows are multiplied with."""
        if self.lie == "gate of the next head":
            gate = gate.roll(1, -2)
        if self.lie == "steeper gate":
            gate = 1.702 * gate
        if self.lie == "tanh gate":
            return torch.tanh(gate)
        opened = GATES[self.choice["gate"]][0](gate)
        return opened - 0.5 if self.lie == "gate less one half" else opened

    def __call__(self, x, gate, weight):
        """The gated rows."""
        if self.choice["weight"] == "less one":
            weight = 1.0 + weight
        if self.lie == "weight of the next channel":
            weight = weight.roll(1, -1)
        if self.lie == "weight and one more":
            weight = weight + 1
        if self.lie == "gate and row exchanged":
            x, gate = gate, x
        in_front = (self.choice["place"] == "in front") != (self.lie == "gate on the other side")
        opened = self.opened(gate)
        if in_front:
            return self.normed(x * opened, gate, weight)
        if self.choice["weight"] == "with the gate":
            return opened * weight * self.normed(x, gate, None)
        return self.normed(x, gate, weight) * opened


def compose(choice, lie=None):
    """The program of these choices: a `Spelling`, or a `NearMiss` where `lie` names one of `LIES`."""
    choice = settled(choice, NEEDS.get(lie, {}))
    norm = Norm(choice, lie)

    def drawn(x, gate, weight):
        shape, size = x.shape, weight.shape[0]
        if choice["layout"] == "rows":
            return norm(x.reshape(-1, size), gate.reshape(-1, size), weight).view(shape)
        if choice["layout"] == "flat":
            return norm(x.unflatten(-1, (-1, size)), gate.unflatten(-1, (-1, size)), weight).flatten(-2)
        return norm(x, gate, weight)

    return record(drawn, "gated_rms_norm", choice, facts_of(choice), lie, LIES)


def facts_of(choice):
    """How to call the drawn function and how to judge it."""
    layout = "" if choice["layout"] == "heads" else "_flat"
    return {
        "arguments": (f"x{layout}", f"gate{layout}", "norm_weight"),
        "results": (f"y{layout}",),
        "options": {
            "activation": "silu" if GATES[choice["gate"]][1] else "sigmoid",
            "gate_first": choice["place"] == "in front",
            "one_more": choice["weight"] == "less one",
        },
    }


spellings, near_misses = strategies(compose, AXES, LIES)
