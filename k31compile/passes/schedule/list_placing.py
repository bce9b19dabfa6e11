"""List scheduling: tasks in a given order, each on the stream where it can start first."""

from __future__ import annotations

import math
from collections.abc import Sequence

from k31compile.passes.schedule.placing import Placement, Problem
from k31compile.passes.schedule.replay import STRICT, place_as

# How a stream is ranked for a task: waits, seconds idle before, its number; then when the task asks and starts there.
_Slot = tuple[int, float, int, float, float]


def place(problem: Problem, order: Sequence[int], streams: int, patience: float = 0.0) -> Placement:
    """Place the tasks in an order that keeps every dependence.

    Of the streams where a task can start first it goes to one with fewest waits, then to the one that is idle for
    least. With patience a start that takes a wait counts as that many seconds later.
    """
    count = len(problem.seconds)
    stream, end = [-1] * count, [0.0] * count
    free = [0.0]
    turns: dict[int, tuple[int, float, float]] = {}
    for task in order:
        latest: dict[int, float] = {}
        for other in problem.before[task]:
            if end[other] > latest.get(stream[other], -math.inf):
                latest[stream[other]] = end[other]
        if len(free) < streams and free[-1] > 0.0:
            free.append(0.0)
        turn = turns.get(problem.lock[task])
        slots = [_slot(problem, problem.lock[task], here, free[here], latest, turn) for here in range(len(free))]
        first = min([slot[4] + patience * slot[0] for slot in slots]) + problem.tolerance
        _, _, here, asked, start = min([slot for slot in slots if slot[4] + patience * slot[0] <= first])
        stream[task] = here
        end[task] = free[here] = start + problem.seconds[task]
        if problem.lock[task] >= 0:
            turns[problem.lock[task]] = (here, asked, end[task])
    return place_as(problem, order, stream)


def _slot(
    problem: Problem, lock: int, here: int, free: float, latest: dict[int, float], turn: tuple[int, float, float] | None
) -> _Slot:
    """A task on a stream, which asks for its engine after the last (stream, asked, end) that had a turn there."""
    asked, waits = free, len(latest)
    for other, end in latest.items():
        if other == here:
            waits -= 1
        elif end + problem.event > asked:
            asked = end + problem.event
    start = asked
    if turn is not None:
        there, before, end = turn
        if lock in STRICT or asked <= before + problem.tolerance:
            start = asked = max(asked, end + (problem.event if there != here else 0.0))
            waits += 1
        else:
            start = max(asked, end)
    return waits, start - free, here, asked, start
