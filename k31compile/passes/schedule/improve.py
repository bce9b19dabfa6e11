"""A small local search: move one task to another stream or another place in the order, while that helps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from k31compile.passes.schedule.placing import Placement, Problem
from k31compile.passes.schedule.replay import replay

# How many places of the order before and behind its own a task may be moved to in one step.
_REACH = 8


@dataclass
class Budget:
    """How many tasks may still be placed: counted, not timed, so that every run ends with the same schedule."""

    placements: int


def improve(problem: Problem, placement: Placement, streams: int, budget: Budget) -> Placement:
    """The placement after moves that each made it better, until none does or the budget is used up."""
    count = len(placement.order)
    movable = [task for task in range(count) if task not in problem.pinned]
    best, moved = placement, True
    while moved and budget.placements > 0:
        moved = False
        for task in sorted(movable, key=lambda task: (-best.start[task] - problem.levels[task], task)):
            for first, order, stream in _moves(problem, best, task, streams):
                if budget.placements < count - first:
                    return best
                budget.placements -= count - first
                tried = replay(best, order, stream, first, best.cost + problem.tolerance)
                if tried is not None and tried.is_better(best):
                    best, moved = tried, True
                    break
    return best


def _moves(
    problem: Problem, placement: Placement, task: int, streams: int
) -> Iterator[tuple[int, tuple[int, ...], list[int]]]:
    """The first place that changes, the order and the streams after each move of a task that keeps every dependence.

    A task goes to another stream or elsewhere in the order; or from it on, its stream and another change places.
    """
    order, own = placement.order, placement.stream[task]
    at = order.index(task)
    for to in _places(problem, order, at):
        rest = order[:at] + order[at + 1 :]
        moved = (*rest[:to], task, *rest[to:])
        for stream in range(streams):
            if to != at or stream != own:
                wanted = placement.stream.copy()
                wanted[task] = stream
                yield min(at, to), moved, wanted
    for stream in range(streams):
        if stream != own:
            wanted, turned = placement.stream.copy(), {own: stream, stream: own}
            for later in order[at:]:
                if later not in problem.pinned:
                    wanted[later] = turned.get(wanted[later], wanted[later])
            yield at, order, wanted


def _places(problem: Problem, order: tuple[int, ...], at: int) -> list[int]:
    """Where in the order a task may stand: its own place, then those around it from near to far."""
    first = last = at
    in_front, behind = problem.pinned.union(problem.before[order[at]]), problem.pinned.union(problem.after[order[at]])
    while first > max(0, at - _REACH) and order[first - 1] not in in_front:
        first -= 1
    while last < min(len(order) - 1, at + _REACH) and order[last + 1] not in behind:
        last += 1
    return sorted(range(first, last + 1), key=lambda to: (abs(to - at), to))
