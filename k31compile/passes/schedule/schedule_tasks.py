"""The scheduler: list scheduling on the critical path over several priorities, then a small local search."""

from __future__ import annotations

import math

from k31compile.errors import ScheduleError
from k31compile.passes.schedule.improve import Budget, improve, is_better
from k31compile.passes.schedule.placing import Placement, Problem, fewest_events, on_one_stream, place
from k31compile.passes.schedule.priorities import orders
from k31compile.passes.schedule.schedule import MAX_STREAMS, Schedule
from k31compile.passes.schedule.tasks import TaskGraph

# Tasks that the local search may place for each number of streams: about a second in all.
_PLACEMENTS = 100_000


def schedule_tasks(graph: TaskGraph, event_seconds: float, streams: int = MAX_STREAMS) -> Schedule:
    """Put the tasks on at most so many streams; never predicted to take longer than one stream does.

    Tasks of an engine that takes one at a time are ordered by events where streams alone do not, so what is predicted
    holds when the schedule is run. Another stream is used only where it makes the prediction shorter, and only events
    that nothing else implies are kept. The same graph always gives the same schedule.

    Args:
        graph: what to schedule.
        event_seconds: from the end of a task to the start of one on another stream that waits for it.
        streams: the most that may be used, 1 to 4.

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
        tried = _best_on(problem, width)
        if is_better(problem, tried, best):
            best = tried
    return _as_schedule(graph, problem, best)


def _best_on(problem: Problem, streams: int) -> Placement:
    """The best placement that is found on so many streams or fewer."""
    found: list[Placement] = []
    for order in orders(problem, streams):
        for patience in (0.0, problem.event):
            tried = place(problem, order, streams, patience)
            at = next((i for i, other in enumerate(found) if is_better(problem, tried, other)), len(found))
            found.insert(at, tried)
    budget = Budget(_PLACEMENTS)
    best = found[0]
    for start in found:
        tried = improve(problem, start, streams, budget)
        if is_better(problem, tried, best):
            best = tried
    return best


def _as_schedule(graph: TaskGraph, problem: Problem, placement: Placement) -> Schedule:
    """The placement by names, with the caller's stream in front and the others by their first task."""
    names = [task.name for task in graph.tasks]
    main = placement.stream[-1:]
    numbers = list(dict.fromkeys((*main, *(placement.stream[task] for task in placement.order))))
    issued: list[list[str]] = [[] for _ in numbers]
    for task in placement.order:
        issued[numbers.index(placement.stream[task])].append(names[task])
    return Schedule(
        streams=tuple(map(tuple, issued)),
        events=tuple((names[after], names[before]) for after, before in fewest_events(problem, placement)),
        times=dict(zip(names, zip(placement.start, placement.end, strict=True), strict=True)),
        serial=graph.serial,
        critical_path=graph.critical_path,
        predicted=placement.makespan,
    )
