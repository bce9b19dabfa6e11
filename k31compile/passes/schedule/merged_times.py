"""When tasks would run if runs of them were launched as one: a clock over the order of issue, and a run that grows."""

from __future__ import annotations

import itertools
import math
from collections import ChainMap
from dataclasses import dataclass

from k31compile.passes.schedule.schedule import Schedule
from k31compile.passes.schedule.tasks import ONE_AT_A_TIME, Task, TaskGraph


@dataclass(frozen=True)
class Links:
    """A schedule seen from each task.

    Attributes:
        tasks: by name.
        stream_of: of each task.
        waits: for each task those on other streams that an event makes it wait for.
        followers: for each task those that its stream or an event makes wait, with the seconds that takes.
        tail: for each task the seconds of the longest chain after its end.
        event: the seconds of an event.
    """

    tasks: dict[str, Task]
    stream_of: dict[str, int]
    waits: dict[str, list[str]]
    followers: dict[str, list[tuple[str, float]]]
    tail: dict[str, float]
    event: float

    @classmethod
    def of(cls, graph: TaskGraph, schedule: Schedule) -> Links:
        """The links of a schedule that runs each task of the graph once."""
        tasks = {task.name: task for task in graph.tasks}
        waits: dict[str, list[str]] = {name: [] for name in tasks}
        followers: dict[str, list[tuple[str, float]]] = {name: [] for name in tasks}
        for names in schedule.streams:
            for one, other in itertools.pairwise(names):
                followers[one].append((other, 0.0))
        for after, before in schedule.events:
            waits[before].append(after)
            followers[after].append((before, schedule.event))
        tail: dict[str, float] = {}
        for name in reversed(schedule.issue_order()):
            tail[name] = max((extra + tasks[next].seconds + tail[next] for next, extra in followers[name]), default=0.0)
        return cls(tasks, schedule.stream_of, waits, followers, tail, schedule.event)


class Clock:
    """How far each stream and each engine that takes one at a time has come; tasks are run in the order of issue."""

    def __init__(self, links: Links) -> None:
        self.links = links
        self.ends: ChainMap[str, float] = ChainMap()
        self.streams: dict[int, float] = {}
        self.engines: dict[str, float] = {}

    @property
    def last(self) -> float:
        """The end of the last task."""
        return max(self.streams.values(), default=0.0)

    def run_alone(self, name: str) -> float:
        """Run one task with a launch of its own, and return its end."""
        task = self.links.tasks[name]
        start = max(self.streams.get(self.links.stream_of[name], 0.0), self.when_awaited(name))
        end = max(start, self.engines.get(_engine_of(task), 0.0)) + task.seconds
        self._end_at(name, end)
        return end

    def run_merged(self, run: MergedRun) -> None:
        """Run all tasks of a run with one launch: all of them end when it does."""
        for name in run.names:
            self._end_at(name, run.end)

    def when_awaited(self, name: str) -> float:
        """When the events that a task waits for have come, of those whose tasks have run."""
        known = (self.ends[other] for other in self.links.waits[name] if other in self.ends)
        return max((end + self.links.event for end in known), default=0.0)

    def beside(self) -> Clock:
        """A clock that stands as this one does, and goes on without it."""
        other = Clock(self.links)
        other.ends = ChainMap({}, *self.ends.maps)
        other.streams, other.engines = dict(self.streams), dict(self.engines)
        return other

    def _end_at(self, name: str, end: float) -> None:
        task = self.links.tasks[name]
        self.ends[name] = end
        self.streams[self.links.stream_of[name]] = end
        if engine := _engine_of(task):
            self.engines[engine] = end


class MergedRun:
    """A run of the order of issue, one task after the other: merged into one launch, and each by itself.

    Merged, it starts when its streams, its engines and all that it waits for outside are ready, and what waits for one
    of its tasks waits for all. Inside, its streams go on side by side, and each task takes its work and a step.
    """

    def __init__(self, clock: Clock, launch: float, step: float) -> None:
        self.names: list[str] = []
        self.start = 0.0
        self._clock = clock
        self._launch, self._step = launch, step
        self._took = launch
        self._inside: dict[str, float] = {}
        self._streams: dict[int, float] = {}
        self._engines: dict[str, float] = {}
        self._apart = clock.beside()
        self._awaited: dict[str, float] = {}
        self._latest_apart = -math.inf

    @property
    def end(self) -> float:
        """When it ends as one kernel."""
        return self.start + self._took

    @property
    def gain(self) -> float:
        """Seconds by which its own chains end earlier than with a launch for each task."""
        return self._latest_apart - (self.end + max(self._awaited.values(), default=0.0))

    def add(self, name: str) -> None:
        """Take in the next task of the order of issue."""
        links, clock = self._clock.links, self._clock
        task, stream = links.tasks[name], links.stream_of[name]
        self.names.append(name)
        self.start = max(self.start, clock.streams.get(stream, 0.0), clock.when_awaited(name))
        self.start = max(self.start, clock.engines.get(_engine_of(task), 0.0))
        begin = max(self._streams.get(stream, self._launch), self._engines.get(_engine_of(task), 0.0))
        begin = max(begin, *(self._inside.get(other, 0.0) for other in links.waits[name]), 0.0)
        step = self._step if self._inside and task.seconds > 0 else 0.0
        end = begin + step + max(0.0, task.seconds - self._launch)
        self._inside[name] = self._streams[stream] = end
        if engine := _engine_of(task):
            self._engines[engine] = end
        self._took = max(self._took, end)
        self._latest_apart = max(self._latest_apart, self._apart.run_alone(name) + links.tail[name])
        self._awaited.pop(name, None)
        for other, extra in links.followers[name]:
            if other not in self._inside:
                then = extra + links.tasks[other].seconds + links.tail[other]
                self._awaited[other] = max(self._awaited.get(other, 0.0), then)


def _engine_of(task: Task) -> str:
    """The engine that a task keeps from others; none where it takes no time or its engine takes many at once."""
    return task.engine if task.seconds > 0 and task.engine in ONE_AT_A_TIME else ""
