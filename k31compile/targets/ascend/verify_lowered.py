"""Streams, events and keeps read back from what was lowered, and held against the schedule and the program.

What writes a schedule into a graph is not asked: the code that npugraph_ex generated is read line by line, and the
graph that torchair converts node by node.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import fx

from k31compile.errors import ScheduleError
from k31compile.passes.schedule.cost_model import CostModel
from k31compile.passes.schedule.graph_tasks import is_part_of_its_source, tasks_of
from k31compile.passes.schedule.schedule import Schedule
from k31compile.passes.schedule.tasks import TaskGraph
from k31compile.passes.schedule.verify_schedule import verify_order, verify_schedule
from k31compile.targets.ascend.issue import read_by, tensors_of
from k31compile.targets.ascend.offline.capture import KEEP, NAMESPACE, RECORD, WAIT, AclGraph, Call
from k31compile.targets.ascend.offline.convert import STREAM
from k31compile.targets.ascend.tagged_streams import main_label

# The tasks that stand for the caller, who goes on where the graph ends (passes/schedule/tasks.py, enclose).
_ENTER, _RETURN = "enter", "return"


class _Reading:
    """What was issued so far, in the order of issue; "" is the caller's own stream."""

    def __init__(self) -> None:
        self.streams: dict[str, list[str]] = {"": [_ENTER]}
        self.events: dict[tuple[str, str], None] = {}
        self._waiting: dict[str, set[str]] = {}
        self._recorded: dict[str, set[str]] = {}

    def run(self, task: str, stream: str) -> None:
        """A task is issued: it waits for what its stream was told to wait for."""
        own = self.streams.setdefault(stream, [])
        waits = self._waiting.pop(stream, set()).difference(own)
        self.events.update(dict.fromkeys((after, task) for after in sorted(waits)))
        own.append(task)

    def record(self, tag: str, stream: str) -> None:
        """An event that is over when all is that was issued on the stream until now."""
        last = self.streams.get(stream, [])[-1:]
        self._recorded[tag] = {*last, *self._waiting.get(stream, ())}

    def wait(self, tag: str, stream: str) -> None:
        """The stream goes on when the event is over.

        Raises:
            ScheduleError: nobody has recorded it before: such a wait is none.
        """
        if tag not in self._recorded:
            raise ScheduleError(f"the stream {stream or 'of the caller'!r} waits for {tag!r}, which is not recorded")
        self.wait_for(self._recorded[tag], stream)

    def wait_for(self, tasks: Iterable[str], stream: str) -> None:
        """The stream goes on when the tasks have ended."""
        self._waiting.setdefault(stream, set()).update(tasks)

    def ended(self, schedule: Schedule, keeps: Sequence[tuple[str, int]]) -> Schedule:
        """The schedule that was found, with the other's predictions."""
        self.run(_RETURN, "")
        return replace(
            schedule,
            streams=tuple(tuple(self.streams[label]) for label in sorted(self.streams)),
            events=tuple(self.events),
            # The caller's entry has no memory of its own.
            keeps=(*keeps, *((_ENTER, stream) for stream in range(1, len(self.streams)))),
            super_kernels=(),
        )

    @property
    def placed(self) -> set[str]:
        """The tasks that were issued."""
        return {name for names in self.streams.values() for name in names}

    def number_of(self, label: str) -> int:
        """The place of a stream in the schedule that was found."""
        return sorted(self.streams).index(label)


def verify_captured(graph: AclGraph, schedule: Schedule, program: TaskGraph, costs: CostModel) -> None:
    """Raise unless the generated code keeps the schedule's order and lets nothing race that npugraph_ex made of it.

    The code's streams, events and keeps must be a legal schedule of the program's tasks with the predicted times, and
    one of the tasks of the graph that npugraph_ex ended with: what it writes in place there is a write.

    Raises:
        ScheduleError: with the two tasks, or the one, that it is about.
    """
    after = tasks_after(graph, costs)
    verify_calls(graph.calls(), graph, schedule, program, after)


