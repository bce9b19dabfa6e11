"""A form as a reading: its samples, the definition that it is compared with, and the program that replaces a call."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

import k31compile.kernels  # noqa: F401  (registers the operators)
from k31compile.graph.region import Region
from k31compile.graph.sizes import Substitution
from k31compile.leaves.call import Call, Tensors, run_in_float64
from k31compile.leaves.form import Form, delta_operands, leaf_nodes, packed, result_node, unpacked
from k31compile.passes.recognise.delta_reading import DeltaReading
from k31compile.passes.recognise.gates import GateForm
from k31compile.passes.recognise.operands import Values

Memo = dict[object, Any]


class CalledReading(DeltaReading):
    """A function that is called, where a region would be run node by node; samples and judgement are the same."""

    def __init__(self, form: Form, call: Call | None = None, memo: Memo | None = None) -> None:
        """A form, not yet confirmed where a call is given; `memo` is shared by readings of one call."""
        self.form, self.call, self.calls = form, call, {} if memo is None else memo
        ranks = {operand.name: operand.rank for operand in form.operands.values()}
        nodes = leaf_nodes({name: ranks[name] for name in sorted(ranks)})
        outputs = [result_node(form.out, nodes)] + ([result_node(form.final, nodes)] if form.final else [])
        region = Region(tuple(nodes.values()), tuple(outputs), ())
        super().__init__(form.operator, region, delta_operands(form, nodes), GateForm(form.exponent), {})
        self.learned = form.scale or None

    def at(self, batch: int, length: int, heads: int) -> CalledReading:
        """Take these sizes; K and V are those of the call."""
        self._letters = {"b": batch, "t": length, "h": heads, "k": self.form.k, "v": self.form.v}
        repeat = max(operand.repeat for operand in self.form.operands.values())
        self._letters["n"] = heads // repeat
        return self

    def letters(self, wanted: str) -> dict[str, int]:
        """The sizes of some letters."""
        return {letter: self._letters[letter] for letter in wanted}

    def run(self, sample: Values, substitution: Substitution, trial: int) -> Sequence[torch.Tensor]:
        """What the function gives on a sample, in float64; what it gave on the same values before."""
        assert self.call is not None
        values = by_name(sample)
        key = tuple((name, tuple(value.shape), _digest(value)) for name, value in sorted(values.items()))
        if key not in self.calls:
            self.calls[key] = run_in_float64(self.call, values)
        return unpacked(self.form, self.calls[key])

    def program(self, tensors: Tensors) -> Any:
        """What the function returns, by the operator."""
        out, *final = self.build(*(tensors[leaf.name] for leaf in self.region.leaves))
        state = self.form.final.placed(final[0]) if self.form.final else None
        return packed(self.form, self.form.out.placed(out), state)


def by_name(sample: Values) -> dict[str, torch.Tensor]:
    """A sample by parameter."""
    return {leaf.name: value for leaf, value in sample.items()}


def _digest(value: torch.Tensor) -> str:
    return hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest()
