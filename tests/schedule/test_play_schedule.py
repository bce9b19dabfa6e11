"""Every legal interleaving gives what the program gives as it was written; a missing event is found out."""

import random
from dataclasses import replace

import pytest
from drawn_tasks import CACHES, drawn_graph, graphs, mix
from hypothesis import given, settings
from hypothesis import strategies as st

from k31compile.errors import ScheduleError
from k31compile.passes.schedule.play_schedule import POISON, play_schedule, play_serial
from k31compile.passes.schedule.schedule import Schedule
from k31compile.passes.schedule.schedule_tasks import schedule_tasks
from k31compile.passes.schedule.tasks import Task, TaskGraph

DRAWS = settings(max_examples=20, deadline=None, derandomize=True, database=None)


@DRAWS
@given(graphs, st.integers(2, 4))
def test_a_hundred_interleavings_equal_the_serial_run(graph, streams):
    schedule = schedule_tasks(graph, 0.3e-6, streams)
    expected = play_serial(graph, mix, CACHES)
    for seed in range(100):
        assert play_schedule(graph, schedule, mix, CACHES, seed) == expected


def order_of(graph, schedule, seed):
    order = []
    play_schedule(graph, schedule, lambda task, memory: order.append(task.name), {}, seed)
    return order


def test_interleavings_differ_and_a_seed_repeats_its_own():
    graph = TaskGraph([Task(f"t{i}", 1.0, "vector") for i in range(8)])
    schedule = schedule_tasks(graph, 0.1)
    orders = [order_of(graph, schedule, seed) for seed in range(50)]
    assert len({tuple(order) for order in orders}) > 40
    assert orders[7] == order_of(graph, schedule, 7)


@pytest.mark.slow
def test_a_missing_event_is_found_out():
    """Events that carry data; those that keep two products apart change no result, and the verifier sees them."""
    found = looked = 0
    for seed in range(30):
        graph = drawn_graph(random.Random(f"play {seed}"), most=15, least=5)
        schedule = schedule_tasks(graph, 0.3e-6)
        expected = play_serial(graph, mix, CACHES)
        for event in set(schedule.events) & set(graph.edges()):
            worse = replace(schedule, events=tuple(other for other in schedule.events if other != event))
            looked += 1
            found += any(play_schedule(graph, worse, mix, CACHES, seed) != expected for seed in range(100))
    assert looked > 30
    assert found == looked


def test_a_missing_keep_is_found_out():
    """Not where an event brings the other stream back before the result's own stream is done with it."""
    found = looked = 0
    for seed in range(30):
        graph = drawn_graph(random.Random(f"play {seed}"), most=15, least=5)
        schedule = schedule_tasks(graph, 0.3e-6)
        expected = play_serial(graph, mix, CACHES)
        for keep in schedule.keeps:
            worse = replace(schedule, keeps=tuple(other for other in schedule.keeps if other != keep))
            looked += 1
            found += any(play_schedule(graph, worse, mix, CACHES, seed) != expected for seed in range(50))
    assert looked > 30
    assert found > 0.7 * looked


def test_a_result_is_freed_after_its_last_reader_and_no_earlier():
    graph = TaskGraph(
        [Task("a", 1.0, "vector"), Task("b", 1.0, "vector", inputs=("a",)), Task("c", 1.0, "vector", inputs=("a",))]
    )
    apart = Schedule((("a", "b"), ("c",)), (("a", "c"),), (("a", 1),), {}, 0.0, 3.0, 2.0, 2.0)
    for seed in range(20):
        seen = []
        play_schedule(graph, apart, lambda task, memory, to=seen: (mix(task, memory), to.append(memory["a"])), {}, seed)
        assert [value == POISON for value in seen] == [False, False, False]
    for play in (play_serial, lambda *given, **kept: play_schedule(graph, apart, *given[1:], seed=0, **kept)):
        assert play(graph, mix, {})["a"] == POISON
        assert play(graph, mix, {}, keep=["a"])["a"] != POISON
        assert play(graph, mix, {})["b"] != POISON, "nobody reads it here: it is what the program returns"


def test_what_a_task_reads_and_does_not_tell_is_poison():
    graph = TaskGraph([Task("a", 1.0, "vector"), Task("b", 1.0, "vector", inputs=("a",)), Task("c", 1.0, "vector")])

    def run(task, memory):
        memory[task.name] = memory["a"] if task.name == "c" else 1

    assert play_serial(graph, run, {})["c"] == POISON


def test_streams_that_wait_for_each_other_stop():
    graph = TaskGraph([Task(name, 1.0, "vector") for name in "abcd"])
    stuck = Schedule((("a", "b"), ("c", "d")), (("b", "c"), ("d", "a")), (), {}, 0.0, 4.0, 1.0, 2.0)
    with pytest.raises(ScheduleError, match="a, c wait for each other"):
        play_schedule(graph, stuck, mix, {}, 0)
