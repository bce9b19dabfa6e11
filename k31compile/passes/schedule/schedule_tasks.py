"""The scheduler: list scheduling on the critical path over several priorities, then a small local search."""

from __future__ import annotations

import itertools
import math

from k31compile.errors import ScheduleError
from k31compile.passes.schedule.calm import calm
from k31compile.passes.schedule.improve import Budget, improve
from k31compile.passes.schedule.placing import Placement, Problem, on_one_stream, place
from k31compile.passes.schedule.priorities import orders
from k31compile.passes.schedule.schedule import MAX_STREAMS, Schedule
from k31compile.passes.schedule.segments import cut_into_segments, part_of
from k31compile.passes.schedule.tasks import TaskGraph

# Tasks that the local search may place for each number of streams: a few tenths of a second.
SEARCH = 40_000

# Of the placements of one part so many of the best are improved.
_STARTS = 5

# Up to so many tasks are also scheduled as one part.
_FEW = 60

# Of so many tasks only the first few orders are tried, so that it stays a matter of seconds.
_MANY, _ORDERS_OF_MANY = 5_000, 2


def schedule_tasks(
    graph: TaskGraph, event_seconds: float, streams: int = MAX_STREAMS, search: int = SEARCH, price: float | None = None
) -> Schedule:
    """Put the tasks on at most so many streams; never predicted to take longer than one stream does.

    The program is cut where that does not lengthen its longest chain, equal parts are scheduled once, and then events
    that win next to nothing are taken out. An engine that takes one task at a time serves those first that ask first;
    where another should have it, an event holds the earlier one back, and collectives are always in one order. Another
    stream is used only where it makes the prediction shorter, and only events that nothing else implies are kept. The
    same graph always gives the same schedule.

    Args:
        graph: what to schedule.
        event_seconds: from the end of a task to the start of one on another stream that waits for it.
        streams: the most that may be used, 1 to 4.
        search: how many tasks the local search may place for each part and number of streams; it ends earlier where
            no single move helps.
        price: the seconds that an event has to win, since it is work for two streams besides the wait; as much as an
            event takes unless said otherwise. With 0 the prediction alone counts.

    Raises:
        ScheduleError: more streams than four or fewer than one, an event that takes less than no time, or such a price.
    """
    if not 1 <= streams <= MAX_STREAMS:
        raise ScheduleError(f"{streams} streams were asked for", hint=f"ask for 1 to {MAX_STREAMS}")
    if not (math.isfinite(event_seconds) and event_seconds >= 0):
        raise ScheduleError(f"an event takes {event_seconds} seconds", hint="give it a time of 0 or more")
    price = event_seconds if price is None else price
    if not (math.isfinite(price) and price >= 0):
        raise ScheduleError(f"an event is priced at {price} seconds", hint="give it a price of 0 or more")
    problem = Problem.of(graph, event_seconds, price)
    serial = on_one_stream(problem)
    best = _best(problem, streams, search) if streams > 1 and len(graph.tasks) > 1 else serial
    if not best.is_better(serial):
        best = serial
    return _as_schedule(graph, problem, best)


def _best(problem: Problem, streams: int, search: int) -> Placement:
    """The best placement that is found: part by part, and for a small program as a whole, too."""
    segments = cut_into_segments(problem)
    if len(segments) == 1:
        return _best_of_one(problem, streams, search)
    order: list[int] = []
    wanted = [0] * len(problem.seconds)
    known: dict[Problem, Placement] = {}
    for segment in segments:
        part = part_of(problem, segment)
        if part not in known:
            known[part] = _best_of_one(part, streams, search)
        placed = known[part]
        inside = [task - 1 + segment.start for task in placed.order if task not in part.pinned]
        order += inside
        for task in inside:
            wanted[task] = placed.stream[task - segment.start + 1]
    joined = place(problem, order, streams, wanted)
    if len(problem.seconds) > _FEW:
        return joined
    whole = _best_of_one(problem, streams, search)
    return min((joined, whole), key=lambda placement: (placement.cost, len(placement.events)))


def _best_of_one(problem: Problem, streams: int, search: int) -> Placement:
    best = on_one_stream(problem)
    for width in range(2, min(streams, len(problem.seconds)) + 1):
        if best.is_at_the_bound:
            break
        tried = _best_on(problem, width, Budget(search))
        if tried.is_better(best):
            best = tried
    return calm(best, streams, Budget(search))


def _best_on(problem: Problem, streams: int, budget: Budget) -> Placement:
    """The best placement that is found on so many streams or fewer."""
    tried = itertools.islice(orders(problem, streams), _ORDERS_OF_MANY if len(problem.seconds) > _MANY else None)
    found = [place(problem, order, streams) for order in tried]
    found.sort(key=lambda placement: (placement.cost, placement.streams))
    best = found[0]
    for start in found[:_STARTS]:
        if start is not found[0] and best.is_at_the_bound:
            break
        improved = improve(problem, start, streams, budget)
        if improved.is_better(best):
            best = improved
    return best


def _as_schedule(graph: TaskGraph, problem: Problem, placement: Placement) -> Schedule:
    """The placement by names, with the caller's stream in front and the others by their first task."""
    names = [task.name for task in graph.tasks]
    main = placement.stream[-1:]
    numbers = list(dict.fromkeys((*main, *(placement.stream[task] for task in placement.order))))
    issued: list[list[str]] = [[] for _ in numbers]
    for task in placement.order:
        issued[numbers.index(placement.stream[task])].append(names[task])
    stream_of = {names[task]: numbers.index(stream) for task, stream in enumerate(placement.stream)}
    uses = ((memory, stream_of[task.name]) for task in graph.tasks for memory in (*task.read, *task.written))
    return Schedule(
        streams=tuple(map(tuple, issued)),
        keeps=tuple(dict.fromkeys(use for use in uses if stream_of.get(use[0], use[1]) != use[1])),
        events=tuple((names[after], names[before]) for after, before in placement.events),
        event=problem.event,
        times=dict(zip(names, zip(placement.start, placement.end, strict=True), strict=True)),
        serial=graph.serial,
        critical_path=graph.critical_path,
        predicted=placement.makespan,
    )
