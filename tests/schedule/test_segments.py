"""Cuts that lengthen no chain, equal parts scheduled alike, and events that have to win their price."""

import random

import pytest
from drawn_tasks import drawn_graph, graphs
from hypothesis import given, settings

from k31compile.passes.schedule.calm import calm
from k31compile.passes.schedule.improve import Budget
from k31compile.passes.schedule.placing import Problem, place
from k31compile.passes.schedule.schedule_tasks import schedule_tasks
from k31compile.passes.schedule.segments import cut_into_segments, part_of
from k31compile.passes.schedule.tasks import Task, TaskGraph
from k31compile.passes.schedule.verify_schedule import verify_schedule

DRAWS = settings(max_examples=40, deadline=None, derandomize=True, database=None)
EVENT = 0.2


def longest(problem):
    return max(problem.levels, default=0.0)


@DRAWS
@given(graphs)
def test_the_parts_cover_the_program_and_their_chains_add_up(graph):
    problem = Problem.of(graph, 1e-6)
    segments = cut_into_segments(problem)
    assert [task for segment in segments for task in segment] == list(range(len(graph.tasks)))
    chains = sum(longest(part_of(problem, segment)) for segment in segments)
    assert chains == pytest.approx(longest(problem), rel=1e-9, abs=1e-15)


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


def test_what_runs_beside_the_chain_is_in_its_part_and_layers_are_alike():
    graph = layers(40)
    problem = Problem.of(graph, EVENT)
    segments = cut_into_segments(problem)
    by_names = [[graph.tasks[task].name.rstrip("0123456789") for task in segment] for segment in segments]
    assert ["long", "beside"] in by_names
    assert len({part_of(problem, segment) for segment in segments}) == 2


@pytest.mark.parametrize("count", [3, 40])
def test_every_layer_overlaps_with_two_events_of_its_own(count):
    graph = layers(count)
    schedule = schedule_tasks(graph, EVENT)
    verify_schedule(graph, schedule)
    assert len(schedule.streams) == 2
    assert len(schedule.events) == 2 * count
    assert schedule.predicted == pytest.approx(schedule.critical_path, rel=0.01)


def test_an_event_has_to_win_its_price():
    graph = layers(5)
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
        scattered = place(problem, range(len(graph.tasks)), 4, [task % 4 for task in range(len(graph.tasks))])
        calmer = calm(scattered, 4, Budget(100_000))
        assert calmer.cost <= scattered.cost + problem.tolerance
        assert len(calmer.events) < len(scattered.events) or not scattered.events
