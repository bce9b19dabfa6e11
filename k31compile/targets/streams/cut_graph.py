"""A graph cut by a schedule: what each stream does, each unit as a function, and what every task touches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import fx

from k31compile.errors import ScheduleError
from k31compile.passes.schedule.schedule import Schedule
from k31compile.targets.streams.merge import compile_part
from k31compile.targets.streams.parts import Part, cut_part, cut_returned, owner_of, refuse_hidden_views, written_by
from k31compile.targets.streams.plan import Unit, plan_streams


class CutGraph:
    """A graph in the units of a schedule.

    Attributes:
        plan: what each stream does.
        tasks: the nodes that are tasks; every other call is a view, and is taken by its readers.
        parts: for each unit that has nodes its function; that of a super kernel is compiled.
        returned: what the graph returns, as a function of inputs and results.
        touched: for each task the inputs, constants and results whose memory it reads or writes, its own included.
        written: the inputs and constants that a task writes in place.
    """

    def __init__(self, module: fx.GraphModule, schedule: Schedule, is_merging: bool) -> None:
        """Cut; with `is_merging` every super kernel is one unit, else each task is one.

        Raises:
            ScheduleError: a node may be a view or a copy, or units wait for each other.
        """
        refuse_hidden_views(module.graph)
        self._module = module
        self.plan = plan_streams(module.graph, schedule, is_merging)
        self.tasks = {node for units in self.plan.streams for unit in units for node in unit.nodes}
        self.returned = cut_returned(module.graph.output_node(), self.tasks)
        self.touched = {node.name: self._owners(node) for node in self.tasks}
        written = (owner_of(source, self.tasks) for node in self.tasks for source in written_by(node))
        self.written = frozenset(written) - self.tasks
        self._readers: dict[fx.Node, set[str]] = {}
        for name, owners in self.touched.items():
            for owner in owners:
                self._readers.setdefault(owner, set()).add(name)
        self.parts = {unit.name: self._part(unit) for units in self.plan.streams for unit in units if unit.nodes}

    def given(self, inputs: Sequence[Any]) -> dict[fx.Node, Any]:
        """The values of inputs and constants in one call.

        Raises:
            ScheduleError: not as many inputs as the graph has.
        """
        places = self._module.graph.find_nodes(op="placeholder")
        if len(inputs) != len(places):
            raise ScheduleError(f"the graph takes {len(places)} inputs, and {len(inputs)} were given")
        values = dict(zip(places, inputs, strict=True))
        for node in self._module.graph.find_nodes(op="get_attr"):
            values[node] = attrgetter(str(node.target))(self._module)
        return values

    def is_entangled(self, given: Mapping[fx.Node, Any]) -> bool:
        """Whether an input or constant that is written may lie in the memory of another one.

        Tasks that use the one and the other are in no order then: a schedule takes them to be apart.
        """
        spans = {node: _span(value) for node, value in given.items() if isinstance(value, torch.Tensor)}
        return any(
            other is not node and spans[node][0] < end and begin < spans[node][1]
            for node in self.written
            for other, (begin, end) in spans.items()
        )

    def run_as_written(self, *inputs: Any) -> Any:
        """The graph node by node in the order of the program."""
        return self._module.forward(*inputs)

    def _owners(self, node: fx.Node) -> tuple[fx.Node, ...]:
        sources = (*node.all_input_nodes, node)
        return tuple(dict.fromkeys(owner_of(source, self.tasks) for source in sources))

    def _part(self, unit: Unit) -> Part:
        inside = set(unit.tasks)

        def is_read_outside(node: fx.Node) -> bool:
            return node in self.returned.inputs or not self._readers.get(node, set()) <= inside

        part = cut_part(unit.nodes, self.tasks, is_read_outside)
        return compile_part(part) if unit.is_merged else part


def _span(value: torch.Tensor) -> tuple[int, int]:
    """The addresses from a tensor's first byte to behind its last one; none where it has no elements."""
    begin = value.data_ptr()
    if not value.numel():
        return begin, begin
    last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return begin, begin + (last + 1) * value.element_size()
