"""Graphs as tasks: views are none, memory keeps its name, work is counted by what an operator has to do."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import k31compile.kernels  # noqa: F401  (registers the operators)
from k31compile.passes.schedule.cost_model import load_costs
from k31compile.passes.schedule.graph_tasks import tasks_of
from k31compile.passes.schedule.tasks import TaskGraph
from k31compile.passes.schedule.work import work_of

COSTS = load_costs("ascend-a3")


def traced(function, *inputs):
    return make_fx(function, tracing_mode="fake")(*inputs)


def by_name(module):
    return {task.name: task for task in tasks_of(module, COSTS)}


def test_views_are_no_tasks_and_readers_take_what_they_are_views_of():
    def function(x):
        halves = (x + 1).view(2, 8).transpose(0, 1).split(4)
        return halves[0].narrow(1, 0, 1).mul(2), halves[1].to(torch.float32).sum()

    tasks = by_name(traced(function, torch.zeros(16)))
    assert list(tasks) == ["enter", "add", "mul", "sum_1", "return"]
    assert tasks["mul"].inputs == tasks["sum_1"].inputs == ("enter", "add")


def test_a_cast_that_changes_the_dtype_is_a_task():
    tasks = by_name(traced(lambda x: x.to(torch.bfloat16) * 2, torch.zeros(16)))
    assert list(tasks) == ["enter", "_to_copy", "mul", "return"]


def test_a_cache_keeps_its_name_through_views_and_writes():
    def function(cache, row, where):
        flat = cache.view(-1, 4)
        flat.index_put_((where,), row)
        return cache.sum(), row * 2

    module = traced(function, torch.zeros(2, 3, 4), torch.zeros(1, 4), torch.tensor([2]))
    cache = next(iter(module.graph.nodes)).name
    tasks = by_name(module)
    write, read = (tasks[name] for name in ("index_put_", "sum_1"))
    assert write.writes == (cache,)
    assert cache in read.reads
    assert ("index_put_", "sum_1") in set(TaskGraph(tasks.values()).edges())
    assert ("index_put_", "mul") not in set(TaskGraph(tasks.values()).edges())


def test_a_value_written_in_place_orders_its_readers():
    def function(x):
        made = x + 1
        before = made * 2
        made.add_(1)
        return before, made * 3

    edges = set(TaskGraph(tasks_of(traced(function, torch.zeros(4)), COSTS)).edges())
    assert {("mul", "add_"), ("add_", "mul_1")} <= edges


def works(function, *inputs):
    return {node.name: work_of(node) for node in traced(function, *inputs).graph.nodes if node.op == "call_function"}


def test_a_product_is_counted_on_the_cube():
    work = works(torch.mm, torch.zeros(3, 5), torch.zeros(5, 7))["mm"]
    assert work.engine == "cube"
    assert work.flops == 2 * 3 * 5 * 7
    assert work.bytes_moved == 4 * (15 + 35 + 21)


def test_rows_of_a_table_are_moved_and_not_the_table():
    work = works(lambda table, where: table.index_select(0, where), torch.zeros(1000, 8), torch.zeros(3, dtype=int))
    assert work["index_select"].bytes_moved == 2 * 3 * 8 * 4


@pytest.mark.parametrize("experts", [4, 64])
def test_of_the_experts_those_are_read_that_can_be_named(experts):
    stacks = [torch.zeros(experts, 6, 8), torch.zeros(experts, 6, 8), torch.zeros(experts, 8, 6)]

    def function(x, chosen, weights, gate, up, down):
        return torch.ops.k31.grouped_experts(x, chosen, weights, [gate], [up], [down])

    chosen = torch.zeros(2, 4, dtype=torch.int32)
    work = works(function, torch.zeros(2, 8), chosen, torch.zeros(2, 4), *stacks)["grouped_experts"]
    assert work.flops == 2 * 8 * 3 * 48
    assert work.bytes_moved == pytest.approx(4 * 3 * 48 * min(experts, 8) + 4 * 2 * 8)
