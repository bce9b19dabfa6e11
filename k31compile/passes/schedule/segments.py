"""Where a program may be cut in two so that its longest chain does not grow: each part is scheduled by itself."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from k31compile.passes.schedule.placing import Problem


def cut_into_segments(problem: Problem) -> list[range]:
    """The program in consecutive parts; all of one ends before the next begins, and no longest chain grows by that.

    What can run beside the longest chain is in the same part as the piece of the chain that it can run beside: a cut
    between the two would add one to the other.
    """
    count = len(problem.seconds)
    behind = [0.0] * (count + 1)
    for task in reversed(range(count)):
        behind[task] = max(behind[task + 1], problem.levels[task])
    cuts = [0, *_cuts(problem, behind), count]
    return [range(first, last) for first, last in itertools.pairwise(cuts) if first < last]


def _cuts(problem: Problem, behind: list[float]) -> Iterator[int]:
    ends = [0.0] * len(problem.seconds)
    first, longest = 0, 0.0
    for task in range(len(ends)):
        if longest > 0.0 and longest + behind[task] <= behind[first] + problem.tolerance:
            yield task
            first, longest = task, 0.0
        start = max((ends[other] for other in problem.before[task] if other >= first), default=0.0)
        ends[task] = start + problem.seconds[task]
        longest = max(longest, ends[task])


def part_of(problem: Problem, segment: range) -> Problem:
    """A segment as a problem of its own, between an entry and a return on stream 0 that take no time.

    The entry stands for all that came before, so what waits for that waits for the entry. Task i of the segment is
    task i + 1 of the part.
    """
    first, count = segment.start, len(segment)
    before: list[tuple[int, ...]] = [()]
    for task in segment:
        inside = tuple(other - first + 1 for other in problem.before[task] if other >= first)
        before.append(inside or (0,))
    waited_for = {other for earlier in before for other in earlier}
    before.append(tuple(task for task in range(count + 1) if task not in waited_for))
    return Problem.of_parts(
        (0.0, *(problem.seconds[task] for task in segment), 0.0),
        tuple(before),
        (-1, *(problem.lock[task] for task in segment), -1),
        problem.event,
        problem.price,
        pinned=frozenset((0, count + 1)),
    )
