"""Regions that are launched as one: which tasks they take, what they never take, and what is predicted of them."""

import random
import time
from dataclasses import replace

import pytest
from drawn_tasks import CACHES, drawn_graph, mix

from k31compile.errors import ScheduleError
from k31compile.passes.schedule.cost_model import Figure, load_costs
from k31compile.passes.schedule.play_schedule import play_schedule, play_serial
from k31compile.passes.schedule.schedule import Schedule, SuperKernel
from k31compile.passes.schedule.schedule_tasks import schedule_tasks
from k31compile.passes.schedule.super_kernels import aggregate_super_kernels, predict_merged
from k31compile.passes.schedule.tasks import Task, TaskGraph, enclose
from k31compile.passes.schedule.verify_schedule import verify_schedule

COSTS = load_costs("ascend-a3")
LAUNCH, STEP = COSTS.launch.value, COSTS.join.value


def anything(task):
    return True


def is_operator(task):
    return task.name not in ("enter", "return")


def chain(seconds, **kinds):
    """Tasks t0, t1, ... each of which takes the result of the one before it."""
    tasks = []
    for place, took in enumerate(seconds):
        inputs = (f"t{place - 1}",) if place else ()
        tasks.append(Task(f"t{place}", took, kinds.get(f"t{place}", "vector"), inputs=inputs))
    return TaskGraph(tasks)


def aggregated(graph, can_join=anything, streams=4, **options):
    schedule = schedule_tasks(graph, COSTS.event.value, streams)
    found = aggregate_super_kernels(graph, schedule, COSTS, can_join, **options)
    verify_schedule(graph, found, can_join)
    return found


def members(schedule):
    return [region.tasks for region in schedule.super_kernels]


def test_a_chain_of_short_tasks_is_one_region_and_saves_its_launches():
    graph = chain([4e-6] * 6)
    schedule = aggregated(graph)
    assert members(schedule) == [("t0", "t1", "t2", "t3", "t4", "t5")]
    assert schedule.super_kernels[0].options == ()
    said = predict_merged(graph, schedule, COSTS)
    assert (said.launches_before, said.launches_after) == (6, 1)
    assert said.seconds_before == schedule.predicted == pytest.approx(6 * 4e-6)
    assert said.seconds_after == pytest.approx(LAUNCH + 6 * (4e-6 - LAUNCH) + 5 * STEP)
    assert schedule.times == schedule_tasks(graph, COSTS.event.value).times, (
        "its own times are those of single launches"
    )


def test_a_long_task_ends_a_region():
    schedule = aggregated(chain([4e-6, 4e-6, 9e-6, 4e-6, 4e-6, 4e-6]))
    assert members(schedule) == [("t0", "t1"), ("t3", "t4", "t5")]


def test_what_the_target_cannot_merge_ends_a_region():
    schedule = aggregated(chain([4e-6] * 5), can_join=lambda task: task.name != "t2")
    assert members(schedule) == [("t0", "t1"), ("t3", "t4")]


def test_a_collective_joins_only_where_it_is_allowed():
    graph = chain([4e-6] * 5, t2="communication")
    assert members(aggregated(graph)) == [("t0", "t1"), ("t3", "t4")]
    assert members(aggregated(graph, communication=True)) == [("t0", "t1", "t2", "t3", "t4")]


def test_the_caller_s_ends_stay_outside():
    tasks = enclose([Task("a", 4e-6, "vector"), Task("b", 4e-6, "vector", inputs=("a",))])
    assert members(aggregated(TaskGraph(tasks), is_operator)) == [("a", "b")]


def test_one_task_is_no_region_and_neither_are_views():
    assert members(aggregated(chain([4e-6]))) == []
    assert members(aggregated(chain([0.0, 4e-6, 0.0, 0.0]))) == []
    assert members(aggregated(chain([0.0, 4e-6, 0.0, 4e-6, 0.0]))) == [("t1", "t2", "t3")]


def two_streams():
    """Two chains of short tasks beside each other, and a join."""
    rows = [Task("a0", 5e-6, "vector"), Task("b0", 5e-6, "vector")]
    for place in range(1, 4):
        rows.append(Task(f"a{place}", 5e-6, "vector", inputs=(f"a{place - 1}",)))
        rows.append(Task(f"b{place}", 5e-6, "vector", inputs=(f"b{place - 1}",)))
    return TaskGraph([*rows, Task("join", 5e-6, "vector", inputs=("a3", "b3"))])


def test_a_region_over_two_streams_says_so():
    schedule = aggregated(two_streams())
    (region,) = schedule.super_kernels
    assert len({schedule.stream_of[name] for name in region.tasks}) == 2
    assert region.options == (("stream-fusion", "1"),)
    said = predict_merged(two_streams(), schedule, COSTS)
    assert said.launches_after == 1
    assert said.seconds_after < said.seconds_before


def test_a_short_task_does_not_hold_up_a_long_one():
    """`feed` is waited for by the long task of the other stream; merged with what follows it, that would start late."""
    rows = [Task("feed", 4e-6, "vector"), Task("long", 60e-6, "cube", inputs=("feed",))]
    rows += [Task(f"t{i}", 5.9e-6, "vector", inputs=("feed" if i == 0 else f"t{i - 1}",)) for i in range(6)]
    graph = TaskGraph([*rows, Task("join", 50e-6, "vector", inputs=("long", "t5"))])
    schedule = aggregated(graph)
    assert all("feed" not in region.tasks for region in schedule.super_kernels)
    said = predict_merged(graph, schedule, COSTS)
    assert said.launches_after < said.launches_before
    assert said.seconds_after <= said.seconds_before + 1e-12


