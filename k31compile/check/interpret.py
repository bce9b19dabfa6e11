"""Run a traced graph on real values and keep what a check compares."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

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
        self._written = mutated(module)
        self._overwritten: set[int] = set()

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Take an input, and remember the memory of one that the graph overwrites at its end."""
        value = super().placeholder(target, args, kwargs)
        assert self.node is not None
        if self.node.name in self._written and isinstance(value, torch.Tensor):
            self._overwritten.add(_memory(value))
        return value

    def run_node(self, n: fx.Node) -> Any:
        """Run one node and keep its value where it is wanted."""
        self.node = n
        result = super().run_node(n)
        if n.name in self.wanted and isinstance(result, torch.Tensor):
            self.values[n.name] = result.detach().clone()  # the final copies would write through a view
        return result

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Run one operator and keep choices and calls."""
        is_ours = str(target).startswith("k31.")
        # Calls are judged after the run: what the end of the graph writes over must be kept as the call saw it.
        seen: tuple[Any, Any] = pytree.tree_map(self._kept, (args, kwargs)) if is_ours else (args, kwargs)
        result = super().call_function(target, args, kwargs)
        assert self.node is not None
        if target in CHOICES:
            self.choices[self.node.name] = result if isinstance(result, torch.Tensor) else result[1]
        if is_ours:
            self.calls.append(Call(self.node, seen[0], dict(seen[1]), result))
        return result

    def _kept(self, value: Any) -> Any:
        shared = isinstance(value, torch.Tensor) and _memory(value) in self._overwritten
        return value.clone() if shared else value


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


def _memory(value: torch.Tensor) -> int:
    """The memory that a tensor shares with its views."""
    return value.untyped_storage().data_ptr()


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
