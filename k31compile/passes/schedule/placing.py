"""Put tasks on streams, one after the other in a given order, each where it can start first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from k31compile.passes.schedule.bounds import lower_bound
from k31compile.passes.schedule.tasks import IN_ONE_ORDER, ONE_AT_A_TIME, TaskGraph


@dataclass(frozen=True)
class Problem:
    """A task graph in numbers: tasks by their place in the program.

    Attributes:
        seconds: what each task takes.
        before: the tasks that each waits for.
        after: the tasks that wait for it.
        lock: for a task whose engine takes one at a time the number of that engine, else -1.
        event: the seconds from the end of a task to the start of one on another stream that waits for it.
        bound: no placement ends earlier.
        tolerance: times this close are taken as the same.
        pinned: tasks that have to be on stream 0.
        price: the seconds that an event has to win.
    """

    seconds: tuple[float, ...]
    before: tuple[tuple[int, ...], ...]
    after: tuple[tuple[int, ...], ...]
    lock: tuple[int, ...]
    event: float
    bound: float
    tolerance: float
    pinned: frozenset[int] = frozenset()
    price: float = 0.0

    @classmethod
    def of(cls, graph: TaskGraph, event: float, price: float = 0.0) -> Problem:
        """The problem of a graph."""
        seconds = tuple(task.seconds for task in graph.tasks)
        return cls.of_parts(seconds, graph.before, graph.locks, event, price, graph.callers)

    @classmethod
    def of_parts(
        cls,
        seconds: tuple[float, ...],
        before: tuple[tuple[int, ...], ...],
        lock: tuple[int, ...],
        event: float,
        price: float,
        pinned: frozenset[int] = frozenset(),
    ) -> Problem:
        """The problem of tasks that each wait for some before them."""
        after: list[list[int]] = [[] for _ in seconds]
        for task, earlier in enumerate(before):
            for other in earlier:
                after[other].append(task)
        return cls(
            seconds=seconds,
            before=before,
            after=tuple(map(tuple, after)),
            lock=lock,
            event=event,
            bound=lower_bound(seconds, before, lock),
            tolerance=1e-9 * (math.fsum(seconds) + event),
            pinned=pinned,
            price=price,
        )

    @cached_property
    def levels(self) -> list[float]:
        """For each task the longest chain from its start to the end."""
        levels = [0.0] * len(self.seconds)
        for task in reversed(range(len(levels))):
            levels[task] = self.seconds[task] + max((levels[other] for other in self.after[task]), default=0.0)
        return levels


@dataclass(frozen=True)
class Placement:
    """Where and when each task runs.

    Attributes:
        problem: the tasks.
        order: in which the tasks were placed; every task stands after all that it waits for.
        stream: of each task.
        start: of each task, in seconds.
        end: of each task, in seconds.
        held: for each task the one that has to end first for the sake of their engine alone, or -1.
    """

    problem: Problem
    order: tuple[int, ...]
    stream: tuple[int, ...]
    start: tuple[float, ...]
    end: tuple[float, ...]
    held: tuple[int, ...]

    @cached_property
    def makespan(self) -> float:
        """The last end."""
        return max(self.end, default=0.0)

    @cached_property
    def cost(self) -> float:
        """The last end, and the price of the events."""
        return self.makespan + (self.problem.price * len(self.events) if self.problem.price else 0.0)

    @property
    def is_at_the_bound(self) -> bool:
        """Whether nothing can end earlier."""
        return self.makespan <= self.problem.bound + self.problem.tolerance

    @cached_property
    def streams(self) -> int:
        """How many streams there are."""
        return len(set(self.stream))

    @cached_property
    def events(self) -> list[tuple[int, int]]:
        """The events that it needs: what waits for what, less what streams and other events imply.

        Each task carries how far every stream has come before it. An event is needed where neither the task in front
        on the stream nor another event brings as much; there is one such set, and it is the smallest.
        """
        width = max(self.stream, default=0) + 1
        known: list[list[int]] = [[] for _ in self.order]
        place_on_stream = [-1] * len(self.order)
        issued: list[list[int]] = [[] for _ in range(width)]
        events: list[tuple[int, int]] = []
        for task in self.order:
            here = self.stream[task]
            so_far = list(known[issued[here][-1]]) if issued[here] else [-1] * width
            last: dict[int, int] = {}
            for other in (*self.problem.before[task], self.held[task]):
                there = self.stream[other]
                if other >= 0 and place_on_stream[other] > max(
                    so_far[there], place_on_stream[last[there]] if there in last else -1
                ):
                    last[there] = other
            for there, other in sorted(last.items()):
                if all(known[rival][there] < place_on_stream[other] for rival in last.values() if rival != other):
                    events.append((other, task))
                    so_far = [max(pair) for pair in zip(so_far, known[other], strict=True)]
            place_on_stream[task] = so_far[here] = len(issued[here])
            known[task] = so_far
            issued[here].append(task)
        return events

    @cached_property
    def crossings(self) -> int:
        """How many tasks have something that another stream takes: memory that has to be kept for its sake."""
        return sum(
            any(self.stream[other] != stream for other in after)
            for stream, after in zip(self.stream, self.problem.after, strict=True)
        )

    def is_better(self, other: Placement) -> bool:
        """Whether it costs less; or as much on fewer streams, then with fewer events, then fewer crossings."""
        if abs(self.cost - other.cost) > self.problem.tolerance:
            return self.cost < other.cost
        if self.streams != other.streams:
            return self.streams < other.streams
        if self.stream == other.stream and self.start == other.start:
            return False
        return (len(self.events), self.crossings) < (len(other.events), other.crossings)


def on_one_stream(problem: Problem) -> Placement:
    """The program as it was written."""
    order = range(len(problem.seconds))
    return place(problem, order, streams=1, wanted=[0] * len(order))


class _Turn(NamedTuple):
    """The last task that was given an engine which takes one at a time, and when it asked for it."""

    task: int
    stream: int
    asked: float
    end: float


class _Slot(NamedTuple):
    """A place for a task: its stream, when it asks for its engine, when it starts, and whether it is held back."""

    stream: int
    asked: float
    start: float
    is_held: bool


def place(problem: Problem, order: Sequence[int], streams: int, wanted: Sequence[int] | None = None) -> Placement:
    """Place the tasks in an order that keeps every dependence.

    A task goes to the stream where it can start first, or where `wanted` says.
    """
    placement = place_within(problem, order, streams, math.inf, wanted)
    assert placement is not None
    return placement


def place_within(
    problem: Problem, order: Sequence[int], streams: int, limit: float, wanted: Sequence[int] | None = None
) -> Placement | None:
    """Place the tasks as `place` does, or return None as soon as they cannot all end by the limit."""
    count = len(problem.seconds)
    stream, starts, end, held = [-1] * count, [0.0] * count, [0.0] * count, [-1] * count
    free = [0.0] * (1 if wanted is None else streams)
    turns: dict[int, _Turn] = {}
    for task in order:
        latest = _latest_by_stream(problem.before[task], stream, end, streams)
        turn = turns.get(problem.lock[task])
        if task in problem.pinned or wanted is not None:
            here = 0 if wanted is None or task in problem.pinned else wanted[task]
            slot = _slot(problem, task, here, free, latest, turn)
        else:
            if len(free) < streams and free[-1] > 0.0:
                free.append(0.0)
            slots = [_slot(problem, task, here, free, latest, turn) for here in range(len(free))]
            slot = _best_slot(slots, free, latest, problem.tolerance)
        if slot.start + problem.levels[task] > limit:
            return None
        stream[task], starts[task] = slot.stream, slot.start
        end[task] = free[slot.stream] = slot.start + problem.seconds[task]
        if turn is not None and slot.is_held:
            held[task] = turn.task
        if problem.lock[task] >= 0:
            turns[problem.lock[task]] = _Turn(task, slot.stream, slot.asked, end[task])
    return Placement(problem, tuple(order), tuple(stream), tuple(starts), tuple(end), tuple(held))


def _latest_by_stream(before: Sequence[int], stream: Sequence[int], end: Sequence[float], streams: int) -> list[float]:
    """For each stream the end of the last task there that is waited for; minus infinity where there is none."""
    latest = [-math.inf] * streams
    for other in before:
        if end[other] > latest[stream[other]]:
            latest[stream[other]] = end[other]
    return latest


_STRICT = frozenset(ONE_AT_A_TIME.index(engine) for engine in IN_ONE_ORDER)


def _slot(
    problem: Problem, task: int, here: int, free: Sequence[float], latest: Sequence[float], turn: _Turn | None
) -> _Slot:
    """A task on a stream: an engine that takes one at a time serves it after those that asked earlier.

    Where it would ask no later than the one in front of it, an event holds it back until that one has ended.
    """
    asked = free[here]
    for other, end in enumerate(latest):
        if other != here and end + problem.event > asked:
            asked = end + problem.event
    if turn is None:
        return _Slot(here, asked, asked, False)
    if problem.lock[task] not in _STRICT and asked > turn.asked + problem.tolerance:
        return _Slot(here, asked, max(asked, turn.end), False)
    asked = max(asked, turn.end + (problem.event if turn.stream != here else 0.0))
    return _Slot(here, asked, asked, True)


def _best_slot(slots: Sequence[_Slot], free: Sequence[float], latest: Sequence[float], tolerance: float) -> _Slot:
    """Of the slots that start first one with fewest waits, then that on the stream which is idle for least."""
    first = min(slot.start for slot in slots) + tolerance
    waits = sum(end > -math.inf for end in latest)

    def rank(slot: _Slot) -> tuple[float, float, int]:
        crossing = waits - (latest[slot.stream] > -math.inf) + slot.is_held
        return crossing, slot.start - free[slot.stream], slot.stream

    return min((slot for slot in slots if slot.start <= first), key=rank)
