"""Random routed experts (K3.1 spec 2.18 and 3.6), and random near misses with exactly one lie, put together from axes.

`spellings` and `near_misses` are hypothesis strategies; `compose` makes one program of named choices.
"""

import torch
import torch.nn.functional as F
from drawing import record, settled, strategies
from operands import ROUTED

# Names of the matrices' operands; whether gate and up are one, whether [in, out].
STORED = {
    "packed": (("gate_up", "down"), True, False),
    "three": (("gate", "up", "down"), False, False),
    "packed, turned": (("gate_up_io", "down_io"), True, True),
    "three, turned": (("gate_io", "up_io", "down_io"), False, True),
    "packed lists": (("gate_up_list", "down_list"), True, False),
    "three lists": (("gate_list", "up_list", "down_list"), False, False),
}


def bounded(x, bound):
    """Straight near 0, never beyond the bound."""
    return bound * torch.tanh(x / bound)


# What stands between the projections, and the definition's options.
ACTIVATIONS = {
    "situ": (lambda g, u: bounded(g, 4.0) * torch.sigmoid(g) * bounded(u, 25.0), {}),
    "situ, turned": (lambda g, u: bounded(u, 25.0) * (g.sigmoid() * (4.0 * (0.25 * g).tanh())), {}),
    "situ, one bound": (lambda g, u: bounded(g, 4.0) * u / (1 + torch.exp(-g)), {"linear_beta": None}),
    "silu": (lambda g, u: F.silu(g) * u, {"activation": "swiglu"}),
    "silu written out": (lambda g, u: u * g * g.sigmoid(), {"activation": "swiglu"}),
}


def times_by_einsum(matrices, x):
    """[.., out, in] and [.., in] -> [.., out]."""
    return torch.einsum("...oi,...i->...o", matrices, x)


def times_by_matmul(matrices, x):
    """The same by a column."""
    return (matrices @ x.unsqueeze(-1)).squeeze(-1)


def times_by_row(matrices, x):
    """The same by a row."""
    return torch.matmul(x.unsqueeze(-2), matrices.mT).squeeze(-2)


def times_by_bmm(matrices, x):
    """The same with all in front as one batch."""
    lead = torch.broadcast_shapes(matrices.shape[:-2], x.shape[:-1])
    rows = x.expand(*lead, -1).reshape(-1, x.shape[-1], 1)
    stack = matrices.expand(*lead, -1, -1).reshape(-1, *matrices.shape[-2:])
    return torch.bmm(stack, rows).view(*lead, -1)


# For matrices that differ from row to row, and for one matrix.
TIMES = {
    "einsum": (times_by_einsum, lambda matrix, x: torch.einsum("oi,ni->no", matrix, x)),
    "matmul": (times_by_matmul, lambda matrix, x: F.linear(x, matrix)),
    "row": (times_by_row, lambda matrix, x: x @ matrix.mT),
    "bmm": (times_by_bmm, lambda matrix, x: torch.mm(matrix, x.T).T),
}
WAYS = ("gathered", "index_select", "slot by slot", "all and gathered", "shares", "one hot", "loop", "stacked")

AXES = {
    "stored": tuple(STORED),
    "activation": tuple(ACTIVATIONS),
    "way": WAYS,
    "times": tuple(TIMES),
    "weighed": ("behind", "inside"),
    "summed": ("sum", "einsum", "matmul"),
    "halves": ("chunk", "split", "slices"),
    "length": (7, 1, 5),
}

# Each lie, from which other operands the operator could serve it all the same, and what it gets right anyway.
LIES = {
    "gate and up exchanged": ("gate_proj and up_proj exchanged", ()),
    "down of the next expert": ("down_proj rolled by one expert", ()),
    "gate without sigmoid": ("", ()),
    "gelu gate": ("", ()),
    "relu behind the activation": ("", ()),
    "straight half and one": ("", ()),
    "halves clamped": ("", ()),
    "weight on the input": ("each pair as a token with one expert, summed behind it", ()),
    "last slot left out": ("its weight 0", ()),
    "weights of the next slot": ("the weights rolled", ()),
    "squared weights": ("the weights squared", ()),
    "largest slot wins": ("each pair as a token with one expert, the largest behind it", ()),
    "token kept beside": ("the result plus y", ()),
    "expert's number added": ("the result plus the weighted numbers of the experts", ()),
    "no activation": ("", ()),
}

