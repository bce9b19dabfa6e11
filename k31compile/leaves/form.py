"""What a function was confirmed to be: which operator, which parameter is which operand, and for which calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import fx

from k31compile.graph.layout import Layout
from k31compile.graph.sizes import hint
from k31compile.leaves.call import Call
from k31compile.passes.recognise.delta_reading import DeltaOperands
from k31compile.passes.recognise.operands import Dense, Values

ROLES = ("query", "key", "value", "gate", "beta", "state")
OPERATORS = ("gated_delta_chunk", "gated_delta_recurrent", "kda_chunk", "kda_recurrent")


@dataclass(frozen=True)
class Operand:
    """A parameter as an operand: its layout, and what the function does to it before the rule.

    With `eps` rows are divided by `sqrt(sum of squares + eps)`, with `floored` by `max(norm, eps)` instead. Heads are
    repeated `repeat` times; letter n of the layout is then the number before that.
    """

    name: str
    rank: int
    letters: str
    dims: tuple[int | None, ...]
    eps: float | None = None
    floored: bool = False
    repeat: int = 1

    @property
    def layout(self) -> Layout:
        """Which dimension is which letter."""
        return Layout(self.letters, self.dims)


@dataclass(frozen=True)
class Result:
    """A returned tensor: where it stands in what is returned, its layout, its type, and how it lies in memory."""

    index: int
    rank: int
    letters: str
    dims: tuple[int | None, ...]
    dtype: str
    order: tuple[int, ...]

    @property
    def layout(self) -> Layout:
        """Which dimension is which letter."""
        return Layout(self.letters, self.dims)

    def placed(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor with its dimensions in memory in the author's order."""
        inverse = [self.order.index(d) for d in range(self.rank)]
        return tensor.permute(self.order).contiguous().permute(inverse)


@dataclass(frozen=True)
class Evidence:
    """What a confirmation ran."""

    samples: int
    lengths: tuple[int, ...]
    worst_error: float


@dataclass(frozen=True)
class Form:
    """A function read as an operator, for calls of one key (see `Call.key`) with these sizes K and V.

    Attributes:
        operator: a name of `k31compile.options.FUSIONS`.
        operands: role -> parameter.
        out, final: the output, and the state after the last token where it is returned.
        container: "tensor", or "tuple" or "list" of `width` values, those of no result None.
        exponent: gates count in units of it; ln 2 for a function that takes powers of two.
        scale: factor on the output.
        shortest, step: lengths from `shortest` on that are a multiple of `step`; `only` is the one length otherwise.

    """

    operator: str
    operands: Mapping[str, Operand]
    out: Result
    final: Result | None
    container: str
    width: int
    exponent: float
    scale: float
    k: int
    v: int
    shortest: int = 1
    step: int = 1
    only: int | None = None
    evidence: Evidence = Evidence(0, (), 0.0)

    def fits(self, call: Call) -> bool:
        """Whether a call with the same key has sizes for which this was confirmed.

        Symbolic sizes that have to agree are guarded as agreeing, as tracing into the function would do.
        """
        if {operand.name for operand in self.operands.values()} != set(call.tensors):
            return False
        known: dict[str, Any] = {"k": self.k, "v": self.v}
        for operand in self.operands.values():
            shape = call.tensors[operand.name].shape
            if len(shape) != operand.rank:
                return False
            for letter in operand.letters:
                size = operand.layout.size(letter, shape)
                if letter == "n":
                    letter, size = "h", size * operand.repeat
                if not _same(size, known.setdefault(letter, size)):
                    return False
        return self._serves(known["t"])

    def _serves(self, length: Any) -> bool:
        if isinstance(length, torch.SymInt):
            # A symbolic size is at least 2, or it would have been a number.
            return self.only is None and self.step == 1 and self.shortest <= 2 and length.node.hint is not None
        if self.only is not None:
            return bool(length == self.only)
        return bool(length >= self.shortest and length % self.step == 0)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Form:
        """The inverse of `to_dict`; raises KeyError, TypeError or ValueError on anything else."""
        values = dict(data)
        values["operands"] = {role: Operand(**_with_tuples(part)) for role, part in values["operands"].items()}
        for name in ("out", "final"):
            values[name] = None if values[name] is None else Result(**_with_tuples(values[name]))
        values["evidence"] = Evidence(**_with_tuples(values["evidence"]))
        form = Form(**values)
        roles = set(form.operands)
        if roles not in (set(ROLES), set(ROLES) - {"state"}) or form.operator not in OPERATORS:
            raise ValueError(f"{form.operator} of {sorted(roles)}")
        return form

    def with_scale(self, scale: float) -> Form:
        """The same with another factor on the output."""
        return replace(self, scale=scale)


