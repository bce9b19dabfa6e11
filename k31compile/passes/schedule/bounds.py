"""What no schedule can beat: the longest chain, and an engine's work between what leads to it and what follows."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence

# Of so many tasks it is asked of each what its engines have to do before it; that takes time with the square of them.
_FEW = 1_000


def lower_bound(seconds: Sequence[float], before: Sequence[Sequence[int]], lock: Sequence[int]) -> float:
    """Seconds that every schedule takes, on however many streams and with free events.

    Args:
        seconds: of each task, in program order.
        before: the earlier tasks that each waits for.
        lock: the number of each task's engine where that takes one at a time, else -1.
    """
    heads = _earliest_starts(seconds, before, lock) if len(seconds) <= _FEW else _ends_of_chains(seconds, before)
    tails = [0.0] * len(seconds)
    for task in reversed(range(len(seconds))):
        for other in before[task]:
            tails[other] = max(tails[other], tails[task] + seconds[task])
    chain = max((head + took + tail for head, took, tail in zip(heads, seconds, tails, strict=True)), default=0.0)
    engines = _by_engine(range(len(seconds)), seconds, lock, heads, tails)
    return max((chain, *map(one_at_a_time, engines)))


def _ends_of_chains(seconds: Sequence[float], before: Sequence[Sequence[int]]) -> list[float]:
    heads: list[float] = []
    for earlier in before:
        heads.append(max((heads[other] + seconds[other] for other in earlier), default=0.0))
    return heads


def _earliest_starts(seconds: Sequence[float], before: Sequence[Sequence[int]], lock: Sequence[int]) -> list[float]:
    """When each task can start at the soonest: after its chains, and after what its engines have to do before it.

    Of all that leads to a task each engine takes one at a time, so layers that follow each other add up: what one has
    to wait for its engines is not made good in the next.
    """
    heads: list[float] = []
    for task, earlier in enumerate(before):
        tails = dict.fromkeys(earlier, 0.0)
        for other in range(task - 1, -1, -1):
            if other in tails:
                for first in before[other]:
                    tails[first] = max(tails.get(first, 0.0), tails[other] + seconds[other])
        chain = max((heads[other] + seconds[other] for other in earlier), default=0.0)
        engines = _by_engine(sorted(tails), seconds, lock, heads, tails)
        heads.append(max((chain, *map(one_at_a_time, engines))))
    return heads


def _by_engine(
    tasks: Iterable[int],
    seconds: Sequence[float],
    lock: Sequence[int],
    heads: Sequence[float],
    tails: Sequence[float] | Mapping[int, float],
) -> list[list[tuple[float, float, float]]]:
    """The (head, seconds, tail) jobs of each engine that takes one at a time."""
    jobs: dict[int, list[tuple[float, float, float]]] = {}
    for task in tasks:
        if lock[task] >= 0:
            jobs.setdefault(lock[task], []).append((heads[task], seconds[task], tails[task]))
    return list(jobs.values())


def one_at_a_time(jobs: Iterable[tuple[float, float, float]]) -> float:
    """The least end of (head, seconds, tail) jobs on one engine, where each could be interrupted.

    Jackson's rule: of those whose head is over, the one with the longest tail runs. That is the best with
    interruptions, and so a bound without them.
    """
    waiting = sorted(jobs)
    ready: list[tuple[float, float]] = []
    now = end = 0.0
    at = 0
    while at < len(waiting) or ready:
        if not ready:
            now = max(now, waiting[at][0])
        while at < len(waiting) and waiting[at][0] <= now:
            _, took, tail = waiting[at]
            heapq.heappush(ready, (-tail, took))
            at += 1
        tail, left = heapq.heappop(ready)
        if at < len(waiting) and waiting[at][0] < now + left:
            heapq.heappush(ready, (tail, now + left - waiting[at][0]))
            now = waiting[at][0]
        else:
            now += left
            end = max(end, now - tail)
    return end
