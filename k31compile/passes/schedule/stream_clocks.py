"""Which events a placement needs: each task carries how far every stream has come before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StreamClocks:
    """What each task knows of the streams. The lists of a task are shared between placements and never changed.

    Attributes:
        known: for each task and stream the place of the last task there that has ended before it, itself included.
        events: (after, before), in the order of the second.
        earlier: for each task how many events those in front of it in the order need.
    """

    known: list[list[int]]
    events: list[tuple[int, int]]
    earlier: list[int]

    @classmethod
    def none(cls, count: int) -> StreamClocks:
        """The clocks of so many tasks of which none is placed yet."""
        return cls([[] for _ in range(count)], [], [0] * count)

    def go_on(
        self,
        tasks: Sequence[int],
        before: Sequence[Sequence[int]],
        stream: Sequence[int],
        held: Sequence[int],
        last: Sequence[int],
        most: float,
    ) -> StreamClocks | None:
        """The clocks when these tasks follow, in place of those that did; None as soon as that takes too many events.

        An event is needed where neither the task in front on the stream nor another event brings as much; there is one
        such set, and it is the smallest.

        Args:
            tasks: all from a place of the order on; those before that place stay as they are here.
            before: for each task those that it waits for.
            stream: of each task.
            held: for each task the one that has to end first for the sake of their engine alone, or -1.
            last: for each stream the last task that stays, or -1.
            most: how many events there may be.
        """
        known, earlier = self.known.copy(), self.earlier.copy()
        events = self.events[: earlier[tasks[0]]] if tasks else self.events
        front = [known[task] if task >= 0 else [-1] * len(last) for task in last]
        for task in tasks:
            here = stream[task]
            so_far = front[here].copy()
            earlier[task] = len(events)
            missing: dict[int, int] = {}
            for other in before[task] if held[task] < 0 else (*before[task], held[task]):
                there = stream[other]
                if known[other][there] > so_far[there] and (
                    there not in missing or known[other][there] > known[missing[there]][there]
                ):
                    missing[there] = other
            if missing:
                events += _needed(task, missing, known, so_far)
                if len(events) > most:
                    return None
            so_far[here] += 1
            known[task] = front[here] = so_far
        return StreamClocks(known, events, earlier)


def _needed(task: int, missing: dict[int, int], known: list[list[int]], so_far: list[int]) -> list[tuple[int, int]]:
    """The events of a task of which none implies another; what it knows of the streams grows by them."""
    events = []
    for there, other in sorted(missing.items()):
        place = known[other][there]
        if all(known[rival][there] < place for rival in missing.values() if rival != other):
            events.append((other, task))
    for after, _ in events:
        so_far[:] = map(max, so_far, known[after])
    return events
