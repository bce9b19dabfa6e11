"""When tasks run whose order and streams are given; what a change leaves as it was is not looked at again."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from itertools import islice

from k31compile.passes.schedule.placing import Placement, Problem
from k31compile.passes.schedule.stream_clocks import StreamClocks
from k31compile.passes.schedule.tasks import IN_ONE_ORDER, ONE_AT_A_TIME

STRICT = frozenset(ONE_AT_A_TIME.index(engine) for engine in IN_ONE_ORDER)


def place_as(problem: Problem, order: Sequence[int], stream: Sequence[int]) -> Placement:
    """The placement of tasks in an order that keeps every dependence, each on the stream that is given."""
    count = len(problem.seconds)
    zeros = [0.0] * count
    nothing = Placement(problem, (), [-1] * count, zeros, zeros, zeros, [-1] * count, StreamClocks.none(count))
    placement = replay(nothing, order, stream, 0, math.inf)
    assert placement is not None
    return placement


def on_one_stream(problem: Problem) -> Placement:
    """The program as it was written."""
    return place_as(problem, range(len(problem.seconds)), [0] * len(problem.seconds))


def replay(base: Placement, order: Sequence[int], stream: Sequence[int], first: int, limit: float) -> Placement | None:
    """A placement like another up to a place of the order; None as soon as it must cost more than the limit.

    An engine that takes one at a time serves a task after those that asked earlier. Where it would ask no later than
    the one in front of it, an event holds it back until that one has ended; collectives are always in one order.

    Args:
        base: the other one.
        order: of all tasks; every task stands after all that it waits for.
        stream: of each task.
        first: how many tasks of the order are as in the other one, and on the same streams.
        limit: the most that it may cost.
    """
    problem, tolerance, event = base.problem, base.problem.tolerance, base.problem.event
    before, seconds, levels, locks = problem.before, problem.seconds, problem.levels, problem.lock
    start, end, asked, held = base.start.copy(), base.end.copy(), base.asked.copy(), base.held.copy()
    last, turns = base.fronts[first]
    turns = turns.copy()
    free = [end[task] if task >= 0 else 0.0 for task in last]
    spent = problem.price * (base.clocks.earlier[order[first]] if order else 0)
    for task in islice(order, first, None):
        here = stream[task]
        begin = free[here]
        for other in before[task]:
            ready = end[other] if stream[other] == here else end[other] + event
            if ready > begin:
                begin = ready
        asked[task], held[task] = begin, -1
        lock = locks[task]
        if lock >= 0:
            turn = turns.get(lock, -1)
            if turn >= 0:
                if lock in STRICT or begin <= asked[turn] + tolerance:
                    ready = end[turn] if stream[turn] == here else end[turn] + event
                    begin = asked[task] = max(begin, ready)
                    held[task] = turn
                else:
                    begin = max(begin, end[turn])
            turns[lock] = task
        if begin + levels[task] + spent > limit:
            return None
        start[task] = begin
        free[here] = end[task] = begin + seconds[task]
    if limit - max(map(operator.add, end, problem.tail), default=0.0) < spent:
        return None
    most = (
        (limit - max(map(operator.add, end, problem.tail), default=0.0)) / problem.price if problem.price else math.inf
    )
    clocks = base.clocks.go_on(order[first:], before, stream, held, last, most)
    return None if clocks is None else Placement(problem, tuple(order), list(stream), start, end, asked, held, clocks)
