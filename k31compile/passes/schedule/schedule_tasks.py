"""The scheduler: list scheduling by several priorities, then a local search, window by window where there are many."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from k31compile.errors import ScheduleError
from k31compile.passes.schedule.calm import calm
from k31compile.passes.schedule.improve import Budget, improve
from k31compile.passes.schedule.list_placing import place
from k31compile.passes.schedule.placing import Placement, Problem
from k31compile.passes.schedule.priorities import orders
from k31compile.passes.schedule.replay import on_one_stream, place_as
from k31compile.passes.schedule.schedule import MAX_STREAMS, Schedule
from k31compile.passes.schedule.tasks import TaskGraph
from k31compile.passes.schedule.windows import improve_in_windows

# Tasks that the local search may place for each number of streams and each window of the program, and in all windows.
SEARCH, _SEARCH_OF_ALL = 40_000, 800_000

# Up to so many tasks are searched as one, beginning with some of the best placements.
_FEW, _STARTS = 60, 5

# Of so many tasks only the first order is tried, so that it stays a matter of seconds.
_MANY = 5_000

# How many times its price an event has to win for a task to start earlier, in the placements that are begun with.
_PATIENCE = (0.0, 1.0, 2.0)

# A number of streams is left out where its placement costs so many times that of another one to begin with.
_HOPELESS = 1.05


def schedule_tasks(
    graph: TaskGraph, event_seconds: float, streams: int = MAX_STREAMS, search: int = SEARCH, price: float | None = None
) -> Schedule:
    """Put the tasks on at most so many streams; never predicted to take longer than one stream does.

    The tasks are placed one after the other, and then a few of them at a time are moved while that helps. An engine
    that takes one task at a time serves those first that ask first; where another should have it, an event holds the
    earlier one back, and collectives are always in one order. Another stream is used only where it makes the prediction
    shorter, and only events that nothing else implies are kept. The same graph always gives the same schedule.

    Args:
        graph: what to schedule.
        event_seconds: from the end of a task to the start of one on another stream that waits for it.
        streams: the most that may be used, 1 to 4.
        search: how many tasks the local search may place for each number of streams and each window of a program that
            has many; it ends earlier where no single move helps.
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
    best = _enter_where_it_returns(best)
    if not best.is_better(serial):
        best = serial
    return _as_schedule(graph, problem, best)


def _best(problem: Problem, streams: int, search: int) -> Placement:
    """The best placement that is found on so many streams or fewer."""
    best = on_one_stream(problem)
    listed = {width: _listed(problem, width) for width in range(2, min(streams, len(problem.seconds)) + 1)}
    least = min((found[0].cost for found in listed.values()), default=0.0)
    for width, found in listed.items():
        if best.is_at_the_bound:
            break
        if len(problem.seconds) <= _FEW:
            tried = _best_of_few(problem, found, width, search)
        elif found[0].cost <= _HOPELESS * least:
            tried = improve_in_windows(found[0], width, search, _SEARCH_OF_ALL)
        else:
            continue
        if tried.is_better(best):
            best = tried
    return calm(best, streams, Budget(search))


def _enter_where_it_returns(placement: Placement) -> Placement:
    """The placement with the caller's entry, which takes no time, on the stream of its return: that is the caller's."""
    problem, stream = placement.problem, placement.stream
    is_entry = bool(stream) and problem.seconds[0] == problem.seconds[-1] == 0.0 and all(problem.before[1:])
    if not is_entry or stream[0] == stream[-1]:
        return placement
    return place_as(problem, placement.order, [stream[-1], *stream[1:]])


def _best_of_few(problem: Problem, found: Sequence[Placement], streams: int, search: int) -> Placement:
    """The best that a search finds from some of the placements; all of it has one budget."""
    best, budget = found[0], Budget(search)
    for start in found[:_STARTS]:
        if start is not found[0] and best.is_at_the_bound:
            break
        improved = improve(problem, start, streams, budget)
        if improved.is_better(best):
            best = improved
    return best


def _listed(problem: Problem, streams: int) -> list[Placement]:
    """What list scheduling gives, the best one in front."""
    tried = itertools.islice(orders(problem, streams), 1 if len(problem.seconds) > _MANY else None)
    return sorted((_list(problem, order, streams) for order in tried), key=_rank)


def _list(problem: Problem, order: Sequence[int], streams: int) -> Placement:
    """The best of the placements of one order that avoid events more and less."""
    waits = dict.fromkeys(problem.price * times for times in _PATIENCE)
    return min((place(problem, order, streams, patience) for patience in waits), key=_rank)


def _rank(placement: Placement) -> tuple[float, int]:
    return placement.cost, placement.streams


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
