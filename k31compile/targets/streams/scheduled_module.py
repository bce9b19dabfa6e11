"""A graph run by a schedule: the caller's thread is the first stream, and each other stream has a thread of its own."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import torch
from torch import fx

from k31compile.passes.schedule.schedule import Schedule
from k31compile.targets.streams.cut_graph import CutGraph
from k31compile.targets.streams.memory import Values, uses_that_count
from k31compile.targets.streams.plan import Plan, Unit

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
        self._cut = CutGraph(module, schedule, merge)
        self.plan: Plan = self._cut.plan
        self.launched = 0
        self._watch, self._poison = watch, poison
        self._uses = uses_that_count(schedule, self._cut.touched, self._cut.tasks, self._cut.returned.inputs)
        self._workers = ThreadPoolExecutor(max(1, len(self.plan.streams) - 1), thread_name_prefix="k31-stream")
        self._turn = threading.Lock()

    def __call__(self, *inputs: Any) -> Any:
        """Run the graph once.

        Raises:
            ScheduleError: not as many inputs as the graph has, or a value is not there when a task reads it.
            Exception: what a task raised on whichever stream; a note names the task.
        """
        with self._turn:
            run = _Run(self._cut, self._watch, Values(self._cut.given(inputs), self._uses, self._poison))
            others = [
                self._workers.submit(contextvars.copy_context().run, run.beside, number)
                for number in range(1, len(self.plan.streams))
            ]
            if self.plan.streams:
                run.stream(0)
            wait(others)
            if run.failure is not None:
                raise run.failure
            self.launched = sum(run.launched)
            returned = self._cut.returned
            return returned.run(*(run.values.get(node, "return") for node in returned.inputs))

    def close(self) -> None:
        """End the threads."""
        self._workers.shutdown()


class _Run:
    """One call: its events, its values, and the first failure, which lets every stream come to its end."""

    def __init__(self, cut: CutGraph, watch: Watch | None, values: Values) -> None:
        self.values = values
        self.failure: BaseException | None = None
        self.launched = [0] * len(cut.plan.streams)
        self._cut, self._watch = cut, watch
        self._events = {name: threading.Event() for name in cut.plan.awaited}
        self._is_inference = torch.is_inference_mode_enabled()
        self._threads = torch.get_num_threads()

    def beside(self, number: int) -> None:
        """Do a stream on a thread of its own, whose operators use as many threads as those of the caller do.

        A thread that was never asked takes every core for a product, and then two streams stand in each other's way;
        asking is what makes torch hand its number on to OpenMP.
        """
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        self.stream(number)

    def stream(self, number: int) -> None:
        """Do all of a stream's units, each when those that it waits for have ended."""
        with torch.inference_mode(self._is_inference), torch.no_grad():
            for unit in self._cut.plan.streams[number]:
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
        part = self._cut.parts.get(unit.name)
        if part is None:
            return
        results = part.run(*(self.values.get(node, unit.name) for node in part.inputs))
        self.launched[number] += 1
        for node, value in zip(part.outputs, results, strict=True):
            self.values.put(node, value)
        del results
        for node in unit.nodes:
            self.values.done(node.name, self._cut.touched[node.name])

    def _fail(self, error: BaseException) -> None:
        if self.failure is None:
            self.failure = error
        for event in self._events.values():
            event.set()
