"""The verifier: it objects to whatever is left out or turned around, and names the tasks."""

import ast
import random
from dataclasses import replace
from pathlib import Path

import pytest
from drawn_tasks import drawn_graph

from k31compile.errors import ScheduleError
from k31compile.passes.schedule import verify_schedule as module
from k31compile.passes.schedule.schedule import Schedule
from k31compile.passes.schedule.schedule_tasks import schedule_tasks
from k31compile.passes.schedule.tasks import Task, TaskGraph
from k31compile.passes.schedule.verify_schedule import verify_schedule

GRAPH = TaskGraph(
    [
        Task("a", 1.0, "vector"),
        Task("b", 1.0, "cube", writes=("cache",)),
        Task("c", 1.0, "cube", inputs=("a",)),
        Task("d", 1.0, "vector", reads=("cache",), inputs=("c",)),
        Task("e", 1.0, "memory", writes=("cache",)),
    ]
)
TIMES = {"a": (0.0, 1.0), "b": (0.0, 1.0), "c": (1.0, 2.0), "d": (2.0, 3.0), "e": (3.0, 4.0)}


def scheduled(streams, events, times=TIMES):
    return Schedule(tuple(map(tuple, streams)), tuple(events), (), times, 0.0, 5.0, 3.0, 4.0)


RIGHT = scheduled([["a", "c", "d"], ["b", "e"]], [("b", "c"), ("d", "e")])


def test_the_right_one_passes():
    verify_schedule(GRAPH, RIGHT)


@pytest.mark.parametrize(
    ("streams", "events", "words"),
    [
        (["acd", "be"], [("d", "e")], "'d' may start before 'b' has ended .reads 'cache'"),
        (["acd", "be"], [("b", "c")], "'e' may start before 'd' has ended .writes 'cache', which the other reads"),
        (["cad", "be"], [("b", "c"), ("d", "e")], "'c' may start before 'a' has ended"),
        (["acd", "eb"], [("b", "c"), ("d", "e")], "wait for each other"),
        (["acd", "be"], [("b", "c"), ("d", "e"), ("e", "a")], "wait for each other"),
        (["acd", "b"], [("b", "c")], "'e' is run by no stream"),
        (["acd", "bee"], [("b", "c"), ("d", "e")], "'e' is run twice"),
        (["acd", "bex"], [("b", "c"), ("d", "e")], "'x', which is no task"),
        (["acd", "be"], [("b", "c"), ("d", "x")], "names 'x', which is no task"),
        (["acd", "be", ""], [("b", "c"), ("d", "e")], "stream 2 has no task"),
        (["a", "b", "c", "d", "e"], [], "5 streams, and 4 are the most"),
    ],
)
def test_a_wrong_one_is_told_with_its_tasks(streams, events, words):
    with pytest.raises(ScheduleError, match=words):
        verify_schedule(GRAPH, scheduled(streams, events))


@pytest.mark.parametrize(
    ("name", "span", "words"),
    [
        ("c", (0.5, 1.5), "'c' is predicted to start before 'a' lets it"),
        ("d", (1.5, 2.5), "'d' is predicted to start before 'c' lets it"),
        ("e", (3.0, 3.5), "'e' is predicted to run from 3.0 to 3.5 .takes 1.0"),
        ("e", (4.0, 5.0), "'e' may start at 3.0, which is before its predicted 4.0"),
        ("a", (float("nan"), float("nan")), "'a' is predicted to run from nan"),
    ],
)
def test_a_prediction_must_not_promise_more_than_the_order(name, span, words):
    with pytest.raises(ScheduleError, match=words):
        verify_schedule(GRAPH, replace(RIGHT, times={**TIMES, name: span}))
    with pytest.raises(ScheduleError, match=f"'{name}' has no predicted time"):
        verify_schedule(GRAPH, replace(RIGHT, times={other: TIMES[other] for other in TIMES if other != name}))


