"""Run a traced graph on real values and keep what a check compares."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from k31compile.graph.evaluate import raised

ATEN = torch.ops.aten
CHOICES = {ATEN.topk.default, ATEN.sort.default, ATEN.sort.stable, ATEN.argsort.default, ATEN.argsort.stable}
"""Operators whose result jumps where their input barely moves."""


@dataclass(frozen=True)
class Call:
    """One call of a k31 operator: what it got and what it gave."""

    node: fx.Node
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any


class Recorder(fx.Interpreter):
    """Runs a graph in its own dtype; keeps the wanted values, the choices and the calls of k31 operators."""

    def __init__(self, module: fx.GraphModule, wanted: Collection[str]) -> None:
        super().__init__(module)
        self.wanted = wanted
        self.values: dict[str, torch.Tensor] = {}
        self.choices: dict[str, torch.Tensor] = {}
        self.calls: list[Call] = []
        self.node: fx.Node | None = None

    def run_node(self, n: fx.Node) -> Any:
        """Run one node and keep its value where it is wanted."""
        self.node = n
        result = super().run_node(n)
        if n.name in self.wanted and isinstance(result, torch.Tensor):
            self.values[n.name] = result.detach().clone()  # the final copies would write through a view
        return result

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Run one operator and keep choices and calls."""
        result = super().call_function(target, args, kwargs)
        assert self.node is not None
        if target in CHOICES:
            self.choices[self.node.name] = result if isinstance(result, torch.Tensor) else result[1]
        if str(target).startswith("k31."):
            self.calls.append(Call(self.node, args, dict(kwargs), result))
        return result


class Gold(Recorder):
    """Runs a graph in float64, choosing as another run has chosen.

    Scores that differ by rounding select other keys or experts, and all that follows differs by more than rounding.
    So a run is compared with the float64 run that makes *its* choices, and the choices are judged on their own.
    `scores` keeps what each choice was made from.
    """

    def __init__(self, module: fx.GraphModule, wanted: Collection[str], forced: Mapping[str, torch.Tensor]) -> None:
        super().__init__(module, wanted)
        self.forced = forced
        self.scores: dict[str, torch.Tensor] = {}

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Run one operator with every float raised to float64."""
        args, kwargs = raised(args), raised(kwargs)
        assert self.node is not None
        forced = self.forced.get(self.node.name)
        if target in CHOICES:
            self.scores[self.node.name] = args[0]
        if forced is not None:
            if target in (ATEN.argsort.default, ATEN.argsort.stable):
                return forced
            return args[0].gather(_dim_of(target, args, kwargs), forced), forced
        return raised(super().call_function(target, args, kwargs))


def _dim_of(target: Any, args: Any, kwargs: Any) -> int:
    at = {ATEN.topk.default: 2, ATEN.sort.default: 1}.get(target)
    if "dim" in kwargs or at is None:
        return int(kwargs.get("dim", -1))
    return int(args[at]) if len(args) > at else -1


def mutated(module: fx.GraphModule) -> dict[str, str]:
    """The inputs that a graph overwrites at its end: name of the placeholder -> name of the value."""
    copies = module.graph.find_nodes(op="call_function", target=ATEN.copy_.default)
    return {copy.args[0].name: copy.args[1].name for copy in copies if copy.args[0].op == "placeholder"}


def own_inputs(module: fx.GraphModule, inputs: Sequence[Any]) -> list[Any]:
    """The inputs with a copy of each that the graph overwrites, so that every run starts from the same ones."""
    written = mutated(module)
    places = module.graph.find_nodes(op="placeholder")
    return [
        value.clone() if place.name in written and isinstance(value, torch.Tensor) else value
        for place, value in zip(places, inputs, strict=True)
    ]
