"""The decode step of the small K3.1 by its own schedule: results and caches, on streams and with super kernels."""

import copy
import time
from dataclasses import replace

import pytest
import torch

from k31compile.backend import captured_graph
from k31compile.cli.entries import shipped_entries
from k31compile.passes.schedule.cost_model import load_costs
from k31compile.passes.schedule.graph_tasks import tasks_of
from k31compile.passes.schedule.schedule_tasks import schedule_tasks
from k31compile.passes.schedule.super_kernels import aggregate_super_kernels
from k31compile.passes.schedule.tasks import TaskGraph
from k31compile.passes.schedule.verify_schedule import verify_schedule
from k31compile.targets.streams.prepare import prepare_graph
from k31compile.targets.streams.scheduled_module import ScheduledModule

COSTS = load_costs("ascend-a3")


@pytest.fixture(scope="module")
def step():
    """The prepared graph, its inputs, its schedule, and what the model itself returns and leaves in its caches."""
    (entry,) = shipped_entries("tiny", "decode", "fp32")
    eager = copy.deepcopy(entry)
    with entry.grad_mode():
        captured, given = captured_graph(entry.model, entry.args, entry.kwargs, "cpu")
    given = [value.clone() for value in given]
    module = prepare_graph(captured)
    graph = TaskGraph(tasks_of(module, COSTS))
    schedule = schedule_tasks(graph, COSTS.event.value)
    verify_schedule(graph, schedule)
    with torch.no_grad():
        expected = eager.call()
    return module, given, graph, schedule, expected


def run_once(run, given):
    values = [value.clone() for value in given]
    with torch.no_grad():
        return [*run(*values), *values]


def held_up(stream):
    return lambda number, name: time.sleep(0.001) if number == stream else None


def test_streams_give_bit_for_bit_what_the_graph_gives(step):
    module, given, _, schedule, expected = step
    assert len(schedule.streams) > 1
    serial = run_once(module, given)
    torch.testing.assert_close(serial[0], expected, rtol=1e-4, atol=1e-4)
    for late in range(len(schedule.streams)):
        slow = ScheduledModule(module, schedule, poison=True, watch=held_up(late))
        assert all(torch.equal(one, other) for one, other in zip(run_once(slow, given), serial, strict=True))
        slow.close()


@pytest.mark.slow
def test_super_kernels_are_one_call_each(step):
    module, given, graph, schedule, _ = step
    names = {node.name for node in module.graph.nodes}

    def can_join(task):
        return task.name in names and not task.name.startswith(("attn_res", "grouped", "mega", "moe", "lightning"))

    merged = aggregate_super_kernels(graph, schedule, COSTS, can_join)
    merged = replace(merged, super_kernels=merged.super_kernels[:3])
    verify_schedule(graph, merged, can_join)
    assert len(merged.super_kernels) == 3
    run = ScheduledModule(module, merged, poison=True)
    torch.testing.assert_close(run_once(run, given), run_once(module, given), rtol=1e-4, atol=1e-4)
    apart = ScheduledModule(module, schedule)
    run_once(apart, given)
    assert apart.launched == sum(task.seconds > 0 for task in graph.tasks)
    assert run.launched == apart.launched - sum(len(region.tasks) - 1 for region in merged.super_kernels)
