"""What no schedule can beat: the longest chain, and an engine's work between what leads to it and what follows."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence


def lower_bound(seconds: Sequence[float], before: Sequence[Sequence[int]], lock: Sequence[int]) -> float:
    """Seconds that every schedule takes, on however many streams and with free events.

    Args:
        seconds: of each task, in program order.
        before: the earlier tasks that each waits for.
        lock: the number of each task's engine where that takes one at a time, else -1.
    """
    heads = [0.0] * len(seconds)
    for task, earlier in enumerate(before):
        heads[task] = max((heads[other] + seconds[other] for other in earlier), default=0.0)
    tails = [0.0] * len(seconds)
    for task in reversed(range(len(seconds))):
        for other in before[task]:
            tails[other] = max(tails[other], tails[task] + seconds[task])
    chain = max((head + took + tail for head, took, tail in zip(heads, seconds, tails, strict=True)), default=0.0)
    by_engine: dict[int, list[tuple[float, float, float]]] = {}
    for task, engine in enumerate(lock):
        if engine >= 0:
            by_engine.setdefault(engine, []).append((heads[task], seconds[task], tails[task]))
    return max((chain, *map(one_at_a_time, by_engine.values())))


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
