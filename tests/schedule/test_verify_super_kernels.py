"""The verifier of regions: whatever is added, left out, turned around or put in twice is told with its task."""

import ast
import random
from dataclasses import replace
from pathlib import Path

import pytest
from test_super_kernels import anything, drawn

from k31compile.errors import ScheduleError
from k31compile.passes.schedule import verify_super_kernels as module
from k31compile.passes.schedule.schedule import Schedule, SuperKernel
from k31compile.passes.schedule.tasks import Task, TaskGraph
from k31compile.passes.schedule.verify_schedule import verify_schedule

GRAPH = TaskGraph(
    [
        Task("a", 1.0, "vector"),
        Task("b", 1.0, "vector", writes=("cache",), inputs=("a",)),
        Task("c", 1.0, "vector", inputs=("a",)),
        Task("d", 1.0, "vector", reads=("cache",), inputs=("c",)),
        Task("e", 1.0, "vector", inputs=("d",)),
    ]
)
TIMES = {"a": (0.0, 1.0), "b": (1.0, 2.0), "c": (1.0, 2.0), "d": (2.0, 3.0), "e": (3.0, 4.0)}
PLAIN = Schedule((("a", "c", "d", "e"), ("b",)), (("a", "b"), ("b", "d")), (("a", 1),), TIMES, 0.0, 5.0, 4.0, 4.0)
FUSED = (("stream-fusion", "1"),)


def regions(*tasks, options=FUSED):
    made = tuple(SuperKernel(f"sk{number}", tuple(names), options) for number, names in enumerate(tasks))
    return replace(PLAIN, super_kernels=made)


@pytest.mark.parametrize("tasks", [("ac",), ("acb",), ("cb", "de"), ("acbde",), ("bde",)])
def test_the_right_ones_pass(tasks):
    verify_schedule(GRAPH, regions(*tasks), anything)


@pytest.mark.parametrize(
    ("tasks", "words"),
    [
        (("acd",), "'b' comes after 'a' and before 'd', and is no part of their super kernel .sk0"),
        (("ad",), "'c' comes after 'a' and before 'd', and is no part"),
        (("ca",), "super kernel 'sk0' goes on with 'a'"),
        (("cd",), "'b' is issued after 'c', and super kernel 'sk0' goes on with 'd'"),
        (("ac", "cb"), "'c' is in super kernel 'sk0' and again in 'sk1'"),
        (("aca",), "'a' is in super kernel 'sk0' and again in 'sk0'"),
        (("ax",), "holds 'x', which is no task"),
        (("a",), "super kernel 'sk0' merges nothing"),
        (("",), "super kernel 'sk0' merges nothing"),
    ],
)
def test_a_wrong_one_is_told_with_its_task(tasks, words):
    with pytest.raises(ScheduleError, match=words):
        verify_schedule(GRAPH, regions(*tasks))


def test_names_options_and_what_the_target_merges():
    with pytest.raises(ScheduleError, match=r"'sk0' holds tasks of 2 streams .without stream-fusion=1"):
        verify_schedule(GRAPH, regions("acb", options=()))
    twice = replace(PLAIN, super_kernels=(SuperKernel("one", ("a", "c")), SuperKernel("one", ("d", "e"))))
    with pytest.raises(ScheduleError, match="two super kernels are named 'one'"):
        verify_schedule(GRAPH, twice)
    with pytest.raises(ScheduleError, match="'sk0' holds 'e', which the target cannot merge"):
        verify_schedule(GRAPH, regions("de"), lambda task: task.name != "e")


def test_what_memory_orders_into_the_middle_is_seen_without_an_event():
    """The regions alone: a writer stands between two members by the memory that it shares with them, by no event."""
    tasks = {task.name: task for task in GRAPH.tasks}
    apart = replace(regions("acd"), events=(("a", "b"),))
    with pytest.raises(ScheduleError, match="'b' comes after 'a' and before 'd'"):
        module.verify_super_kernels(tasks, apart, [("b", "d")])


def mutations(draw, schedule):
    """Schedules whose regions are wrong, each by one change; and a word for the change."""
    order, found = schedule.issue_order(), []
    for number, region in enumerate(schedule.super_kernels):
        tasks, at = region.tasks, order.index(region.tasks[0])
        one = draw.randrange(len(tasks) - 1)
        found.append((number, "swap", (*tasks[:one], tasks[one + 1], tasks[one], *tasks[one + 2 :])))
        if len(tasks) > 2:
            middle = draw.randrange(1, len(tasks) - 1)
            found.append((number, "drop", tasks[:middle] + tasks[middle + 1 :]))
        found.append((number, "twice", (*tasks, tasks[one])))
        if at + len(tasks) + 1 < len(order):
            found.append((number, "gap", (*tasks, order[at + len(tasks) + 1])))
        if number + 1 < len(schedule.super_kernels):
            found.append((number, "overlap", (*tasks, *schedule.super_kernels[number + 1].tasks[:1])))
        if len({schedule.stream_of[name] for name in tasks}) > 1:
            found.append((number, "options", tasks))
    for number, change, tasks in found:
        changed = list(schedule.super_kernels)
        options = () if change == "options" else (("stream-fusion", "1"),)
        changed[number] = SuperKernel(changed[number].name, tuple(tasks), options)
        yield change, replace(schedule, super_kernels=tuple(changed))


@pytest.mark.parametrize("count", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_every_change_of_a_region_is_noticed(count):
    seen = dict.fromkeys(("swap", "drop", "twice", "gap", "overlap", "options"), 0)
    for seed in range(count):
        graph, schedule = drawn(f"mutate {seed}")
        verify_schedule(graph, schedule)
        for change, wrong in mutations(random.Random(seed), schedule):
            with pytest.raises(ScheduleError):
                verify_schedule(graph, wrong)
            seen[change] += 1
    assert all(number > 5 for number in seen.values()), seen


def test_a_keep_or_an_event_that_is_dropped_is_noticed_with_regions_too():
    dropped = 0
    for seed in range(25):
        graph, schedule = drawn(f"dropped {seed}", most=25)
        for part in ("keeps", "events"):
            for one in getattr(schedule, part):
                rest = tuple(other for other in getattr(schedule, part) if other != one)
                with pytest.raises(ScheduleError):
                    verify_schedule(graph, replace(schedule, **{part: rest}))
                dropped += 1
    assert dropped > 50


def test_it_knows_nothing_of_the_aggregation():
    tree = ast.parse(Path(module.__file__).read_text())
    ours = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and "k31compile" in node.module}
    assert ours == {
        "k31compile.errors",
        "k31compile.passes.schedule.schedule",
        "k31compile.passes.schedule.tasks",
    }
