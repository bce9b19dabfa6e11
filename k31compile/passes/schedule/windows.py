"""Local search in a long placement: a window of it at a time, with what is around it left as it is."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from k31compile.passes.schedule.calm import calm
from k31compile.passes.schedule.improve import Budget, improve
from k31compile.passes.schedule.placing import Placement, Problem
from k31compile.passes.schedule.replay import place_as, replay
from k31compile.passes.schedule.stream_clocks import StreamClocks

# Tasks in a window, and how far the next one is from it.
_WIDTH, _STEP = 32, 16


def improve_in_windows(placement: Placement, streams: int, search: int, most: int) -> Placement:
    """The placement after a search in one window after the other, or as it was where that did not make it better.

    A window is a problem of its own: the last tasks in front of it are there and do not move, and behind each of its
    tasks is as much as follows it in the placement. What that gives for the whole is known at the end.

    Args:
        placement: what to begin with.
        streams: the most that may be used.
        search: how many tasks may be placed in each window.
        most: how many in all of them together.
    """
    sweep = Sweep(placement)
    firsts = range(0, max(1, len(placement.order) - _WIDTH + _STEP), _STEP)
    for first in firsts:
        window = sweep.window(first, first + _WIDTH, streams)
        budget = Budget(min(search, most // len(firsts)))
        found = improve(window.problem, calm(window.placement, streams, budget), streams, budget)
        found = calm(found, streams, budget)
        if found.is_better(window.placement):
            sweep.take(window, found, first)
    tried = place_as(placement.problem, sweep.order, sweep.stream)
    return tried if tried.is_better(placement) else placement


@dataclass(frozen=True)
class Window:
    """A part of a placement as a problem of its own.

    Attributes:
        front: the tasks before it that it knows of; they come first in the problem and are pinned.
        inside: its own tasks, which come next. Then there is an end of each stream, pinned, that takes no time.
        placement: as it is.
    """

    front: list[int]
    inside: list[int]
    placement: Placement

    @property
    def problem(self) -> Problem:
        """What is to be placed."""
        return self.placement.problem


class Sweep:
    """A placement that is changed from its beginning to its end."""

    def __init__(self, placement: Placement) -> None:
        self.order, self.stream = list(placement.order), placement.stream.copy()
        self._problem = placement.problem
        self._start, self._end = placement.start.copy(), placement.end.copy()
        self._asked, self._known = placement.asked.copy(), placement.clocks.known.copy()
        self._place = [0] * len(self.order)
        for place, task in enumerate(self.order):
            self._place[task] = place
        self._behind = _Behind(placement)
        self._passed = 0
        self._last: dict[int, int] = {}
        self._turns: dict[int, int] = {}

    def window(self, first: int, stop: int, streams: int) -> Window:
        """The tasks between two places of the order; none in front of the first moves any more."""
        problem, inside = self._problem, self.order[first:stop]
        for task in self.order[self._passed : first]:
            self._last[self.stream[task]] = task
            if problem.lock[task] >= 0:
                self._turns[problem.lock[task]] = task
        self._passed = first
        awaited = {other for task in inside for other in problem.before[task] if self._place[other] < first}
        front = sorted(awaited.union(self._last.values(), self._turns.values()), key=self._place.__getitem__)
        ends = self._behind.of_streams(stop)
        number = {task: at for at, task in enumerate((*front, *inside))}
        before = [tuple(number[other] for other in problem.before[task]) for task in inside]
        behind = [self._behind.of_task(task, stop, self._place) for task in inside]
        stream = [*(self.stream[task] for task in number), *ends]
        part = Problem.of_parts(
            (*(problem.seconds[task] for task in number), *(0.0 for _ in ends)),
            (*(() for _ in front), *before, *(() for _ in ends)),
            (*(problem.lock[task] for task in number), *(-1 for _ in ends)),
            problem.event,
            problem.price,
            frozenset((*range(len(front)), *range(len(number), len(stream)))),
            (*(0.0 for _ in front), *behind, *ends.values()),
        )
        return Window(front, inside, self._placed(part, front, stream))

    def _placed(self, part: Problem, front: list[int], stream: list[int]) -> Placement:
        """A window's problem placed as its tasks are: those in front of it as they were found, the others anew."""
        rest = len(stream) - len(front)

        def times(values: Sequence[float]) -> list[float]:
            return [*(values[task] for task in front), *(0.0 for _ in range(rest))]

        known = [*(self._known[task] for task in front), *([] for _ in range(rest))]
        clocks = StreamClocks(known, [], [0] * len(stream))
        held = [-1] * len(stream)
        start, end, asked = times(self._start), times(self._end), times(self._asked)
        before = Placement(part, tuple(range(len(front))), stream, start, end, asked, held, clocks)
        placed = replay(before, range(len(stream)), stream, len(front), math.inf)
        assert placed is not None
        return placed

    def take(self, window: Window, found: Placement, first: int) -> None:
        """Put what was found for a window in the place of what was there."""
        skipped, count = len(window.front), len(window.inside)
        for place, local in enumerate(islice(found.order, skipped, skipped + count), first):
            task = window.inside[local - skipped]
            self.order[place], self._place[task] = task, place
            self.stream[task], self._known[task] = found.stream[local], found.clocks.known[local]
            self._start[task], self._end[task] = found.start[local], found.end[local]
            self._asked[task] = found.asked[local]


class _Behind:
    """The longest chains behind places of a placement: of what waits for a task, its stream and its engine."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        count = len(placement.order)
        self._from = [0.0] * count
        self._streams: list[dict[int, float]] = [{}] * (count + 1)
        self._locks: list[dict[int, float]] = [{}] * (count + 1)
        for place in reversed(range(count)):
            task = placement.order[place]
            stream, lock = placement.stream[task], placement.problem.lock[task]
            streams, locks = self._streams[place + 1], self._locks[place + 1]
            behind = max(streams.get(stream, 0.0), locks.get(lock, 0.0), *self._awaiting(task), 0.0)
            self._from[task] = behind + placement.problem.seconds[task]
            self._streams[place] = {**streams, stream: self._from[task]}
            self._locks[place] = locks if lock < 0 else {**locks, lock: self._from[task]}

    def of_streams(self, stop: int) -> dict[int, float]:
        """For each stream the seconds from the start of its first task from a place of the order on."""
        return self._streams[min(stop, len(self._from))]

    def of_task(self, task: int, stop: int, place: Sequence[int]) -> float:
        """The seconds behind a task in what waits for it or for its engine from a place of the order on."""
        locks = self._locks[min(stop, len(self._from))]
        later = [other for other in self._placement.problem.after[task] if place[other] >= stop]
        return max(locks.get(self._placement.problem.lock[task], 0.0), *self._awaiting(task, later), 0.0)

    def _awaiting(self, task: int, later: Sequence[int] | None = None) -> Iterator[float]:
        stream, event = self._placement.stream, self._placement.problem.event
        for other in self._placement.problem.after[task] if later is None else later:
            yield self._from[other] + (0.0 if stream[other] == stream[task] else event)
