"""A graph run by a schedule: the caller's thread is the first stream, and each other stream has a thread of its own."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from operator import attrgetter
from typing import Any

import torch
from torch import fx

from k31compile.errors import ScheduleError
from k31compile.passes.schedule.schedule import Schedule
from k31compile.targets.cpu_streams.memory import Values, uses_that_count
from k31compile.targets.cpu_streams.merge import compile_part
from k31compile.targets.cpu_streams.parts import Part, cut_part, cut_returned, owner_of, refuse_hidden_views
from k31compile.targets.cpu_streams.plan import Plan, Unit, plan_streams

Watch = Callable[[int, str], None]


class ScheduledModule:
    """A graph as its schedule says: streams are threads, events are events, and memory is freed as `keeps` allows.

    A super kernel is one call of what Inductor made of its tasks. The tensors that a call is given are the caller's,
    and those that the graph writes in place are written. Calls come one at a time, from any thread.

    Attributes:
        plan: what each stream does.
        launched: how many calls the last run made, views not counted.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        schedule: Schedule,
        *,
        merge: bool = True,
        poison: bool = False,
        watch: Watch | None = None,
    ) -> None:
        """Cut the graph into the units of the schedule, and compile its super kernels.

        Args:
            module: as `prepare_graph` returns it; nodes that are no tasks of the schedule must be views.
            schedule: of the module's nodes, verified; tasks that are no nodes only wait.
            merge: whether super kernels are compiled; else each task is called by itself.
            poison: overwrite what is freed, so that who reads it too late is found out.
            watch: called with the stream and the name of each unit before it runs.

        Raises:
            ScheduleError: a node may be a view or a copy, or units wait for each other.
        """
        refuse_hidden_views(module.graph)
        self.plan: Plan = plan_streams(module.graph, schedule, merge)
        self.launched = 0
        self._module = module
        self._watch, self._poison = watch, poison
        self._tasks = {node for units in self.plan.streams for unit in units for node in unit.nodes}
        self._returned = cut_returned(module.graph.output_node(), self._tasks)
        self._touched = {node.name: self._owners(node) for node in self._tasks}
        self._uses = uses_that_count(schedule, self._touched, self._tasks, self._returned.inputs)
        self._parts = {unit.name: self._part(unit) for units in self.plan.streams for unit in units if unit.nodes}
        self._workers = ThreadPoolExecutor(max(1, len(self.plan.streams) - 1), thread_name_prefix="k31-stream")
        self._turn = threading.Lock()

    def __call__(self, *inputs: Any) -> Any:
        """Run the graph once.

        Raises:
            ScheduleError: not as many inputs as the graph has, or a value is not there when a task reads it.
            Exception: what a task raised on whichever stream; a note names the task.
        """
        with self._turn:
            run = _Run(self._parts, self._touched, self.plan, self._watch, self._values(inputs))
            is_inference = torch.is_inference_mode_enabled()
            others = [
                self._workers.submit(contextvars.copy_context().run, run.stream, number, is_inference)
                for number in range(1, len(self.plan.streams))
            ]
            if self.plan.streams:
                run.stream(0, is_inference)
            wait(others)
            if run.failure is not None:
                raise run.failure
            self.launched = sum(run.launched)
            return self._returned.run(*(run.values.get(node, "return") for node in self._returned.inputs))

    def close(self) -> None:
        """End the threads."""
        self._workers.shutdown()

    def _owners(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """What a task touches: the memory of its arguments, read or written, and of its own result."""
        sources = (*node.all_input_nodes, node)
        return tuple(dict.fromkeys(owner_of(source, self._tasks) for source in sources))

    def _part(self, unit: Unit) -> Part:
        inside = set(unit.tasks)
        readers: dict[fx.Node, set[str]] = {}
        for name, touched in self._touched.items():
            for owner in touched:
                readers.setdefault(owner, set()).add(name)

        def is_read_outside(node: fx.Node) -> bool:
            return node in self._returned.inputs or not readers.get(node, set()) <= inside

        part = cut_part(unit.nodes, self._tasks, is_read_outside)
        return compile_part(part) if unit.is_merged else part

    def _values(self, inputs: Sequence[Any]) -> Values:
        places = self._module.graph.find_nodes(op="placeholder")
        if len(inputs) != len(places):
            raise ScheduleError(f"the graph takes {len(places)} inputs, and {len(inputs)} were given")
        given = dict(zip(places, inputs, strict=True))
        for node in self._module.graph.find_nodes(op="get_attr"):
            given[node] = attrgetter(str(node.target))(self._module)
        return Values(given, self._uses, self._poison)


class _Run:
    """One call: its events, its values, and the first failure, which lets every stream come to its end."""

    def __init__(
        self,
        parts: Mapping[str, Part],
        touched: Mapping[str, Sequence[fx.Node]],
        plan: Plan,
        watch: Watch | None,
        values: Values,
    ) -> None:
        self.values = values
        self.failure: BaseException | None = None
        self.launched = [0] * len(plan.streams)
        self._parts, self._touched, self._plan, self._watch = parts, touched, plan, watch
        self._events = {name: threading.Event() for name in plan.awaited}

    def stream(self, number: int, is_inference: bool) -> None:
        """Do all of a stream's units, each when those that it waits for have ended."""
        with torch.inference_mode(is_inference), torch.no_grad():
            for unit in self._plan.streams[number]:
                for other in unit.waits:
                    self._events[other].wait()
                if self.failure is not None:
                    return
                try:
                    self._do(unit, number)
                except BaseException as error:
                    error.add_note(f"raised by {unit.name!r} on stream {number} of the schedule")
                    self._fail(error)
                    return
                if unit.name in self._events:
                    self._events[unit.name].set()

    def _do(self, unit: Unit, number: int) -> None:
        if self._watch is not None:
            self._watch(number, unit.name)
        part = self._parts.get(unit.name)
        if part is None:
            return
        results = part.run(*(self.values.get(node, unit.name) for node in part.inputs))
        self.launched[number] += 1
        for node, value in zip(part.outputs, results, strict=True):
            self.values.put(node, value)
        del results
        for node in unit.nodes:
            self.values.done(node.name, self._touched[node.name])

    def _fail(self, error: BaseException) -> None:
        if self.failure is None:
            self.failure = error
        for event in self._events.values():
            event.set()