# Which choices a lie cannot be told under, and what it is told under then.
BY_SLOT = {way: "gathered" for way in ("shares", "loop")}
NEEDS = {
    "weight on the input": {"way": {way: "gathered" for way in WAYS if way not in ("gathered", "index_select")}},
    "largest slot wins": {"way": BY_SLOT, "weighed": {"inside": "behind"}},
    "expert's number added": {"way": BY_SLOT, "weighed": {"inside": "behind"}},
}
PLAIN_STACKS = {"packed lists": "packed", "three lists": "three"}
OF_LISTS = {way: "loop" for way in WAYS if way not in ("loop", "stacked")}


class Experts:
    """The experts' weighted sum by the choices made, with at most one lie."""

    def __init__(self, choice, lie):
        self.choice, self.lie = choice, lie
        _, self.is_packed, self.is_turned = STORED[choice["stored"]]

    def halves(self, packed):
        """Gate and up of a packed product."""
        half = packed.shape[-1] // 2
        if self.choice["halves"] == "slices":
            return packed[..., :half], packed[..., half:]
        return packed.chunk(2, dim=-1) if self.choice["halves"] == "chunk" else packed.split(half, dim=-1)

    def product(self, stored, x):
        """A projection of x by matrices as they are stored."""
        times_many, times_one = TIMES[self.choice["times"]]
        times = times_one if stored.dim() == 2 else times_many
        return times(stored.mT if self.is_turned else stored, x)

    def inner(self, first, x):
        """Activated rows of x by gate and up matrices, however stored."""
        pair = self.halves(self.product(first[0], x)) if self.is_packed else [self.product(m, x) for m in first]
        g, u = reversed(pair) if self.lie == "gate and up exchanged" else pair
        return self.activate(g, u)

    def activate(self, g, u):
        """What goes to the down projection."""
        if self.lie == "gate without sigmoid":
            return bounded(g, 4.0) * bounded(u, 25.0)
        if self.lie == "gelu gate":
            return F.gelu(g) * u
        if self.lie == "straight half and one":
            u = u + 1
        if self.lie == "halves clamped":
            g, u = g.clamp(max=3.0), u.clamp(-3.0, 3.0)
        if self.lie == "no activation":
            return g * u
        inner = ACTIVATIONS[self.choice["activation"]][0](g, u)
        return inner.relu() if self.lie == "relu behind the activation" else inner

    def expert(self, first, down, x, share):
        """Rows of one or of many experts, weighed before or behind the down projection; share [.., 1]."""
        inner = self.inner(first, x)
        if self.choice["weighed"] == "inside":
            return self.product(down, inner * share)
        return self.product(down, inner) * share

    def rows_of_pairs(self, matrices, y, experts, weights):
        """[N, k, L] of fetched matrices."""

        def fetch(stack):
            if self.choice["way"] == "index_select":
                return stack.index_select(0, experts.reshape(-1)).view(*experts.shape, *stack.shape[1:])
            return stack[experts]

        *first, down = (fetch(stack) for stack in matrices)
        rows, share = y.unsqueeze(1), weights.unsqueeze(-1)
        if self.lie == "weight on the input":
            return self.expert(first, down, rows * share, torch.ones_like(share))
        return self.expert(first, down, rows, share)

    def rows_of_slots(self, matrices, y, experts, weights):
        """The same, one slot after another."""
        slots = []
        for slot in range(experts.shape[1]):
            *first, down = (stack[experts[:, slot]] for stack in matrices)
            slots.append(self.expert(first, down, y, weights[:, slot, None]))
        return torch.stack(slots, dim=1)

    def rows_one_hot(self, matrices, y, experts, weights):
        """The same by dense tensors of zeros and ones."""
        hot = F.one_hot(experts, ROUTED).to(y.dtype)
        *first, down = (torch.einsum("nke,eab->nkab", hot, stack) for stack in matrices)
        return self.expert(first, down, y.unsqueeze(1), weights.unsqueeze(-1))

    def rows_of_all(self, matrices, y, experts, weights):
        """The same, all experts on all tokens first and the chosen rows gathered."""
        *first, down = matrices
        if self.choice["way"] == "stacked":
            each = zip(zip(*first, strict=True), down, strict=True)
            every = torch.stack([self.product(d, self.inner(f, y)) for f, d in each], dim=1)
        else:
            every = self.product(down, self.inner(first, y.unsqueeze(1)))
        chosen = every.gather(1, experts.unsqueeze(-1).expand(-1, -1, every.shape[-1]))
        return chosen * weights.unsqueeze(-1)

    def summed(self, rows, experts, weights):
        """[N, L] of [N, k, L]."""
        if self.lie == "expert's number added":
            rows = rows + (experts * weights).unsqueeze(-1)
        if self.lie == "largest slot wins":
            return rows.amax(1)
        if self.choice["summed"] == "einsum":
            return torch.einsum("nkl->nl", rows)
        if self.choice["summed"] == "matmul":
            return (rows.new_ones(1, rows.shape[1]) @ rows).squeeze(1)
        return rows.sum(dim=1)

    def shared(self, matrices, y, experts, weights):
        """All experts on all tokens, each by its share."""
        *first, down = matrices
        share = (F.one_hot(experts, ROUTED) * weights.unsqueeze(-1)).sum(1)
        return self.expert(first, down, y.unsqueeze(1), share.unsqueeze(-1)).sum(1)

    def looped(self, matrices, y, experts, weights):
        """The same, one expert after another."""
        *first, down = matrices
        out = torch.zeros_like(y)
        for e in range(ROUTED):
            share = (weights * (experts == e)).sum(-1, keepdim=True)
            out = out + self.expert([stack[e] for stack in first], down[e], y, share)
        return out

    def __call__(self, y, experts, weights, matrices):
        """The sum of the experts of each row of y."""
        if self.lie == "last slot left out":
            experts, weights = experts[:, :-1], weights[:, :-1]
        if self.lie == "weights of the next slot":
            weights = weights.roll(1, -1)
        if self.lie == "squared weights":
            weights = weights.square()
        if self.lie == "down of the next expert":
            *first, down = matrices
            matrices = [*first, down[1:] + down[:1] if isinstance(down, list) else down.roll(-1, 0)]
        way = self.choice["way"]
        whole = {"shares": self.shared, "loop": self.looped}
        if way in whole:
            out = whole[way](matrices, y, experts, weights)
        else:
            by_rows = {"slot by slot": self.rows_of_slots, "one hot": self.rows_one_hot}
            by_rows |= {"all and gathered": self.rows_of_all, "stacked": self.rows_of_all}
            rows = by_rows.get(way, self.rows_of_pairs)(matrices, y, experts, weights)
            out = self.summed(rows, experts, weights)
        return out + y if self.lie == "token kept beside" else out


def compose(choice, lie=None):
    """The program of these choices: a `Spelling`, or a `NearMiss` where `lie` names one of `LIES`."""
    needs = NEEDS.get(lie, {})
    lists = choice["stored"] in PLAIN_STACKS
    choice = settled(choice, {"way": OF_LISTS} if lists else {})
    choice = settled(
        choice, needs | ({"stored": PLAIN_STACKS} if lists and choice["way"] in needs.get("way", {}) else {})
    )
    if choice["way"] in ("all and gathered", "stacked"):
        choice = settled(choice, {"weighed": {"inside": "behind"}})
    layer = Experts(choice, lie)

    def drawn(y, experts, weights, *matrices):
        return layer(y, experts, weights, matrices)

    return record(drawn, "grouped_experts", choice, facts_of(choice), lie, LIES)


def facts_of(choice):
    """How to call the drawn function and how to judge it."""
    return {
        "arguments": ("y", "experts", "weights", *STORED[choice["stored"]][0]),
        "results": ("z",),
        "options": ACTIVATIONS[choice["activation"]][1],
    }


spellings, near_misses = strategies(compose, AXES, LIES)