@pytest.mark.parametrize(("engine", "words"), [("cube", "run at once"), ("communication", "in either order")])
def test_two_tasks_that_ask_for_one_engine_at_once_are_told(engine, words):
    graph = TaskGraph([Task("a", 1.0, engine), Task("b", 1.0, engine)])
    side_by_side = Schedule((("a",), ("b",)), (), (), {"a": (0.0, 1.0), "b": (1.0, 2.0)}, 0.5, 2.0, 1.0, 2.0)
    with pytest.raises(ScheduleError, match=f"'a' and 'b' may .*{words}"):
        verify_schedule(graph, side_by_side)
    held = replace(side_by_side, events=(("a", "b"),), times={"a": (0.0, 1.0), "b": (1.5, 2.5)}, predicted=2.5)
    verify_schedule(graph, held)


def test_who_asks_first_for_the_cube_has_it_first():
    graph = TaskGraph([Task("a", 1.0, "cube"), Task("first", 0.5, "vector"), Task("b", 1.0, "cube", inputs=("first",))])
    served = {"a": (0.0, 1.0), "first": (0.0, 0.5), "b": (1.0, 2.0)}
    schedule = Schedule((("a",), ("first", "b")), (), (), served, 0.1, 2.5, 1.5, 2.0)
    verify_schedule(graph, schedule)
    turned = {"a": (1.5, 2.5), "first": (0.0, 0.5), "b": (0.5, 1.5)}
    with pytest.raises(ScheduleError, match=r"'b' is predicted to start before 'a' lets it|'a' may start at 0.0"):
        verify_schedule(graph, replace(schedule, times=turned, predicted=2.5))


@pytest.mark.parametrize("count", [25, pytest.param(150, marks=pytest.mark.slow)])
def test_every_single_event_is_needed(count):
    """Drop any one event of many schedules: each time the verifier objects, so none is too many either."""
    dropped = 0
    for seed in range(count):
        draw = random.Random(f"mutation {seed}")
        graph = drawn_graph(draw, most=25, least=5)
        schedule = schedule_tasks(graph, draw.choice([0.0, 0.3e-6, 1.5e-6]), draw.choice([2, 3, 4]))
        for event in schedule.events:
            events = tuple(other for other in schedule.events if other != event)
            with pytest.raises(ScheduleError, match=r"may start|may run at once|is predicted"):
                verify_schedule(graph, replace(schedule, events=events))
            dropped += 1
    assert dropped > 2 * count


@pytest.mark.parametrize("count", [15, pytest.param(80, marks=pytest.mark.slow)])
def test_every_single_keep_is_needed(count):
    """A result that another stream reads must not be freed when its own stream is done with it."""
    dropped = 0
    for seed in range(count):
        graph = drawn_graph(random.Random(f"keep {seed}"), most=20, least=5)
        schedule = schedule_tasks(graph, 0.3e-6)
        for keep in schedule.keeps:
            keeps = tuple(other for other in schedule.keeps if other != keep)
            with pytest.raises(ScheduleError, match=f"the result of '{keep[0]}' may be freed before"):
                verify_schedule(graph, replace(schedule, keeps=keeps))
            dropped += 1
    assert dropped > count
    with pytest.raises(ScheduleError, match="'x' is kept for stream 0, and there is no such task"):
        verify_schedule(GRAPH, replace(RIGHT, keeps=(("x", 0),)))


def test_two_tasks_of_a_stream_in_the_wrong_order_are_seen():
    seen = 0
    for seed in range(20):
        graph = drawn_graph(random.Random(f"swap {seed}"), most=15, least=5)
        schedule = schedule_tasks(graph, 0.3e-6)
        for one, other in graph.edges():
            stream = next((names for names in schedule.streams if one in names and other in names), ())
            if not stream:
                continue
            turned = {one: other, other: one}
            streams = tuple(tuple(turned.get(name, name) for name in names) for names in schedule.streams)
            with pytest.raises(ScheduleError):
                verify_schedule(graph, replace(schedule, streams=streams))
            seen += 1
    assert seen > 60


def test_it_knows_nothing_of_the_scheduler():
    tree = ast.parse(Path(module.__file__).read_text())
    ours = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and "k31compile" in node.module}
    assert ours == {
        "k31compile.errors",
        "k31compile.passes.schedule.schedule",
        "k31compile.passes.schedule.tasks",
        "k31compile.passes.schedule.verify_super_kernels",
    }
