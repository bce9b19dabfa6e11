"""The dynamic sizes of an entry: marked for Dynamo, and what it made of them as bounds and conditions."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from k31compile.cache.artefact.arguments import Described
from k31compile.cache.artefact.conditions import Condition, to_data, told, value_of
from k31compile.entry import Bounds, Entry
from k31compile.errors import ArtefactError
from k31compile.graph.sizes import expression_of

_SEARCHED = 100_000
_LEFT_OUT = 4


@dataclass
class GraphSizes:
    """Bounds by name, and conditions that must hold between the sizes of a call."""

    bounds: dict[str, list[int]]
    conditions: list[Condition]

    def left_out(self, entry: str) -> list[dict[str, int]]:
        """The sizes within the bounds that the graph does not take, to be compiled each for itself.

        Raises:
            ArtefactError: there are too many of them.
        """
        if not self.conditions:
            return []
        ranges = [range(low, high + 1) for low, high in self.bounds.values()]
        found: list[dict[str, int]] = []
        for sizes in itertools.islice(itertools.product(*ranges), _SEARCHED):
            named = dict(zip(self.bounds, sizes, strict=True))
            broken = [one for one in self.conditions if not value_of(one, named)]
            if not broken:
                continue
            found.append(named)
            if len(found) > _LEFT_OUT:
                where = f"entry {entry!r}"
                raise ArtefactError(f"one graph serves only sizes with {told(broken[0])}", where, hint=_NARROW)
        return found


_NARROW = "narrow the bounds of the entry's dynamic sizes, or give entries of fixed sizes"


class DynamicSizes:
    """Which dimensions of which tensors of the arguments are dynamic."""

    def __init__(self, entry: Entry, described: Described) -> None:
        self._entry = entry
        self._tensors = described.tensors
        self._dims: dict[int, dict[int, Bounds]] = {}
        for path, dims in entry.dynamic.items():
            tensor = entry.at(path)
            number = described.number_of(tensor)
            assert number is not None
            self._dims[number] = {dim % tensor.dim(): bounds for dim, bounds in dims.items()}

    def names_of(self, number: int) -> dict[int, str]:
        """The names of the dynamic dimensions of a tensor."""
        return {dim: bounds[0] for dim, bounds in self._dims.get(number, {}).items()}

    @contextlib.contextmanager
    def marked(self) -> Iterator[None]:
        """Let Dynamo see in this block which sizes are dynamic."""
        before = {number: set(vars(self._tensors[number])) for number in self._dims}
        try:
            for number, dims in self._dims.items():
                for dim in dims:
                    # Without its bounds: a guard that leaves out one size of them would end the compile.
                    torch._dynamo.mark_dynamic(self._tensors[number], dim)
            yield
        finally:
            for number in self._dims:
                tensor = self._tensors[number]
                for mark in set(vars(tensor)) - before[number]:
                    delattr(tensor, mark)

    def learn(
        self, graph: fx.GraphModule, numbers: Mapping[int, int], looked_at: Mapping[int, torch.Tensor]
    ) -> GraphSizes:
        """Bounds of the names, and what Dynamo, the passes and the build asked of the sizes while they worked.

        `numbers` are the tensors of the arguments by the inputs of the graph; `looked_at` are by their numbers those
        that Dynamo has seen at all, with its sizes.

        Raises:
            ArtefactError: they asked something that cannot be written down.
        """
        bounds = {name: [low, high] for dims in self._dims.values() for name, low, high in dims.values()}
        if not bounds:
            return GraphSizes({}, [])
        nodes = graph.graph.find_nodes(op="placeholder")
        values = {**looked_at, **{numbers[place]: nodes[place].meta["val"] for place in numbers}}
        names: dict[str, str] = {}
        same: list[tuple[str, Any]] = []
        for number, dims in self._dims.items():
            for dim, (name, _, _) in dims.items():
                self._learn_one(values.get(number), dim, name, names, same)
        conditions = [["==", name, self._data(expression, names)] for name, expression in same]
        conditions += [self._data(guard, names) for guard in self._guards(values)]
        unique = [one for place, one in enumerate(conditions) if one not in conditions[:place] and one[1:2] != one[2:]]
        return GraphSizes(bounds, unique)

    def _learn_one(self, value: Any, dim: int, name: str, names: dict[str, str], same: list[tuple[str, Any]]) -> None:
        size: Any = value.shape[dim] if isinstance(value, torch.Tensor) else None
        if size is None:
            return  # nobody has looked at this tensor, its size decides nothing
        if not isinstance(size, torch.SymInt):
            raise ArtefactError(f"the size {name} became the number {size} while it was traced", hint=_FIXED)
        expression = expression_of(size)
        if expression.is_Symbol and names.setdefault(str(expression), name) == name:
            return
        same.append((name, expression))

    def _guards(self, values: Mapping[int, Any]) -> Iterator[Any]:
        for value in values.values():
            sizes: Any = value.shape if isinstance(value, torch.Tensor) else ()
            for size in sizes:
                if isinstance(size, torch.SymInt):
                    environment = size.node.shape_env
                    yield from (environment.simplify(guard.expr) for guard in environment.guards)
                    return

    def _data(self, expression: Any, names: Mapping[str, str]) -> Condition:
        if str(expression) in ("True", "False"):
            return ["and"] if str(expression) == "True" else ["or"]
        try:
            return to_data(expression, names)
        except ValueError as error:
            where = f"entry {self._entry.name!r}"
            raise ArtefactError(f"a condition on its sizes cannot be written down: {error}", where) from error


_FIXED = "leave it out of the entry's dynamic sizes, or change what fixes it"
