"""Run a schedule in an order drawn at random from all that its streams and events allow."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

from k31compile.passes.schedule.schedule import Schedule
from k31compile.passes.schedule.tasks import Task, TaskGraph

POISON: Final = "poison"

Run = Callable[[Task, dict[str, Any]], None]


def play_schedule(
    graph: TaskGraph, schedule: Schedule, run: Run, memory: Mapping[str, Any], seed: int, keep: Iterable[str] = ()
) -> dict[str, Any]:
    """The memory after one legal run: at each step the next task of any stream whose events are done.

    A result holds POISON before it is written, and again after its last reader: as soon as those of its readers have
    run that, as far as streams and events tell, no other reader comes after. Results that nobody reads stay, and so
    does memory that is no result, such as a cache: it belongs to the caller.

    Args:
        graph: the tasks.
        schedule: their streams and events.
        run: does one task's work on the memory.
        memory: what is there at the start; it is left as it is.
        seed: the same one gives the same run.
        keep: results that are never freed, though a task reads them.

    Raises:
        ScheduleError: no stream can go on.
    """
    return _play(graph, _drawn(schedule, random.Random(seed)), _last_readers(graph, schedule, keep), run, memory)


def play_serial(graph: TaskGraph, run: Run, memory: Mapping[str, Any], keep: Iterable[str] = ()) -> dict[str, Any]:
    """The memory after the program as it was written; a result is freed after the last task that reads it."""
    serial = Schedule((tuple(task.name for task in graph.tasks),), (), {}, 0.0, 0.0, 0.0, 0.0)
    return _play(graph, serial.streams[0], _last_readers(graph, serial, keep), run, memory)


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
    waits: dict[str, list[str]] = {}
    for after, before in schedule.events:
        waits.setdefault(before, []).append(after)
    pace = [draw.random() ** 3 + 1e-3 for _ in schedule.streams]
    nexts = [0] * len(schedule.streams)
    done: set[str] = set()
    while left := [stream for stream, names in enumerate(schedule.streams) if nexts[stream] < len(names)]:
        heads = {stream: schedule.streams[stream][nexts[stream]] for stream in left}
        able = [stream for stream in left if done.issuperset(waits.get(heads[stream], ()))]
        (stream,) = draw.choices(able, [pace[one] for one in able])
        yield heads[stream]
        done.add(heads[stream])
        nexts[stream] += 1


def _last_readers(graph: TaskGraph, schedule: Schedule, keep: Iterable[str]) -> dict[str, set[str]]:
    """For each result that is freed, those of its users that no other user of it comes after."""
    order = schedule.issue_order()
    bit = {name: 1 << at for at, name in enumerate(order)}
    nexts: dict[str, list[str]] = {name: [] for name in order}
    for one, other in itertools.chain(schedule.events, *(itertools.pairwise(names) for names in schedule.streams)):
        nexts[one].append(other)
    later = dict.fromkeys(order, 0)
    for name in reversed(order):
        for other in nexts[name]:
            later[name] |= later[other] | bit[other]
    users: dict[str, list[str]] = {}
    for task in graph.tasks:
        for memory in dict.fromkeys(task.read + task.written):
            users.setdefault(memory, []).append(task.name)
    read = {memory for task in graph.tasks for memory in task.read}.difference(keep)
    return {
        task.name: {name for name in users[task.name] if not later[name] & sum(bit[user] for user in users[task.name])}
        for task in graph.tasks
        if task.name in read
    }
