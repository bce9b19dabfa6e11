"""Tasks in time, before (one stream, as the program is written) and after (as a schedule has them)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from k31compile.passes.schedule.schedule import Schedule, SuperKernel
from k31compile.passes.schedule.tasks import TaskGraph


@dataclass(frozen=True)
class Bar:
    """One task: its stream, its predicted start and end in seconds, and whether it is of the critical path."""

    name: str
    engine: str
    stream: int
    start: float
    end: float
    is_critical: bool


@dataclass(frozen=True)
class Timeline:
    """Bars on streams, the events between them (after, before), and the regions that are launched as one."""

    title: str
    streams: int
    bars: tuple[Bar, ...]
    events: tuple[tuple[str, str], ...] = ()
    super_kernels: tuple[SuperKernel, ...] = ()

    @property
    def end(self) -> float:
        """The predicted seconds until the last task has ended."""
        return max((bar.end for bar in self.bars), default=0.0)

    def by_name(self) -> dict[str, Bar]:
        """Each bar under the name of its task."""
        return {bar.name: bar for bar in self.bars}


def before(graph: TaskGraph) -> Timeline:
    """All tasks one after the other, in program order."""
    critical = set(critical_tasks(graph))
    return Timeline("before: one stream", 1, tuple(_in_a_row(graph, critical)))


def after(graph: TaskGraph, schedule: Schedule) -> Timeline:
    """The tasks where and when a schedule has them."""
    critical = set(critical_tasks(graph))
    engines = {task.name: task.engine for task in graph.tasks}
    bars = tuple(
        Bar(name, engines[name], stream, *schedule.times[name], name in critical)
        for stream, names in enumerate(schedule.streams)
        for name in names
    )
    streams = len(schedule.streams)
    title = f"after: {streams} stream{'s' if streams != 1 else ''}"
    regions: tuple[SuperKernel, ...] = tuple(schedule.super_kernels)
    return Timeline(title, streams, bars, tuple(schedule.events), regions)


def critical_tasks(graph: TaskGraph) -> list[str]:
    """One longest chain of dependences, first task first; its seconds are the graph's critical path."""
    ends: list[float] = []
    last: list[int | None] = []
    for task, earlier in zip(graph.tasks, graph.before, strict=True):
        latest = max(earlier, key=lambda other: ends[other], default=None)
        ends.append(task.seconds + (0.0 if latest is None else ends[latest]))
        last.append(latest)
    at = max(range(len(ends)), key=lambda place: ends[place], default=None)
    chain: list[str] = []
    while at is not None:
        chain.append(graph.tasks[at].name)
        at = last[at]
    return chain[::-1]


def _in_a_row(graph: TaskGraph, critical: set[str]) -> Iterator[Bar]:
    now = 0.0
    for task in graph.tasks:
        yield Bar(task.name, task.engine, 0, now, now + task.seconds, task.name in critical)
        now += task.seconds
