"""A schedule as data: what runs on which stream in which order, what waits for what, and what that should take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from k31compile.errors import ScheduleError

MAX_STREAMS = 4


@dataclass(frozen=True)
class SuperKernel:
    """Tasks that the target launches as one kernel; it starts when all that they wait for outside of it has ended.

    Attributes:
        name: unlike every other one's.
        tasks: in the order of issue.
        options: what the target's compiler is told about it, as pairs of a name and a value.
    """

    name: str
    tasks: tuple[str, ...]
    options: tuple[tuple[str, str], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The region in lists, as JSON holds it."""
        return {"name": self.name, "tasks": list(self.tasks), "options": [list(pair) for pair in self.options]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SuperKernel:
        """The region that `to_dict` wrote down; KeyError, TypeError or ValueError where it is none."""
        options = tuple((str(name), str(value)) for name, value in data["options"])
        return cls(str(data["name"]), tuple(map(str, data["tasks"])), options)


@dataclass(frozen=True)
class Schedule:
    """Tasks on streams, with the events that order them across streams.

    All times are predictions of a cost model: a task starts when the one in front of it on its stream and its events
    let it, and where its engine takes one task at a time, when those that asked for it earlier have ended.

    Attributes:
        streams: the names of the tasks of each stream, in the order in which they are issued; the first stream is the
            caller's own and holds the last task of the program.
        events: (after, before): the second task starts when the first, on another stream, has ended.
        keeps: (result, stream): the memory of that task's result is also used on that other stream, and must not be
            used again before the last use there.
        times: the predicted start and end of each task in seconds.
        event: the seconds from the end of a task to the start of one on another stream that waits for it.
        serial: the predicted seconds of all tasks on one stream.
        critical_path: the predicted seconds of the longest chain of dependences.
        predicted: the predicted seconds of this schedule.
        super_kernels: tasks that are launched together; the times above are those of launching each by itself.
    """

    streams: tuple[tuple[str, ...], ...]
    events: tuple[tuple[str, str], ...]
    keeps: tuple[tuple[str, int], ...]
    times: Mapping[str, tuple[float, float]]
    event: float
    serial: float
    critical_path: float
    predicted: float
    super_kernels: tuple[SuperKernel, ...] = ()

    @property
    def stream_of(self) -> dict[str, int]:
        """The stream of each task."""
        return {name: stream for stream, names in enumerate(self.streams) for name in names}

    def issue_order(self) -> tuple[str, ...]:
        """All tasks in one order that keeps each stream's and every event's: what a single program would issue.

        Raises:
            ScheduleError: there is none, since tasks wait for each other.
        """
        waits: dict[str, list[str]] = {}
        for after, before in self.events:
            waits.setdefault(before, []).append(after)
        issued: dict[str, None] = {}
        nexts = [0] * len(self.streams)
        while len(issued) < sum(map(len, self.streams)):
            heads = [
                (self.times.get(names[at], (0.0, 0.0))[0], stream)
                for stream, (names, at) in enumerate(zip(self.streams, nexts, strict=True))
                if at < len(names) and all(after in issued for after in waits.get(names[at], ()))
            ]
            if not heads:
                stuck = [names[at] for names, at in zip(self.streams, nexts, strict=True) if at < len(names)]
                raise ScheduleError(f"no stream can go on: {', '.join(stuck)} wait for each other")
            _, stream = min(heads)
            issued[self.streams[stream][nexts[stream]]] = None
            nexts[stream] += 1
        return tuple(issued)

    def counts(self) -> dict[str, Any]:
        """What a report says of it; all seconds are predictions."""
        return {
            "streams": len(self.streams),
            "events": len(self.events),
            "critical_path": self.critical_path,
            "serial": self.serial,
            "predicted": self.predicted,
            "super_kernels": len(self.super_kernels),
        }

    def to_dict(self) -> dict[str, Any]:
        """The schedule in lists and numbers, as JSON holds it."""
        return {
            "streams": [list(names) for names in self.streams],
            "events": [list(event) for event in self.events],
            "keeps": [list(keep) for keep in self.keeps],
            "times": {name: list(span) for name, span in self.times.items()},
            "event": self.event,
            "serial": self.serial,
            "critical_path": self.critical_path,
            "predicted": self.predicted,
            "super_kernels": [region.to_dict() for region in self.super_kernels],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Schedule:
        """The schedule that `to_dict` wrote down.

        Raises:
            ScheduleError: a part is missing or of another form.
        """
        try:
            return cls(
                streams=tuple(tuple(map(str, names)) for names in data["streams"]),
                events=tuple((str(after), str(before)) for after, before in data["events"]),
                keeps=tuple((str(result), int(stream)) for result, stream in data["keeps"]),
                times={str(name): (float(start), float(end)) for name, (start, end) in data["times"].items()},
                event=float(data["event"]),
                serial=float(data["serial"]),
                critical_path=float(data["critical_path"]),
                predicted=float(data["predicted"]),
                super_kernels=tuple(map(SuperKernel.from_dict, data.get("super_kernels", ()))),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ScheduleError(
                f"this is no schedule: {type(error).__name__} {error}", hint="write one with Schedule.to_dict"
            ) from None
