"""Run a schedule in an order drawn at random from all that its streams and events allow."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import networkx as nx

from k31compile.errors import ScheduleError
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
    serial = Schedule((tuple(task.name for task in graph.tasks),), (), {}, 0.0, 0.0, 0.0)
    return _play(graph, [task.name for task in graph.tasks], _last_readers(graph, serial, keep), run, memory)


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


def _drawn(schedule: Schedule, draw: random.Random) -> Iterable[str]:
    waits: dict[str, list[str]] = {}
    for after, before in schedule.events:
        waits.setdefault(before, []).append(after)
    done: set[str] = set()
    left = [list(reversed(names)) for names in schedule.streams if names]
    while left:
        able = [names for names in left if done.issuperset(waits.get(names[-1], ()))]
        if not able:
            raise ScheduleError(f"no stream can go on: {', '.join(names[-1] for names in left)} wait for each other")
        name = draw.choice(able).pop()
        yield name
        done.add(name)
        left = [names for names in left if names]


def _last_readers(graph: TaskGraph, schedule: Schedule, keep: Iterable[str]) -> dict[str, set[str]]:
    """For each result that is freed, those of its users that no other user of it comes after."""
    order: nx.DiGraph = nx.DiGraph()
    order.add_nodes_from(name for names in schedule.streams for name in names)
    for names in schedule.streams:
        order.add_edges_from(zip(names, names[1:], strict=False))
    order.add_edges_from(schedule.events)
    kept = set(keep)
    users: dict[str, set[str]] = {}
    read: set[str] = set()
    for task in graph.tasks:
        read.update(task.read)
        for memory in task.read + task.written:
            users.setdefault(memory, set()).add(task.name)
    later = {name: nx.descendants(order, name) for name in order}
    return {
        task.name: {name for name in users[task.name] if not later[name] & users[task.name]}
        for task in graph.tasks
        if task.name in read and task.name not in kept
    }
