"""Random chunk forms of the delta rule, and random near misses with exactly one lie, put together from axes.

`spellings` and `near_misses` are hypothesis strategies; `compose` makes one program of named choices.
"""

import torch
import torch.nn.functional as F
from drawing import record, strategies
from generate import gather
from operands import LOG2E, K


def pairs_on_five_axes(left, k, g, power):
    """[.., C, C]: left_i . k_j decayed from j to i, the decays masked before the exponential."""
    c = g.shape[-2]
    gap = g.unsqueeze(-2) - g.unsqueeze(-3)
    gap = gap.masked_fill(torch.ones(c, c, dtype=torch.bool).triu(1).unsqueeze(-1), -torch.inf)
    return (left.unsqueeze(-2) * k.unsqueeze(-3) * power(gap)).sum(-1)


def pairs_by_columns(left, k, g, power):
    """The same, a column at a time; what lies above the diagonal is dropped afterwards."""
    columns = []
    for j in range(g.shape[-2]):
        gap = (g - g[..., j : j + 1, :]).clamp(max=0)
        columns.append(torch.einsum("...id,...d->...i", left * power(gap), k[..., j, :]))
    return torch.stack(columns, dim=-1).tril()


def pairs_in_two_factors(left, k, g, power):
    """The same as one product, both factors measured from the middle row of the chunk."""
    middle = g[..., g.shape[-2] // 2, :].unsqueeze(-2)
    return ((left * power(g - middle)) @ (k * power(middle - g)).transpose(-1, -2)).tril()


def solve_by_rows(lower, right):
    """(I + L)^-1 R, one row after another, written in place."""
    solved = right.clone()
    for i in range(1, lower.shape[-1]):
        solved[..., i, :] = right[..., i, :] - (lower[..., i, :i].unsqueeze(-2) @ solved[..., :i, :]).squeeze(-2)
    return solved


def solve_triangular(lower, right):
    """The same by the library."""
    return torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)


def solve_by_inverse(lower, right):
    """The same by the inverse of a matrix."""
    return torch.linalg.inv(torch.eye(lower.shape[-1], dtype=lower.dtype) + lower) @ right


def solve_by_powers(lower, right):
    """The same by (I - L)(I + L^2)(I + L^4)..., for L has no power beyond its size."""
    power, known = -lower, 1
    inverse = torch.eye(lower.shape[-1], dtype=lower.dtype) + power
    while 2 * known < lower.shape[-1]:
        power, known = power @ power, 2 * known
        inverse = inverse + inverse @ power
    return inverse @ right


PAIRS = {"five axes": pairs_on_five_axes, "columns": pairs_by_columns, "two factors": pairs_in_two_factors}
SOLVERS = {
    "rows": solve_by_rows,
    "triangular": solve_triangular,
    "inverse": solve_by_inverse,
    "powers": solve_by_powers,
}
AXES = {
    "layout": ("bthd", "bhtd"),
    "state": ("kv", "vk"),
    "decay": ("exp", "exp2"),
    "pairs": tuple(PAIRS),
    "solver": tuple(SOLVERS),
    "beta": ("on the rows", "on key and value"),
    "erased": ("before the solve", "after it"),
    "scale": ("none", "on q", "on o"),
    "start": (True, False),
    "final": (True, False),
    "output": ("stacked", "joined"),
    "length": (32, 37, 48),
}
CHUNK = 16

# Each lie, from which other operands the operator could serve it all the same, and what it gets right anyway.
LIES = {
    "the token before is not erased": ("", ()),
    "a token does not see itself": ("", ("state",)),
    "erases nothing of earlier chunks": ("", ()),
    "forgets nothing between chunks": ("", ()),
    "keys are not decayed to the end": ("", ()),
    "queries are not decayed from the start": ("", ("state",)),
    "pairs by the query": ("", ()),
    "beta twice": ("beta = its square", ()),
    "decay squared": ("gate = 2 g", ()),
}


