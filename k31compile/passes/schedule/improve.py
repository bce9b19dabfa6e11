"""A small local search: move one task to another stream or another place in the order, while that helps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from k31compile.passes.schedule.placing import Placement, Problem, place_within

# How many places of the order before and behind its own a task may be moved to in one step.
_REACH = 8


@dataclass
class Budget:
    """How many tasks may still be placed: counted, not timed, so that every run ends with the same schedule."""

    placements: int


def improve(problem: Problem, placement: Placement, streams: int, budget: Budget) -> Placement:
    """The placement after moves that each made it better, until none does or the budget is used up."""
    count = len(placement.order)
    best, moved = placement, True
    while moved and budget.placements >= count:
        moved = False
        for task in sorted(range(count), key=lambda task: (-best.start[task] - problem.levels[task], task)):
            for order, wanted in _moves(problem, best, task, streams):
                if budget.placements < count:
                    return best
                budget.placements -= count
                limit = best.cost + problem.tolerance
                tried = place_within(problem, order, streams, limit, wanted)
                if tried is not None and tried.is_better(best):
                    best, moved = tried, True
                    break
    return best


def _moves(
    problem: Problem, placement: Placement, task: int, streams: int
) -> Iterator[tuple[tuple[int, ...], list[int]]]:
    """The order and the streams after each move of a task that keeps every dependence.

    A task goes to another stream or elsewhere in the order; or from it on, its stream and another change places.
    """
    order, own = placement.order, placement.stream[task]
    at = order.index(task)
    for to in _places(problem, order, at):
        rest = order[:at] + order[at + 1 :]
        for stream in range(streams):
            if to != at or stream != own:
                wanted = list(placement.stream)
                wanted[task] = stream
                yield (*rest[:to], task, *rest[to:]), wanted
    for stream in range(streams):
        if stream != own:
            wanted, turned = list(placement.stream), {own: stream, stream: own}
            for later in order[at:]:
                wanted[later] = turned.get(wanted[later], wanted[later])
            yield order, wanted


def _places(problem: Problem, order: tuple[int, ...], at: int) -> list[int]:
    """Where in the order a task may stand: its own place, then those around it from near to far."""
    task = order[at]
    first = last = at
    while first > max(0, at - _REACH) and order[first - 1] not in problem.before[task]:
        first -= 1
    while last < min(len(order) - 1, at + _REACH) and order[last + 1] not in problem.after[task]:
        last += 1
    return sorted(range(first, last + 1), key=lambda to: (abs(to - at), to))
