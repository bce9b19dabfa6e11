"""Run a schedule in an order drawn at random from all that its streams and events allow."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

from k31compile.errors import ScheduleError
from k31compile.passes.schedule.schedule import Schedule
from k31compile.passes.schedule.tasks import Task, TaskGraph

POISON: Final = "poison"

Run = Callable[[Task, dict[str, Any]], None]


def play_schedule(
    graph: TaskGraph, schedule: Schedule, run: Run, memory: Mapping[str, Any], seed: int, keep: Iterable[str] = ()
) -> dict[str, Any]:
    """The memory after one legal run: at each step the next task of any stream whose events are done.

    A result holds POISON before it is written, and again when it is freed: as soon as those of its users have run that
    are on its own stream or on one that the schedule keeps it for. Results that nobody reads stay, and so does memory
    that is no result, such as a cache: it belongs to the caller. The tasks of a super kernel run one after the other,
    once all that any of them waits for outside of it is done.

    Args:
        graph: the tasks.
        schedule: their streams, events and what is kept.
        run: does one task's work on the memory.
        memory: what is there at the start; it is left as it is.
        seed: the same one gives the same run.
        keep: results that are never freed, though a task reads them.

    Raises:
        ScheduleError: no stream can go on.
    """
    schedule.issue_order()
    return _play(graph, _drawn(schedule, random.Random(seed)), _users(graph, schedule, keep), run, memory)


def play_serial(graph: TaskGraph, run: Run, memory: Mapping[str, Any], keep: Iterable[str] = ()) -> dict[str, Any]:
    """The memory after the program as it was written; a result is freed after the last task that reads it."""
    serial = Schedule((tuple(task.name for task in graph.tasks),), (), (), {}, 0.0, 0.0, 0.0, 0.0)
    return _play(graph, serial.streams[0], _users(graph, serial, keep), run, memory)


def _play(
    graph: TaskGraph, order: Iterable[str], readers: dict[str, set[str]], run: Run, memory: Mapping[str, Any]
) -> dict[str, Any]:
    tasks = {task.name: task for task in graph.tasks}
    now = {**dict.fromkeys(tasks, POISON), **memory}
    missing = {result: set(names) for result, names in readers.items()}
    for name in order:
        run(tasks[name], now)
        for result in tasks[name].read + tasks[name].written:
            if result in missing:
                missing[result].discard(name)
                if not missing[result]:
                    now[result] = POISON
                    del missing[result]
    return now


def _drawn(schedule: Schedule, draw: random.Random) -> Iterator[str]:
    """The tasks in a drawn order; the streams go on at paces that are drawn too, some of them far behind."""
    waits = _waits(schedule)
    region_of = {name: region.tasks for region in schedule.super_kernels for name in region.tasks}
    pace = [draw.random() ** 3 + 1e-3 for _ in schedule.streams]
    nexts = [0] * len(schedule.streams)
    stream_of, done = schedule.stream_of, set[str]()
    while left := [stream for stream, names in enumerate(schedule.streams) if nexts[stream] < len(names)]:
        heads = {stream: schedule.streams[stream][nexts[stream]] for stream in left}
        units = {stream: region_of.get(head, (head,)) for stream, head in heads.items()}
        able = [
            stream for stream, unit in units.items() if all(done.issuperset(waits[name] - {*unit}) for name in unit)
        ]
        if not able:
            raise ScheduleError(f"no stream can go on: {', '.join(heads.values())} wait for each other")
        (stream,) = draw.choices(able, [pace[one] for one in able])
        for name in units[stream]:
            yield name
            done.add(name)
            nexts[stream_of[name]] += 1


def _waits(schedule: Schedule) -> dict[str, set[str]]:
    """For each task what must have ended: the one in front of it on its stream, and its events."""
    waits: dict[str, set[str]] = {name: set() for names in schedule.streams for name in names}
    for names in schedule.streams:
        for one, other in itertools.pairwise(names):
            waits[other].add(one)
    for after, before in schedule.events:
        waits[before].add(after)
    return waits


def _users(graph: TaskGraph, schedule: Schedule, keep: Iterable[str]) -> dict[str, set[str]]:
    """For each result that is freed the tasks that this waits for: those of its stream and of those it is kept for."""
    stream_of, kept = schedule.stream_of, set(schedule.keeps)
    read = {memory for task in graph.tasks for memory in task.read}.difference(keep)
    users: dict[str, set[str]] = {task.name: set() for task in graph.tasks if task.name in read}
    for task in graph.tasks:
        for memory in task.read + task.written:
            stream = stream_of[task.name]
            if memory in users and (stream_of[memory] == stream or (memory, stream) in kept):
                users[memory].add(task.name)
    return users