class Chunk:
    """One chunk by the choices made, with at most one lie."""

    def __init__(self, choice, lie):
        self.choice, self.lie = choice, lie
        self.power = torch.exp if choice["decay"] == "exp" else torch.exp2

    def pairs(self, left, k, g):
        """What `left` sees of the keys before it."""
        return PAIRS[self.choice["pairs"]](left, k, g, self.power)

    def fresh(self, s, q, k, v, g, beta):
        """What each token writes, [.., C, V]: (I + L)^-1 beta (V - decayed K S)."""
        left = q if self.lie == "pairs by the query" else k
        early = self.choice["beta"] == "on key and value"
        lower = self.pairs(beta * left, k, g) if early else beta * self.pairs(left, k, g)
        lower = lower.tril(-2 if self.lie == "the token before is not erased" else -1)
        solve = SOLVERS[self.choice["solver"]]
        if self.lie == "erases nothing of earlier chunks":
            return solve(lower, beta * v)
        strong = beta * k * self.power(g)
        if self.choice["erased"] == "before the solve":
            return solve(lower, beta * v - strong @ s)
        return solve(lower, beta * v) - solve(lower, strong) @ s

    def __call__(self, s, q, k, v, g, beta):
        """The outputs of a chunk and the state after it; all of [B, H, C, d], the state [B, H, K, V]."""
        if self.lie == "beta twice":
            beta = beta * beta
        if self.lie == "decay squared":
            g = 2 * g
        g = g.cumsum(-2)
        fresh = self.fresh(s, q, k, v, g, beta)
        seen = self.pairs(q, k, g)
        seen = seen.tril(-1) if self.lie == "a token does not see itself" else seen
        read = q if self.lie == "queries are not decayed from the start" else q * self.power(g)
        last = g[..., -1:, :]
        kept = s if self.lie == "forgets nothing between chunks" else s * self.power(last).transpose(-1, -2)
        written = k if self.lie == "keys are not decayed to the end" else k * self.power(last - g)
        return read @ s + seen @ fresh, kept + written.transpose(-1, -2) @ fresh


def compose(choice, lie=None):
    """The program of these choices: a `Spelling`, or a `NearMiss` where `lie` names one of `LIES`."""
    chunk = Chunk(choice, lie)

    def drawn(q, k, v, beta, gate, *states):
        beta = beta.unsqueeze(-1)
        gate = gate if choice["decay"] == "exp" else gate * LOG2E
        tensors = [q * K**-0.5 if choice["scale"] == "on q" else q, k, v, gate, beta]
        if choice["layout"] == "bthd":
            tensors = [x.transpose(1, 2) for x in tensors]
        length = tensors[0].shape[2]
        tensors = [F.pad(x, (0, 0, 0, -length % CHUNK)) for x in tensors]
        s = states[0] if states else k.new_zeros(*tensors[0].shape[:2], k.shape[-1], v.shape[-1])
        s = s.transpose(-1, -2) if states and choice["state"] == "vk" else s
        outs = []
        for part in zip(*(x.split(CHUNK, 2) for x in tensors), strict=True):
            o, s = chunk(s, *part)
            outs.append(o)
        o = torch.cat(outs, 2) if choice["output"] == "joined" else gather("stacked", outs, 2).flatten(2, 3)
        o = o[:, :, :length]
        o = o.transpose(1, 2) if choice["layout"] == "bthd" else o
        o = o / K**0.5 if choice["scale"] == "on o" else o
        s = s.transpose(-1, -2) if choice["state"] == "vk" else s
        return (o, s) if choice["final"] else o

    return record(drawn, "kda_chunk", choice, facts_of(choice), lie, LIES)


def facts_of(choice):
    """How to call the drawn function and how to judge it."""
    layout = "_bhtd" if choice["layout"] == "bhtd" else ""
    state = "_vk" if choice["state"] == "vk" else ""
    start = (f"s0{state}",) if choice["start"] else ()
    return {
        "arguments": (*(f"{name}{layout}" for name in ("q", "k", "v", "beta", "g")), *start),
        "results": (f"o{layout}", f"state{state}")[: 1 + choice["final"]],
        "options": {"scaled": choice["scale"] != "none", "start": choice["start"]},
    }


spellings, near_misses = strategies(compose, AXES, LIES)
