"""Tasks: what a list of them may not be, and which of two tasks with memory in common comes first."""

import pytest

from k31compile.errors import ScheduleError
from k31compile.passes.schedule.tasks import Task, TaskGraph, enclose


def task(name, *inputs, reads=(), writes=(), seconds=1.0, engine="vector"):
    return Task(name, seconds, engine, tuple(reads), tuple(writes), inputs)


@pytest.mark.parametrize(
    ("tasks", "words"),
    [
        ([task("a"), task("a")], "two tasks are named 'a'"),
        ([task("a", "b")], "'a' takes 'b', which does not come before it"),
        ([task("a", "b"), task("b", "a")], "'a' takes 'b', which does not come before it .* cycle|cycle"),
        ([task("a", "a")], "'a' takes 'a', which does not come before it"),
        ([task("a", engine="tensor")], "names no engine: 'tensor'; known: cube, vector"),
        ([task("a", seconds=-1.0)], "'a' takes -1.0 seconds"),
        ([task("a", seconds=float("nan"))], "'a' takes nan seconds"),
    ],
)
def test_a_list_that_cannot_be_run_is_refused(tasks, words):
    with pytest.raises(ScheduleError, match=words):
        TaskGraph(tasks)


def test_memory_in_common_gives_an_order():
    graph = TaskGraph(
        [
            task("write", writes=["cache"]),
            task("read", reads=["cache"]),
            task("look", reads=["cache"]),
            task("again", writes=["cache"]),
            task("last", reads=["cache"]),
            task("other", reads=["weights"]),
        ]
    )
    assert set(graph.edges()) == {
        ("write", "read"),
        ("write", "look"),
        ("write", "again"),
        ("read", "again"),
        ("look", "again"),
        ("again", "last"),
    }


def test_a_result_that_is_changed_in_place_is_read_by_those_after_it_only_then():
    graph = TaskGraph([task("a"), task("early", "a"), task("b", "a", writes=["a"]), task("late", "a")])
    assert ("early", "b") in set(graph.edges())
    assert ("b", "late") in set(graph.edges())


def test_a_task_may_write_what_it_reads():
    assert list(TaskGraph([task("a", reads=["cache"], writes=["cache"])]).edges()) == []


def test_the_bounds():
    chain = [task("a", seconds=2.0), task("b", "a", seconds=3.0), task("c", seconds=4.0, engine="cube")]
    graph = TaskGraph([*chain, task("d", seconds=4.5, engine="cube")])
    assert (graph.serial, graph.critical_path, graph.bound) == (13.5, 5.0, 8.5)
    assert TaskGraph([]).bound == TaskGraph([]).critical_path == TaskGraph([]).serial == 0.0


def test_enclosed_tasks_wait_for_the_caller_and_are_waited_for():
    graph = TaskGraph(enclose([task("a"), task("b", "a"), task("write", writes=["cache"])]))
    assert [one.name for one in graph.tasks] == ["enter", "a", "b", "write", "return"]
    assert set(graph.edges()) == {
        *(("enter", name) for name in ("a", "b", "write", "return")),
        ("a", "b"),
        ("b", "return"),
        ("write", "return"),
    }
