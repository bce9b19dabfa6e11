"""Put tasks on streams, one after the other in a given order, each where it can start first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from k31compile.passes.schedule.tasks import ONE_AT_A_TIME, TaskGraph


@dataclass(frozen=True)
class Problem:
    """A task graph in numbers: tasks by their place in the program.

    Attributes:
        seconds: what each task takes.
        before: the tasks that each waits for.
        after: the tasks that wait for it.
        lock: for a task whose engine takes one at a time the number of that engine, else -1.
        event: the seconds from the end of a task to the start of one on another stream that waits for it.
        tolerance: times this close are taken as the same.
    """

    seconds: tuple[float, ...]
    before: tuple[tuple[int, ...], ...]
    after: tuple[tuple[int, ...], ...]
    lock: tuple[int, ...]
    event: float
    tolerance: float

    @classmethod
    def of(cls, graph: TaskGraph, event: float) -> Problem:
        """The problem of a graph."""
        after: list[list[int]] = [[] for _ in graph.tasks]
        for place, earlier in enumerate(graph.before):
            for other in earlier:
                after[other].append(place)
        locks = {engine: number for number, engine in enumerate(sorted(ONE_AT_A_TIME))}
        return cls(
            seconds=tuple(task.seconds for task in graph.tasks),
            before=graph.before,
            after=tuple(map(tuple, after)),
            lock=tuple(locks.get(task.engine, -1) for task in graph.tasks),
            event=event,
            tolerance=1e-9 * (graph.serial + event),
        )


@dataclass(frozen=True)
class Placement:
    """Where and when each task runs.

    Attributes:
        order: in which the tasks were placed; every task stands after all that it waits for.
        stream: of each task.
        start: of each task, in seconds.
        end: of each task, in seconds.
        makespan: the last end.
        streams: how many streams there are.
    """

    order: tuple[int, ...]
    stream: tuple[int, ...]
    start: tuple[float, ...]
    end: tuple[float, ...]
    makespan: float
    streams: int


def on_one_stream(problem: Problem) -> Placement:
    """The program as it was written."""
    order = range(len(problem.seconds))
    return place(problem, order, streams=1, wanted=[0] * len(order))


def place(
    problem: Problem, order: Sequence[int], streams: int, patience: float = 0.0, wanted: Sequence[int] | None = None
) -> Placement:
    """Place the tasks in an order that keeps every dependence.

    A task goes where it can start first; where several streams are no more than `patience` seconds later, to one of
    them that waits for fewest others. With `wanted` it goes where that says.
    """
    count = len(problem.seconds)
    stream, starts, end = [-1] * count, [0.0] * count, [0.0] * count
    free: list[float] = []
    held = [-1] * len(ONE_AT_A_TIME)
    for task in order:
        latest = _latest_by_stream(problem, task, held, stream, end, streams)
        if wanted is not None:
            chosen = wanted[task]
            free.extend([0.0] * (chosen + 1 - len(free)))
            start = _start(free[chosen], chosen, latest, problem.event)
        else:
            if len(free) < streams and (not free or free[-1] > 0.0):
                free.append(0.0)
            chosen, start = _choose(free, latest, problem.event, patience + problem.tolerance)
        stream[task], starts[task] = chosen, start
        end[task] = free[chosen] = start + problem.seconds[task]
        if problem.lock[task] >= 0:
            held[problem.lock[task]] = task
    return Placement(tuple(order), tuple(stream), tuple(starts), tuple(end), max(end, default=0.0), len(set(stream)))


def _latest_by_stream(
    problem: Problem, task: int, held: Sequence[int], stream: Sequence[int], end: Sequence[float], streams: int
) -> list[float]:
    """For each stream the end of the last task there that this one waits for; minus infinity where there is none."""
    latest = [-math.inf] * streams
    for other in problem.before[task]:
        if end[other] > latest[stream[other]]:
            latest[stream[other]] = end[other]
    lock = problem.lock[task]
    if lock >= 0 and held[lock] >= 0:
        other = held[lock]
        latest[stream[other]] = max(latest[stream[other]], end[other])
    return latest


def _start(free: float, here: int, latest: Sequence[float], event: float) -> float:
    start = free
    for other, end in enumerate(latest):
        if other != here and end + event > start:
            start = end + event
    return start


def _choose(free: Sequence[float], latest: Sequence[float], event: float, patience: float) -> tuple[int, float]:
    """The stream for a task and its start there: of equally good ones that which would be idle for the shortest."""
    starts = [_start(idle_since, here, latest, event) for here, idle_since in enumerate(free)]
    enough = min(starts) + patience
    waits = sum(end > -math.inf for end in latest)
    best, chosen = (math.inf, math.inf, 0), 0
    for here, start in enumerate(starts):
        if start <= enough:
            rank = (waits - (latest[here] > -math.inf), start - free[here], here)
            if rank < best:
                best, chosen = rank, here
    return chosen, starts[chosen]


def fewest_events(problem: Problem, placement: Placement) -> list[tuple[int, int]]:
    """The events that a placement needs: the transitive reduction of what waits for what, less the streams' order.

    Each task carries how far every stream has come before it. An event is needed where neither the task in front on
    the stream nor another event brings as much; there is one such set, and it is the smallest.
    """
    width = max(placement.stream, default=0) + 1
    known: list[list[int]] = [[] for _ in placement.stream]
    place_on_stream = [-1] * len(placement.stream)
    issued: list[list[int]] = [[] for _ in range(width)]
    held = [-1] * len(ONE_AT_A_TIME)
    events: list[tuple[int, int]] = []
    for task in placement.order:
        here = placement.stream[task]
        so_far = list(known[issued[here][-1]]) if issued[here] else [-1] * width
        lock = problem.lock[task]
        waits = [*problem.before[task], *([held[lock]] if lock >= 0 and held[lock] >= 0 else [])]
        last: dict[int, int] = {}
        for other in waits:
            there = placement.stream[other]
            if place_on_stream[other] > max(so_far[there], place_on_stream[last[there]] if there in last else -1):
                last[there] = other
        for there, other in sorted(last.items()):
            if there != here and all(
                known[rival][there] < place_on_stream[other] for rival in last.values() if rival != other
            ):
                events.append((other, task))
                so_far = [max(pair) for pair in zip(so_far, known[other], strict=True)]
        place_on_stream[task] = so_far[here] = len(issued[here])
        known[task] = so_far
        issued[here].append(task)
        if lock >= 0:
            held[lock] = task
    return events
