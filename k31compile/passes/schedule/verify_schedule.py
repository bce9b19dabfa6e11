"""Check a schedule against its tasks, knowing nothing of how it was made."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import networkx as nx

from k31compile.errors import ScheduleError
from k31compile.passes.schedule.schedule import MAX_STREAMS, Schedule
from k31compile.passes.schedule.tasks import IN_ONE_ORDER, ONE_AT_A_TIME, Task, TaskGraph
from k31compile.passes.schedule.verify_super_kernels import CanJoin, verify_super_kernels


def verify_schedule(graph: TaskGraph, schedule: Schedule, can_join: CanJoin | None = None) -> None:
    """Raise unless the schedule is in order (`verify_order`) and predicts the times that follow from that.

    Where an engine takes one task at a time, no two may ask for it at once, and the one that is predicted to have it
    first must ask first. Tasks that are launched as one must be a part of the order of issue that nothing leaves and
    enters again; `can_join` says which tasks the target can merge.

    Raises:
        ScheduleError: with the two tasks, or the one, that it is about.
    """
    tasks = {task.name: task for task in graph.tasks}
    order, is_before = _in_order(graph, schedule)
    _check_times(tasks, schedule, order, is_before)
    conflicts = [(one, other) for one, other, _ in _conflicts(graph.tasks)]
    verify_super_kernels(tasks, schedule, conflicts, can_join)


def verify_order(graph: TaskGraph, schedule: Schedule) -> None:
    """Raise unless streams and events alone give every legal run the result of the program as it was written.

    Happens-before is the order of each stream and the events, and what follows from both. It must be free of cycles,
    order every two tasks of which one takes, reads or writes what the other writes, as the program does, and order
    all collectives. What another stream uses must be kept for it. Times are not looked at, nor regions.

    Raises:
        ScheduleError: with the two tasks, or the one, that it is about.
    """
    _in_order(graph, schedule)


def _in_order(graph: TaskGraph, schedule: Schedule) -> tuple[list[str], Callable[[str, str], bool]]:
    tasks = {task.name: task for task in graph.tasks}
    _check_streams(tasks, schedule)
    order, reached = _happens_before(tasks, schedule)
    stream_of = schedule.stream_of
    place = {name: at for names in schedule.streams for at, name in enumerate(names)}

    def is_before(one: str, other: str) -> bool:
        return reached[other][stream_of[one]] >= place[one]

    for one, other, reason in _conflicts(graph.tasks):
        if not is_before(one, other):
            raise ScheduleError(f"{other!r} may start before {one!r} has ended", where=reason)
    for engine in IN_ONE_ORDER:
        users = [name for name in order if tasks[name].engine == engine]
        for one, other in itertools.pairwise(users):
            if not is_before(one, other):
                raise ScheduleError(f"{one!r} and {other!r} may start in either order", where=f"both are {engine}")
    _check_keeps(tasks, schedule)
    return order, is_before


def _check_streams(tasks: dict[str, Task], schedule: Schedule) -> None:
    if len(schedule.streams) > MAX_STREAMS:
        raise ScheduleError(f"{len(schedule.streams)} streams, and {MAX_STREAMS} are the most")
    seen: set[str] = set()
    for stream, names in enumerate(schedule.streams):
        if not names:
            raise ScheduleError(f"stream {stream} has no task")
        for name in names:
            if name not in tasks:
                raise ScheduleError(f"stream {stream} runs {name!r}, which is no task")
            if name in seen:
                raise ScheduleError(f"{name!r} is run twice")
            seen.add(name)
    for name in tasks:
        if name not in seen:
            raise ScheduleError(f"{name!r} is run by no stream")
    for event in schedule.events:
        for name in event:
            if name not in tasks:
                raise ScheduleError(f"the event {event[0]!r} -> {event[1]!r} names {name!r}, which is no task")


def _happens_before(tasks: dict[str, Task], schedule: Schedule) -> tuple[list[str], dict[str, list[int]]]:
    """All tasks in an order that keeps happens-before, and how far each stream has come when a task has ended."""
    order_of: nx.DiGraph = nx.DiGraph()
    order_of.add_nodes_from(tasks)
    for names in schedule.streams:
        order_of.add_edges_from(itertools.pairwise(names))
    order_of.add_edges_from(schedule.events)
    try:
        order = list(nx.lexicographical_topological_sort(order_of))
    except nx.NetworkXUnfeasible:
        cycle = [edge[0] for edge in nx.find_cycle(order_of)]
        raise ScheduleError(
            f"{cycle[0]!r} and {cycle[-1]!r} wait for each other", where=" -> ".join((*cycle, cycle[0]))
        ) from None
    reached: dict[str, list[int]] = {}
    place = {name: (stream, at) for stream, names in enumerate(schedule.streams) for at, name in enumerate(names)}
    for name in order:
        so_far = [-1] * len(schedule.streams)
        for earlier in order_of.predecessors(name):
            so_far = [max(pair) for pair in zip(so_far, reached[earlier], strict=True)]
        stream, at = place[name]
        so_far[stream] = at
        reached[name] = so_far
    return order, reached


def _conflicts(tasks: tuple[Task, ...]) -> Iterator[tuple[str, str, str]]:
    """Two tasks that must stay in program order, and why; what follows from others of them is left out."""
    written: dict[str, str] = {}
    read_since: dict[str, list[str]] = {}
    for task in tasks:
        for memory in (*task.inputs, *task.reads):
            if memory in written:
                yield written[memory], task.name, f"reads {memory!r}"
            read_since.setdefault(memory, []).append(task.name)
        for memory in (task.name, *task.writes):
            for reader in read_since.pop(memory, []):
                if reader != task.name:
                    yield reader, task.name, f"writes {memory!r}, which the other reads"
            if written.get(memory, task.name) != task.name:
                yield written[memory], task.name, f"writes {memory!r} after the other"
            written[memory] = task.name


def _check_keeps(tasks: dict[str, Task], schedule: Schedule) -> None:
    """A result that another stream uses must be kept for that stream."""
    stream_of, kept = schedule.stream_of, set(schedule.keeps)
    for result, stream in schedule.keeps:
        if result not in tasks or stream not in range(len(schedule.streams)):
            raise ScheduleError(f"{result!r} is kept for stream {stream}, and there is no such task or stream")
    for task in tasks.values():
        stream = stream_of[task.name]
        for memory in (*task.inputs, *task.reads, *task.writes):
            if memory in tasks and stream_of[memory] != stream and (memory, stream) not in kept:
                raise ScheduleError(
                    f"the result of {memory!r} may be freed before {task.name!r} has used it",
                    where=f"it is not kept for stream {stream}",
                )


def _check_times(
    tasks: dict[str, Task], schedule: Schedule, order: list[str], is_before: Callable[[str, str], bool]
) -> None:
    """The predicted times must be those that streams, events and engines give, and promise no order beyond them."""
    slack = 1e-6 * (schedule.serial + schedule.event)
    for name, task in tasks.items():
        if name not in schedule.times:
            raise ScheduleError(f"{name!r} has no predicted time")
        start, end = schedule.times[name]
        if not abs(end - start - task.seconds) <= slack:
            raise ScheduleError(f"{name!r} is predicted to run from {start} to {end}", where=f"takes {task.seconds}")
    asked, behind = _when_asked(tasks, schedule)
    can_start = dict(asked)
    for engine in ONE_AT_A_TIME:
        users = [name for name in order if tasks[name].engine == engine]
        users.sort(key=lambda name: asked[name])
        for one, other in itertools.pairwise(users):
            if asked[one] == asked[other] and not is_before(one, other):
                raise ScheduleError(f"{one!r} and {other!r} may run at once", where=f"{engine} takes one at a time")
            if schedule.times[one][1] > can_start[other]:
                can_start[other], behind[other] = schedule.times[one][1], one
    for name in order:
        start = schedule.times[name][0]
        if start < can_start[name] - slack:
            raise ScheduleError(f"{name!r} is predicted to start before {behind[name]!r} lets it", where=f"at {start}")
        if start > can_start[name] + slack:
            raise ScheduleError(f"{name!r} may start at {can_start[name]}, which is before its predicted {start}")
    last = max((end for _, end in schedule.times.values()), default=0.0)
    if not abs(schedule.predicted - last) <= slack:
        raise ScheduleError(f"{schedule.predicted} seconds are predicted, and the last task ends at {last}")


def _when_asked(tasks: dict[str, Task], schedule: Schedule) -> tuple[dict[str, float], dict[str, str]]:
    """When streams and events let each task ask for its engine, and which other task comes last before that."""
    asked = dict.fromkeys(tasks, 0.0)
    behind = dict.fromkeys(tasks, "")
    waits = [(*pair, 0.0) for names in schedule.streams for pair in itertools.pairwise(names)]
    for one, other, extra in (*waits, *((*event, schedule.event) for event in schedule.events)):
        then = schedule.times[one][1] + extra
        if then > asked[other]:
            asked[other], behind[other] = then, one
    return asked, behind