def _same(left: Any, right: Any) -> bool:
    """Whether two sizes are one; a guard is added only where they are, as hints tell."""
    if any(isinstance(size, torch.SymInt) and size.node.hint is None for size in (left, right)):
        return left is right
    return left is right or (hint(left) == hint(right) and bool(left == right))


def _with_tuples(part: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in part.items()}


@dataclass(frozen=True)
class Prepared(Dense):
    """A leaf that is normalised, and whose heads are repeated, before it is the operand."""

    eps: float | None = None
    floored: bool = False
    repeat: int = 1

    def canonical(self, values: Values) -> torch.Tensor:
        """The operand as the rule sees it."""
        rows = super().canonical(values)
        if self.eps is not None:
            rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
            if self.floored:
                rows = rows / rows.square().sum(-1, keepdim=True).sqrt().clamp_min(self.eps)
            else:
                rows = rows / (rows.square().sum(-1, keepdim=True) + self.eps).sqrt()
        return rows.repeat_interleave(self.repeat, dim=2) if self.repeat > 1 else rows


def leaf_nodes(names_and_ranks: Mapping[str, int]) -> dict[str, fx.Node]:
    """A node for each parameter, as readings want them."""
    graph = fx.Graph()
    nodes = {name: graph.placeholder(name) for name in names_and_ranks}
    for name, node in nodes.items():
        node.meta["val"] = torch.empty((1,) * names_and_ranks[name], device="meta")
    return nodes


def result_node(result: Result, nodes: Mapping[str, fx.Node]) -> fx.Node:
    """A node for a returned tensor."""
    graph = next(iter(nodes.values())).graph
    node = graph.placeholder(f"result_{result.index}")
    node.meta["val"] = torch.empty((1,) * result.rank, dtype=getattr(torch, result.dtype), device="meta")
    return node


def delta_operands(form: Form, nodes: Mapping[str, fx.Node]) -> DeltaOperands:
    """The operands of a form over these nodes."""

    def dense(role: str) -> Dense:
        operand = form.operands[role]
        return Prepared(nodes[operand.name], operand.layout, operand.eps, operand.floored, operand.repeat)

    query, key, value, gate, beta = (dense(role) for role in ROLES[:5])
    state = dense("state") if "state" in form.operands else None
    final = form.final.layout if form.final else None
    return DeltaOperands(query, key, value, gate, beta, state, form.out.layout, final)


def packed(form: Form, out: torch.Tensor, final: torch.Tensor | None) -> Any:
    """What the function returns, of the output and the state."""
    if form.container == "tensor":
        return out
    values: list[torch.Tensor | None] = [None] * form.width
    values[form.out.index] = out
    if form.final is not None:
        values[form.final.index] = final
    return tuple(values) if form.container == "tuple" else values


def unpacked(form: Form, result: Any) -> list[torch.Tensor]:
    """Output and state, where there is one, of what the function returned."""
    if form.container == "tensor":
        return [result]
    return [result[form.out.index]] + ([result[form.final.index]] if form.final else [])
