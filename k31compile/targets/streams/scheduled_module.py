"""A graph run by a schedule: the caller's thread is the first stream, and each other stream has a thread of its own."""

from __future__ import annotations

import contextlib
import contextvars
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch
from torch import fx

from k31compile.errors import ScheduleError
from k31compile.passes.schedule.schedule import Schedule
from k31compile.targets.streams.cut_graph import CutGraph
from k31compile.targets.streams.memory import Values, uses_that_count
from k31compile.targets.streams.plan import Plan, Unit

Watch = Callable[[int, str], None]

_ABOVE: contextvars.ContextVar[tuple[object, ...]] = contextvars.ContextVar("k31_scheduled_calls", default=())
"""The calls that a task runs in, on whichever stream: a call of the same module would wait for itself."""


class ScheduledModule:
    """A graph as its schedule says: streams are threads, events are events, and memory is freed as `keeps` allows.

    A super kernel is one call of what Inductor made of its tasks. The tensors that a call is given are the caller's,
    and those that the graph writes in place are written. Calls come one at a time, from any thread. What autocast casts
    is part of the graph, and autocast around a call changes nothing.

    A schedule takes the inputs to be apart. Where one that is written lies in the memory of another, the call runs the
    graph as it is written, on the caller's thread.

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
        self._call: object | None = None
        self._is_closed = False
        self._start()
        _LIVE.add(self)

    def _start(self) -> None:
        """Make what belongs to one process: a child has none of its parent's threads, and may have its locks shut."""
        self._workers = ThreadPoolExecutor(max(1, len(self.plan.streams) - 1), thread_name_prefix="k31-stream")
        self._turn = threading.Lock()

    def __call__(self, *inputs: Any) -> Any:
        """Run the graph once.

        Raises:
            ScheduleError: not as many inputs as the graph has, a value is not there when a task reads it, a task calls
                the module that it belongs to, or it was closed.
            Exception: what a task raised on whichever stream; a note names the task.
        """
        if self._call is not None and self._call in _ABOVE.get():
            raise ScheduleError("a task calls the scheduled module that it is part of", hint="give it one of its own")
        with self._turn:
            if self._is_closed:
                raise ScheduleError("the scheduled module was closed", hint="make a new one")
            given = self._cut.given(inputs)
            self._call = object()
            token = _ABOVE.set((*_ABOVE.get(), self._call))
            try:
                if self._cut.is_entangled(given):
                    return self._run_as_written(inputs)
                return self._run_streams(_Run(self._cut, self._watch, Values(given, self._uses, self._poison)))
            finally:
                self._call = None
                _ABOVE.reset(token)

    def _run_streams(self, run: _Run) -> Any:
        others: list[Future[None]] = []
        try:
            for number in range(1, len(self.plan.streams)):
                others += [self._workers.submit(contextvars.copy_context().run, run.beside, number)]
            if self.plan.streams:
                run.stream(0)
            wait(others)
        except BaseException as error:
            # An interrupt while this thread waits: the others must not wait for it for ever.
            run.fail(error)
            wait(others)
        if run.failure is not None:
            try:
                raise run.failure
            finally:
                run.failure = None  # an error that holds this frame, which holds the error, would keep all values
        self.launched = sum(run.launched)
        returned = self._cut.returned
        return returned.run(*(run.values.get(node, "return") for node in returned.inputs))

    def _run_as_written(self, inputs: tuple[Any, ...]) -> Any:
        with _as_captured(torch.is_inference_mode_enabled()):
            results = self._cut.run_as_written(*inputs)
        self.launched = len(self._cut.tasks)
        return results

    def close(self) -> None:
        """End the threads; calls after that are refused."""
        with self._turn:
            self._is_closed = True
            self._workers.shutdown()


_LIVE: weakref.WeakSet[ScheduledModule] = weakref.WeakSet()


def _start_again() -> None:
    for module in list(_LIVE):
        module._start()


os.register_at_fork(after_in_child=_start_again)


@contextlib.contextmanager
def _as_captured(is_inference: bool) -> Iterator[None]:
    """The modes of a thread that runs operators of a graph: what they cast and keep for gradients is in the graph."""
    with torch.inference_mode(is_inference), torch.no_grad(), torch._C._DisableAutocast():
        yield


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
        with _as_captured(self._is_inference):
            for unit in self._cut.plan.streams[number]:
                for other in unit.waits:
                    self._events[other].wait()
                if self.failure is not None:
                    return
                try:
                    self._do(unit, number)
                except BaseException as error:
                    error.add_note(f"raised by {unit.name!r} on stream {number} of the schedule")
                    self.fail(error)
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

    def fail(self, error: BaseException) -> None:
        """Let every stream come to its end; the first error is the one that the caller gets."""
        if self.failure is None:
            self.failure = error
        for event in self._events.values():
            event.set()