def test_a_step_that_costs_as_much_as_a_launch_gains_nothing():
    costs = replace(COSTS, join=Figure(LAUNCH, "s", "assumed: as long as a launch"))
    graph = chain([4e-6] * 6)
    assert aggregate_super_kernels(graph, schedule_tasks(graph, 1e-6), costs, anything).super_kernels == ()


def test_without_a_figure_for_a_step_it_is_refused_in_a_line():
    graph = chain([4e-6] * 3)
    schedule = schedule_tasks(graph, 1e-6)
    with pytest.raises(ScheduleError, match="the figures of 'cuda' have none for a step inside a super kernel; give"):
        aggregate_super_kernels(graph, schedule, load_costs("cuda"), anything)


def drawn(name, most=40, least=8):
    """A drawn graph of mostly short tasks with its schedule and regions."""
    draw = random.Random(name)
    graph = drawn_graph(draw, most=most, least=least)
    tasks = [replace(task, seconds=draw.choice([0.0, 3.5e-6, 4e-6, 5e-6, 5e-6, 20e-6])) for task in graph.tasks]
    graph = TaskGraph(tasks)
    schedule = schedule_tasks(graph, COSTS.event.value, draw.choice([1, 2, 3, 4]))
    return graph, aggregate_super_kernels(graph, schedule, COSTS, anything, communication=draw.random() < 0.5)


@pytest.mark.parametrize("count", [15, pytest.param(300, marks=pytest.mark.slow)])
def test_drawn_schedules_keep_their_order_and_are_predicted_to_be_no_slower(count):
    regions = 0
    for seed in range(count):
        graph, schedule = drawn(f"aggregate {seed}")
        verify_schedule(graph, schedule)
        assert Schedule.from_dict(schedule.to_dict()) == schedule
        order = schedule.issue_order()
        for region in schedule.super_kernels:
            at = order.index(region.tasks[0])
            assert order[at : at + len(region.tasks)] == region.tasks, "nothing is moved"
        said = predict_merged(graph, schedule, COSTS)
        assert said.seconds_after <= said.seconds_before * (1 + 1e-9)
        assert said.launches_before == sum(task.seconds > 0 for task in graph.tasks)
        regions += len(schedule.super_kernels)
    assert regions > count


def test_without_regions_the_prediction_is_the_schedule_s_own():
    for seed in range(15):
        graph, schedule = drawn(f"none {seed}")
        said = predict_merged(graph, replace(schedule, super_kernels=()), COSTS)
        assert said.launches_after == said.launches_before
        assert said.seconds_after == pytest.approx(schedule.predicted, rel=0.02)


@pytest.mark.parametrize("count", [4, pytest.param(25, marks=pytest.mark.slow)])
def test_five_hundred_interleavings_with_regions_equal_the_serial_run(count):
    played = 0
    for seed in range(count * 3):
        graph, schedule = drawn(f"play {seed}", most=25)
        if not schedule.super_kernels:
            continue
        expected = play_serial(graph, mix, CACHES)
        assert all(play_schedule(graph, schedule, mix, CACHES, one) == expected for one in range(500))
        played += 1
    assert played >= count


def test_a_region_runs_as_one():
    graph, schedule = two_streams(), aggregated(two_streams())
    (region,) = schedule.super_kernels
    for seed in range(20):
        order = []
        play_schedule(graph, schedule, lambda task, memory, to=order: to.append(task.name), {}, seed)
        at = order.index(region.tasks[0])
        assert tuple(order[at : at + len(region.tasks)]) == region.tasks


def test_regions_that_wait_for_each_other_stop():
    graph = TaskGraph([Task(name, 1.0, "vector") for name in "abcd"])
    regions = (SuperKernel("x", ("a", "d")), SuperKernel("y", ("c", "b")))
    stuck = Schedule((("a", "b"), ("c", "d")), (), (), {}, 0.0, 4.0, 1.0, 2.0, regions)
    with pytest.raises(ScheduleError, match="no stream can go on: a, c wait for each other"):
        play_schedule(graph, stuck, mix, {}, 0)


@pytest.mark.slow
def test_twenty_thousand_tasks_in_seconds(capsys):
    draw = random.Random(0)
    tasks = []
    for place in range(20_000):
        inputs = {f"t{draw.randint(max(0, place - 20), place - 1)}" for _ in range(draw.randint(0, 3)) if place}
        seconds = draw.choice([3.5e-6, 4e-6, 4e-6, 5e-6, 25e-6])
        tasks.append(
            Task(f"t{place}", seconds, draw.choice(["cube", "vector", "vector"]), inputs=tuple(sorted(inputs)))
        )
    graph = TaskGraph(tasks)
    schedule = schedule_tasks(graph, COSTS.event.value, search=0)
    start = time.perf_counter()
    found = aggregate_super_kernels(graph, schedule, COSTS, anything)
    aggregated = time.perf_counter()
    verify_schedule(graph, found, anything)
    verified = time.perf_counter()
    said = predict_merged(graph, found, COSTS)
    with capsys.disabled():
        print(
            f"\n20,000 tasks: {len(found.super_kernels)} regions in {aggregated - start:.1f} s, verified in "
            f"{verified - aggregated:.1f} s; launches {said.launches_before} -> {said.launches_after}, predicted "
            f"{said.seconds_after / said.seconds_before:.2f} of the time"
        )
    assert len(found.super_kernels) > 100
    assert aggregated - start < 30