def verify_calls(
    calls: Sequence[Call], graph: AclGraph, schedule: Schedule, program: TaskGraph, after: TaskGraph
) -> None:
    """`verify_captured` for calls that were read from a graph's code, and for the tasks that it ended with.

    Raises:
        ScheduleError: with the two tasks, or the one, that it is about.
    """
    found = read_schedule(calls, graph, schedule, after)
    verify_order(after, found)
    verify_schedule(program, found)


def tasks_after(graph: AclGraph, costs: CostModel) -> TaskGraph:
    """The tasks of the graph that npugraph_ex ended with."""
    return TaskGraph(tasks_of(graph.module, costs, _is_marker))


def read_schedule(calls: Sequence[Call], graph: AclGraph, schedule: Schedule, after: TaskGraph) -> Schedule:
    """What calls of generated code say about streams, events and keeps; predictions are those of `schedule`.

    Raises:
        ScheduleError: a stream waits for what nobody has recorded.
    """
    reading = _Reading()
    kept: list[tuple[str, str]] = []
    for call in calls:
        if call.operator == RECORD:
            reading.record(call.arguments[0], call.stream)
        elif call.operator == WAIT:
            reading.wait(call.arguments[0], call.stream)
        elif call.operator == KEEP:
            kept.append((call.arguments[0], call.arguments[1]))
        elif call.name in after.places:
            reading.run(call.name, call.stream)
    return reading.ended(schedule, _keeps(graph, kept, reading))


def _is_marker(node: fx.Node) -> bool:
    return str(node.target).startswith(NAMESPACE)


def _keeps(graph: AclGraph, kept: Sequence[tuple[str, str]], reading: _Reading) -> list[tuple[str, int]]:
    """The results of which each tensor is recorded for a stream, with that stream."""
    nodes = {node.name: node for node in graph.module.graph.nodes}
    main = main_label(graph.name)
    recorded: dict[tuple[fx.Node, str], set[fx.Node]] = {}
    for name, label in kept:
        node = nodes[name]
        task = _behind_views(node)
        recorded.setdefault((task, "" if label == main else label), set()).add(node)
    # What returns no tensor has nothing to be freed.
    empty = [name for name in reading.placed if name in nodes and not tensors_of(nodes[name])]
    found = [(name, stream) for name in empty for stream in range(len(reading.streams))]
    for (task, label), tensors in recorded.items():
        # A record of any view of it keeps a single tensor; of several each has memory of its own.
        if label in reading.streams and (len(tensors_of(task)) == 1 or tensors.issuperset(tensors_of(task))):
            found.append((task.name, reading.number_of(label)))
    return found


def _behind_views(node: fx.Node) -> fx.Node:
    while is_part_of_its_source(node):
        node = node.all_input_nodes[0]
    return node


def verify_converted(module: fx.GraphModule, schedule: Schedule, program: TaskGraph) -> None:
    """Raise unless scopes, waits and values alone keep the schedule's order in a graph for GE.

    GE lets a node wait for the values that it takes, whatever their streams are, and plans memory itself, so that
    nothing is kept. It runs the caller's entry before a graph and his return behind it. That the nodes of one stream
    stay in the order of the graph is taken for granted.

    Raises:
        ScheduleError: with the two tasks, or the one, that it is about.
    """
    reading = _Reading()
    scopes: list[str | None] = []
    stream = ""
    for node in module.graph.nodes:
        if node.target is torch.ops.air.scope_enter.default:
            scopes.append(dict(zip(*node.args, strict=True)).get(STREAM))
        elif node.target is torch.ops.air.scope_exit.default:
            scopes.pop()
        elif node.target is torch.ops.air.wait.default:
            reading.wait_for((_behind_views(one).name for one in node.args[0]), stream)
        elif node.name in program.places:
            if stream and stream not in reading.streams:
                reading.wait_for((_ENTER,), stream)
            taken = {one.name for one in read_by(node)} & program.places.keys()
            reading.wait_for(taken, stream)
            reading.run(node.name, stream)
        stream = next((label for label in reversed(scopes) if label is not None), "")
    reading.wait_for((names[-1] for names in reading.streams.values()), "")
    verify_schedule(program, reading.ended(schedule, schedule.keeps))
