"""Placements are searched window by window, timed again from where they change, and events have to win their price."""

import math
import random

import pytest
from drawn_tasks import drawn_graph, graphs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from k31compile.passes.schedule.calm import calm
from k31compile.passes.schedule.improve import Budget
from k31compile.passes.schedule.list_placing import place
from k31compile.passes.schedule.placing import Problem
from k31compile.passes.schedule.replay import place_as, replay
from k31compile.passes.schedule.schedule_tasks import schedule_tasks
from k31compile.passes.schedule.tasks import Task, TaskGraph
from k31compile.passes.schedule.verify_schedule import verify_schedule
from k31compile.passes.schedule.windows import Sweep, improve_in_windows

DRAWS = settings(
    max_examples=40, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
EVENT = 0.2


def listed(graph, price=1e-6):
    problem = Problem.of(graph, 1e-6, price)
    return place(problem, range(len(graph.tasks)), 3)


def spans(placement):
    return placement.stream, placement.start, placement.end, placement.asked, placement.held, placement.events


@DRAWS
@given(graphs, st.integers(0, 30), st.randoms(use_true_random=False))
def test_what_is_timed_again_from_a_change_on_is_as_timed_from_the_start(graph, first, draw):
    base = listed(graph)
    first = min(first, len(graph.tasks) - 1)
    stream = [here if task < first else draw.randrange(4) for task, here in enumerate(base.stream)]
    anew = place_as(base.problem, base.order, stream)
    again = replay(base, base.order, stream, first, math.inf)
    assert spans(again) == spans(anew)
    assert again.clocks == anew.clocks
    assert replay(base, base.order, stream, first, anew.cost + base.problem.tolerance) is not None
    assert replay(base, base.order, stream, first, anew.cost - 2 * base.problem.tolerance) is None


@DRAWS
@given(graphs, st.integers(0, 30))
def test_a_window_has_the_times_and_the_makespan_of_the_whole(graph, first):
    base = listed(graph)
    first = min(first, len(graph.tasks) - 1)
    window = Sweep(base).window(first, first + 8, 4)
    part = window.placement
    for local, task in enumerate((*window.front, *window.inside)):
        assert part.start[local] == base.start[task]
        assert part.end[local] == base.end[task]
        assert part.clocks.known[local] == base.clocks.known[task]
    assert part.makespan <= base.makespan + base.problem.tolerance
    if first <= base.order.index(max(base.order, key=lambda task: base.end[task])) < first + 8:
        assert part.makespan == pytest.approx(base.makespan)


@pytest.mark.parametrize("seed", range(4))
def test_windows_make_a_long_placement_better(seed):
    graph = drawn_graph(random.Random(seed), most=300, least=100)
    base = listed(graph)
    found = improve_in_windows(base, 3, 2_000, 100_000)
    assert found.cost < base.cost
    assert sorted(found.order) == sorted(base.order)
    anew = place_as(base.problem, found.order, found.stream)
    assert spans(anew) == spans(found)
    assert improve_in_windows(base, 3, 0, 0) == base


def layers(count):
    """Layers that are equal: two products beside each other, then what takes both."""
    tasks = [Task("start", 1.0, "vector")]
    for layer in range(count):
        last = tasks[-1].name
        tasks += [
            Task(f"norm{layer}", 1.0, "vector", inputs=(last,)),
            Task(f"long{layer}", 5.0, "cube", inputs=(f"norm{layer}",)),
            Task(f"beside{layer}", 4.0, "vector", inputs=(f"norm{layer}",)),
            Task(f"sum{layer}", 1.0, "vector", inputs=(f"long{layer}", f"beside{layer}")),
        ]
    return TaskGraph(tasks)


@pytest.mark.parametrize("count", [3, 40])
def test_every_layer_overlaps_with_two_events_of_its_own(count):
    graph = layers(count)
    schedule = schedule_tasks(graph, EVENT)
    verify_schedule(graph, schedule)
    assert len(schedule.streams) == 2
    assert len(schedule.events) == 2 * count
    assert schedule.predicted == pytest.approx(schedule.critical_path, rel=0.01)


@pytest.mark.parametrize("count", [5, 40])
def test_an_event_has_to_win_its_price(count):
    graph = layers(count)
    assert schedule_tasks(graph, EVENT, price=1.7).events
    assert schedule_tasks(graph, EVENT, price=2.1).events == (), "two events, and 4.0 s are won"
    with pytest.raises(Exception, match="an event is priced at -1"):
        schedule_tasks(graph, EVENT, price=-1)


def test_a_price_brings_fewer_events_on_drawn_graphs():
    cost, events = [0.0, 0.0], [0, 0]
    for seed in range(8):
        graph = drawn_graph(random.Random(seed), most=30, least=10)
        for which, price in enumerate((0.0, 1e-6)):
            schedule = schedule_tasks(graph, 1e-6, price=price)
            verify_schedule(graph, schedule)
            cost[which] += schedule.predicted + 1e-6 * len(schedule.events)
            events[which] += len(schedule.events)
    assert cost[1] < cost[0]
    assert events[1] < 0.8 * events[0]


def test_calming_never_makes_a_placement_worse():
    for seed in range(30):
        graph = drawn_graph(random.Random(seed), most=30, least=10)
        problem = Problem.of(graph, 1e-6, 1e-6)
        scattered = place_as(problem, range(len(graph.tasks)), [task % 4 for task in range(len(graph.tasks))])
        calmer = calm(scattered, 4, Budget(100_000))
        assert calmer.cost <= scattered.cost + problem.tolerance
        assert len(calmer.events) < len(scattered.events) or not scattered.events
