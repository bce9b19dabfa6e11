"""What people place by hand in a decode layer comes out of the method, which knows no operator by its name."""

import pytest

from k31compile.passes.schedule.schedule_tasks import schedule_tasks
from k31compile.passes.schedule.tasks import Task, TaskGraph, enclose
from k31compile.passes.schedule.verify_schedule import verify_schedule

EVENT = 0.2


def layer():
    """Latent attention with an output gate, then routed experts with a shared one, in the order of its source."""
    rows = [
        ("norm", 1.0, "vector", ()),
        ("q_down", 2.0, "cube", ("norm",)),
        ("q_up", 4.0, "cube", ("q_down",)),
        ("q_rotate", 2.0, "vector", ("q_up",)),
        ("kv_down", 1.0, "cube", ("norm",)),
        ("kv_norm", 1.5, "vector", ("kv_down",)),
        ("latent_write", 1.5, "memory", ("kv_norm",)),
        ("attention", 9.0, "vector", ("q_rotate",)),
        ("gate", 3.0, "cube", ("norm",)),
        ("gated", 1.0, "vector", ("attention", "gate")),
        ("o_proj", 3.0, "cube", ("gated",)),
        ("router", 1.0, "cube", ("o_proj",)),
        ("top_k", 1.5, "vector", ("router",)),
        ("dispatch", 4.0, "communication", ("top_k", "o_proj")),
        ("experts", 5.0, "cube", ("dispatch",)),
        ("combine", 4.0, "communication", ("experts",)),
        ("shared_up", 3.0, "cube", ("o_proj",)),
        ("shared_act", 1.0, "vector", ("shared_up",)),
        ("shared_down", 2.0, "cube", ("shared_act",)),
        ("add", 1.0, "vector", ("combine", "shared_down")),
    ]
    memory = {"latent_write": ((), ("latents",)), "attention": (("latents",), ())}
    return TaskGraph(
        enclose(Task(name, took, engine, *memory.get(name, ((), ())), inputs) for name, took, engine, inputs in rows)
    )


@pytest.fixture(scope="module")
def schedule():
    found = schedule_tasks(layer(), EVENT)
    verify_schedule(layer(), found)
    return found


def overlap(schedule, one, other):
    (start, end), (since, until) = schedule.times[one], schedule.times[other]
    return max(0.0, min(end, until) - max(start, since))


def test_the_latent_is_written_beside_the_query(schedule):
    beside = [overlap(schedule, one, other) for one in ("kv_norm", "latent_write") for other in ("q_down", "q_up")]
    assert sum(beside) == pytest.approx(3.0)


def test_the_output_gate_is_computed_before_attention_ends(schedule):
    assert schedule.times["gate"][1] < schedule.times["attention"][1]
    assert schedule.times["gated"][0] == schedule.times["attention"][1]


def test_the_shared_expert_runs_while_the_routed_ones_communicate(schedule):
    shared = ("shared_up", "shared_act", "shared_down")
    beside = sum(overlap(schedule, one, other) for one in shared for other in ("top_k", "dispatch", "combine"))
    assert beside == pytest.approx(6.0)


def test_the_caller_is_waited_for_and_waits(schedule):
    assert schedule.streams[0][-1] == "return"
    assert schedule.issue_order()[0] == "enter"


def test_little_is_lost_to_the_critical_path(schedule):
    assert schedule.predicted <= 1.10 * schedule.critical_path
    assert schedule.predicted < 0.8 * schedule.serial
    assert len(schedule.streams) <= 3
