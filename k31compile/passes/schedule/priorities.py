"""Orders in which a list scheduler may take the tasks; each keeps every dependence."""

from __future__ import annotations

import heapq
import itertools
import math
import operator
from collections.abc import Iterator

import networkx as nx

from k31compile.passes.schedule.placing import Problem

# So few tasks are tried in every order, as far as there are not too many of them.
_FEW_TASKS, _ORDERS_OF_FEW = 8, 300


def levels_with_events(problem: Problem) -> list[float]:
    """For each task the longest chain from its start to the end, with an event between every two tasks."""
    levels = [0.0] * len(problem.seconds)
    for task in reversed(range(len(levels))):
        below = max((levels[other] + problem.event for other in problem.after[task]), default=0.0)
        levels[task] = problem.seconds[task] + below
    return levels


def locked_levels(problem: Problem) -> list[float]:
    """Bottom levels in which what follows a task takes its engines one at a time, as far as they allow no more."""
    levels = [0.0] * len(problem.seconds)
    for task in reversed(range(len(levels))):
        below = max((levels[other] for other in problem.after[task]), default=0.0)
        for lock in {problem.lock[other] for other in problem.after[task]} - {-1}:
            busy = math.fsum(problem.seconds[other] for other in problem.after[task] if problem.lock[other] == lock)
            below = max(below, busy)
        levels[task] = problem.seconds[task] + below
    return levels


def orders(problem: Problem, streams: int) -> Iterator[tuple[int, ...]]:
    """The orders worth trying, each once: as they become ready, most urgent first by three measures, as written."""
    seen: set[tuple[int, ...]] = set()
    for order in _with_repeats(problem, streams):
        if order not in seen:
            seen.add(order)
            yield order


def _with_repeats(problem: Problem, streams: int) -> Iterator[tuple[int, ...]]:
    yield _as_they_become_ready(problem, problem.levels, streams)
    yield _most_urgent_first(levels_with_events(problem))
    yield _most_urgent_first(problem.levels)
    yield _most_urgent_first(locked_levels(problem))
    yield tuple(range(len(problem.seconds)))
    if len(problem.seconds) <= _FEW_TASKS:
        yield from itertools.islice(_all_orders(problem), _ORDERS_OF_FEW)


def _all_orders(problem: Problem) -> Iterator[tuple[int, ...]]:
    waits = nx.DiGraph((other, task) for task, earlier in enumerate(problem.before) for other in earlier)
    waits.add_nodes_from(range(len(problem.before)))
    return map(tuple, nx.all_topological_sorts(waits))


def _most_urgent_first(levels: list[float]) -> tuple[int, ...]:
    """By falling level; no level is below that of a later task in need of this one, and equal ones stay as written."""
    return tuple(sorted(range(len(levels)), key=lambda task: (-levels[task], task)))


def _as_they_become_ready(problem: Problem, levels: list[float], streams: int) -> tuple[int, ...]:
    """The order of starts on so many streams whose events cost nothing: the most urgent that is ready comes first."""
    missing = [len(earlier) for earlier in problem.before]
    ready: dict[int, list[tuple[float, int]]] = {lock: [] for lock in problem.lock}
    for task, count in enumerate(missing):
        if count == 0:
            heapq.heappush(ready[problem.lock[task]], (-levels[task], task))
    running: list[tuple[float, int]] = []
    busy: set[int] = set()
    order: list[int] = []
    now = 0.0
    while len(order) < len(missing):
        while len(running) < streams and (heaps := [ready[lock] for lock in ready if ready[lock] and lock not in busy]):
            _, task = heapq.heappop(min(heaps, key=operator.itemgetter(0)))
            if problem.lock[task] >= 0:
                busy.add(problem.lock[task])
            heapq.heappush(running, (now + problem.seconds[task], task))
            order.append(task)
        now, ended = heapq.heappop(running)
        busy.discard(problem.lock[ended])
        for other in problem.after[ended]:
            missing[other] -= 1
            if missing[other] == 0:
                heapq.heappush(ready[problem.lock[other]], (-levels[other], other))
    return tuple(order)
