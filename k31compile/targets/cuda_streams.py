"""A schedule on CUDA streams: one host thread issues it, torch's events order it, record_stream keeps memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from k31compile.errors import TargetError
from k31compile.passes.schedule.schedule import Schedule
from k31compile.targets.streams.cut_graph import CutGraph


class CudaScheduledModule:
    """A graph issued as its schedule says; the caller's current stream is the schedule's first.

    What a call returns is ready in the order of the caller's stream, as after any other call. Super kernels are issued
    task by task. Where an input that is written lies in the memory of another, all is issued on the caller's stream.
    """

    def __init__(self, module: fx.GraphModule, schedule: Schedule, cuda: Any = torch.cuda) -> None:
        """Cut the graph into the tasks of a verified schedule, and make a CUDA stream for each further stream.

        Args:
            module: as `prepare_graph` returns it.
            schedule: of the module's nodes.
            cuda: whose streams are used; a test may give its own.

        Raises:
            TargetError: there is no CUDA device.
            ScheduleError: a node may be a view or a copy, or tasks wait for each other.
        """
        if not cuda.is_available():
            built = "this torch was built without CUDA" if torch.version.cuda is None else "no CUDA device is visible"
            raise TargetError(
                f"a schedule on CUDA streams needs a GPU, and {built}", hint="run it with ScheduledModule"
            )
        self._cuda = cuda
        self._cut = CutGraph(module, schedule, is_merging=False)
        order = schedule.issue_order()
        units = {unit.name: unit for stream in self._cut.plan.streams for unit in stream}
        self._units = [units[name] for name in order]
        self._stream_of = schedule.stream_of
        self._beside = [cuda.Stream() for _ in schedule.streams[1:]]
        self._kept: dict[str, list[int]] = {}
        for result, stream in schedule.keeps:
            self._kept.setdefault(result, []).append(stream)
        self._last = self._last_uses()

    def __call__(self, *inputs: Any) -> Any:
        """Issue the graph once.

        Raises:
            ScheduleError: not as many inputs as the graph has.
        """
        values = self._cut.given(inputs)
        if self._cut.is_entangled(values):
            with torch.no_grad():
                return self._cut.run_as_written(*inputs)
        mine = self._cuda.current_stream()
        streams = [mine, *self._beside]
        for stream in self._beside:
            stream.wait_stream(mine)
        events: dict[str, Any] = {}
        for unit in self._units:
            stream = streams[self._stream_of[unit.name]]
            for other in unit.waits:
                stream.wait_event(events[other])
            if unit.name in self._cut.parts:
                with self._cuda.stream(stream), torch.no_grad():
                    self._issue(unit.name, values, streams)
            if unit.name in self._cut.plan.awaited:
                events[unit.name] = stream.record_event()
        for stream in self._beside:
            mine.wait_stream(stream)
        returned = self._cut.returned
        for node in returned.inputs:
            _keep(values[node], [mine])
        return returned.run(*(values[node] for node in returned.inputs))

    def _issue(self, name: str, values: dict[fx.Node, Any], streams: list[Any]) -> None:
        """Issue one task, keep its result for the streams that also use it, and drop what nobody uses after it."""
        part = self._cut.parts[name]
        results = part.run(*(values[node] for node in part.inputs))
        for node, value in zip(part.outputs, results, strict=True):
            values[node] = value
            _keep(value, [streams[number] for number in self._kept.get(node.name, ())])
        for node in self._last.get(name, ()):
            values.pop(node, None)

    def _last_uses(self) -> dict[str, list[fx.Node]]:
        """For each task the results that no task after it in the order of issue touches, but for those returned."""
        last: dict[fx.Node, str] = {}
        for unit in self._units:
            for node in self._cut.touched.get(unit.name, ()):
                last[node] = unit.name
        found: dict[str, list[fx.Node]] = {}
        for node, name in last.items():
            if node in self._cut.tasks and node not in self._cut.returned.inputs:
                found.setdefault(name, []).append(node)
        return found


def _keep(value: Any, streams: Iterable[Any]) -> None:
    """Tell the allocator which streams use a result besides the one that it was made on."""
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor) and leaf.is_cuda:
            for stream in streams:
                leaf.record_stream(stream)
