"""Fewer events: what waits for another stream is moved to it, and what is waited for likewise."""

from __future__ import annotations

from collections.abc import Iterator

from k31compile.passes.schedule.improve import Budget
from k31compile.passes.schedule.placing import Placement
from k31compile.passes.schedule.replay import replay


def calm(placement: Placement, streams: int, budget: Budget) -> Placement:
    """The placement after moves that each make it better, until none does or the budget is used up.

    An event is a record on one stream and a wait on another, which every target does besides the work: where events
    have a price, an overlap that wins less is given up. Runs of tasks between two events move as a whole.
    """
    moved = True
    while moved and placement.events:
        moved = False
        limit = placement.cost + placement.problem.tolerance
        for wanted in _moves(placement, streams):
            for task in placement.problem.pinned:
                wanted[task] = placement.stream[task]
            first = _first_moved(placement, wanted)
            left = len(wanted) - first
            if left == 0:
                continue
            if budget.placements < left:
                return placement
            budget.placements -= left
            tried = replay(placement, placement.order, wanted, first, limit)
            if tried is not None and tried.is_better(placement):
                placement, moved = tried, True
                break
    return placement


def _moves(placement: Placement, streams: int) -> Iterator[list[int]]:
    """Streams after a whole stream, or a run at either end of an event, went to where its partner is."""
    used = sorted(set(placement.stream))
    for own in used[1:]:
        for other in used:
            if other != own:
                yield [other if stream == own else stream for stream in placement.stream]
    receivers = {task for _, task in placement.events}
    by_stream: dict[int, list[int]] = {}
    for task in placement.order:
        by_stream.setdefault(placement.stream[task], []).append(task)
    for after, before in placement.events:
        for run, to in (
            (_run_from(by_stream[placement.stream[before]], before, receivers), placement.stream[after]),
            (_run_up_to(by_stream[placement.stream[after]], after, receivers), placement.stream[before]),
            ([before], placement.stream[after]),
            ([after], placement.stream[before]),
        ):
            wanted = list(placement.stream)
            for task in run:
                wanted[task] = to
            yield wanted


def _first_moved(placement: Placement, wanted: list[int]) -> int:
    """The first place of the order whose task goes to another stream."""
    moved = (at for at, task in enumerate(placement.order) if wanted[task] != placement.stream[task])
    return next(moved, len(placement.order))


def _run_from(tasks: list[int], first: int, receivers: set[int]) -> list[int]:
    """A task and those behind it on its stream, up to the next that waits for another stream."""
    at = tasks.index(first)
    end = next((place for place in range(at + 1, len(tasks)) if tasks[place] in receivers), len(tasks))
    return tasks[at:end]


def _run_up_to(tasks: list[int], last: int, receivers: set[int]) -> list[int]:
    """A task and those in front of it on its stream, back to the one that waits for another stream."""
    at = tasks.index(last)
    first = at
    while first > 0 and tasks[first] not in receivers:
        first -= 1
    return tasks[first : at + 1]
