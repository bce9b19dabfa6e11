"""A task graph in numbers, and where and when its tasks run."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from k31compile.passes.schedule.bounds import lower_bound
from k31compile.passes.schedule.schedule import MAX_STREAMS
from k31compile.passes.schedule.stream_clocks import StreamClocks
from k31compile.passes.schedule.tasks import TaskGraph


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
        pinned: tasks that are not moved: those of which a part of a program is told what is around it.
        price: the seconds that an event has to win.
        tail: the seconds that follow the end of each task besides what is behind it here.
    """

    seconds: tuple[float, ...]
    before: tuple[tuple[int, ...], ...]
    after: tuple[tuple[int, ...], ...]
    lock: tuple[int, ...]
    event: float
    tolerance: float
    pinned: frozenset[int] = frozenset()
    price: float = 0.0
    tail: tuple[float, ...] = ()

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
        tail: tuple[float, ...] = (),
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
            tolerance=1e-9 * (math.fsum(seconds) + event),
            pinned=pinned,
            price=price,
            tail=tail or (0.0,) * len(seconds),
        )

    @cached_property
    def bound(self) -> float:
        """No placement ends earlier."""
        return lower_bound(self.seconds, self.before, self.lock)

    @cached_property
    def edges(self) -> tuple[list[int], list[int]]:
        """The tasks that are waited for and the tasks that wait for them, one pair for each dependence."""
        pairs = [(other, task) for task, earlier in enumerate(self.before) for other in earlier]
        return [other for other, _ in pairs], [task for _, task in pairs]

    @cached_property
    def levels(self) -> list[float]:
        """For each task the longest chain from its start to the end, with what follows that."""
        levels = [0.0] * len(self.seconds)
        for task in reversed(range(len(levels))):
            levels[task] = self.seconds[task] + max(
                self.tail[task], *(levels[other] for other in self.after[task]), 0.0
            )
        return levels


@dataclass(frozen=True)
class Placement:
    """Where and when each task runs. What it holds is shared with others and never changed.

    Attributes:
        problem: the tasks.
        order: in which the tasks were placed; every task stands after all that it waits for.
        stream: of each task.
        start: of each task, in seconds.
        end: of each task, in seconds.
        asked: when each task asks for its engine; it starts later where that takes one at a time.
        held: for each task the one that has to end first for the sake of their engine alone, or -1.
        clocks: what each task knows of the other streams, and the events that this takes.
    """

    problem: Problem
    order: tuple[int, ...]
    stream: list[int]
    start: list[float]
    end: list[float]
    asked: list[float]
    held: list[int]
    clocks: StreamClocks

    @cached_property
    def makespan(self) -> float:
        """The last end, with what follows it."""
        return max(map(operator.add, self.end, self.problem.tail), default=0.0)

    @property
    def cost(self) -> float:
        """The last end, and the price of the events."""
        return self.makespan + self.problem.price * len(self.events)

    @property
    def is_at_the_bound(self) -> bool:
        """Whether nothing can end earlier."""
        return self.makespan <= self.problem.bound + self.problem.tolerance

    @cached_property
    def streams(self) -> int:
        """How many streams there are."""
        return len(set(self.stream))

    @property
    def events(self) -> Sequence[tuple[int, int]]:
        """The events that it needs: what waits for what, less what streams and other events imply."""
        return self.clocks.events

    @cached_property
    def crossings(self) -> int:
        """How many tasks have something that another stream takes: memory that has to be kept for its sake."""
        one, other = self.problem.edges
        is_crossing = map(operator.ne, map(self.stream.__getitem__, one), map(self.stream.__getitem__, other))
        return len(set(itertools.compress(one, is_crossing)))

    @cached_property
    def fronts(self) -> list[tuple[list[int], dict[int, int]]]:
        """Before each place of the order and behind the last: the last task on each stream, or -1, and of each engine
        that takes one at a time.
        """
        last, turns = [-1] * MAX_STREAMS, dict[int, int]()
        fronts = [(last, turns)]
        for task in self.order:
            last = last.copy()
            last[self.stream[task]] = task
            if self.problem.lock[task] >= 0:
                turns = {**turns, self.problem.lock[task]: task}
            fronts.append((last, turns))
        return fronts

    def is_better(self, other: Placement) -> bool:
        """Whether it costs less; or as much on fewer streams, then with fewer events, then fewer crossings."""
        if abs(self.cost - other.cost) > self.problem.tolerance:
            return self.cost < other.cost
        if self.streams != other.streams:
            return self.streams < other.streams
        if len(self.events) != len(other.events) or (self.stream == other.stream and self.start == other.start):
            return len(self.events) < len(other.events)
        return self.crossings < other.crossings
