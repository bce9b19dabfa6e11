"""The scheduler: list scheduling on the critical path over several priorities, then a small local search."""

from __future__ import annotations

import itertools
import math

from k31compile.errors import ScheduleError
from k31compile.passes.schedule.improve import Budget, improve
from k31compile.passes.schedule.placing import Placement, Problem, on_one_stream, place
from k31compile.passes.schedule.priorities import orders
from k31compile.passes.schedule.schedule import MAX_STREAMS, Schedule
from k31compile.passes.schedule.tasks import TaskGraph

# Tasks that the local search may place for each number of streams: a few tenths of a second.
SEARCH = 40_000

# Of so many tasks only the first few orders are tried, so that it stays a matter of seconds.
_MANY, _ORDERS_OF_MANY = 5_000, 2


def schedule_tasks(
    graph: TaskGraph, event_seconds: float, streams: int = MAX_STREAMS, search: int = SEARCH
) -> Schedule:
    """Put the tasks on at most so many streams; never predicted to take longer than one stream does.

    An engine that takes one task at a time serves those first that ask first; where another should have it, an event
    holds the earlier one back, and collectives are always in one order. Another stream is used only where it makes the
    prediction shorter, and only events that nothing else implies are kept. The same graph always gives the same
    schedule.

    Args:
        graph: what to schedule.
        event_seconds: from the end of a task to the start of one on another stream that waits for it.
        streams: the most that may be used, 1 to 4.
        search: how many tasks the local search may place for each number of streams; it ends earlier where no single
            move helps.

    Raises:
        ScheduleError: more streams than four or fewer than one, or an event that takes less than no time.
    """
    if not 1 <= streams <= MAX_STREAMS:
        raise ScheduleError(f"{streams} streams were asked for", hint=f"ask for 1 to {MAX_STREAMS}")
    if not (math.isfinite(event_seconds) and event_seconds >= 0):
        raise ScheduleError(f"an event takes {event_seconds} seconds", hint="give it a time of 0 or more")
    problem = Problem.of(graph, event_seconds)
    best = on_one_stream(problem)
    for width in range(2, min(streams, len(graph.tasks)) + 1):
        if best.is_at_the_bound:
            break
        tried = _best_on(problem, width, Budget(search))
        if tried.is_better(best):
            best = tried
    return _as_schedule(graph, problem, best)


def _best_on(problem: Problem, streams: int, budget: Budget) -> Placement:
    """The best placement that is found on so many streams or fewer."""
    tried = itertools.islice(orders(problem, streams), _ORDERS_OF_MANY if len(problem.seconds) > _MANY else None)
    found = [place(problem, order, streams) for order in tried]
    found.sort(key=lambda placement: (placement.makespan, placement.streams))
    best = found[0]
    for start in found:
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
