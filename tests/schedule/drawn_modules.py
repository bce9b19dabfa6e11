"""Graphs drawn at random, as the dispatcher sees them: products, sums, views, and caches that are written in place."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from k31compile.passes.schedule.cost_model import load_costs
from k31compile.passes.schedule.graph_tasks import tasks_of
from k31compile.passes.schedule.schedule_tasks import schedule_tasks
from k31compile.passes.schedule.super_kernels import aggregate_super_kernels
from k31compile.passes.schedule.tasks import TaskGraph
from k31compile.passes.schedule.verify_schedule import verify_schedule

SIZE = 8
COSTS = load_costs("ascend-a3")


def inputs(seed=0):
    """Two matrices, and two caches that a graph may write."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(SIZE, SIZE, generator=generator) for _ in range(4)]


def drawn_module(draw, steps=20):
    """A graph of so many steps over two matrices and two caches, and what it returns: some of its values."""
    plan = [(draw.choice(sorted(STEPS)), draw.random(), draw.random(), draw.randrange(SIZE)) for _ in range(steps)]
    returned = [draw.random() for _ in range(2)]

    def run(x, weight, cache, state):
        values = [x, weight]

        def pick(share):
            return values[int(share**0.5 * len(values))]

        for kind, one, other, row in plan:
            made = STEPS[kind](pick(one), pick(other), (cache, state)[row % 2], row)
            if made is not None:
                values.append(made)
        return tuple(pick(share) * 1.0 for share in returned)

    with FakeTensorMode():
        fakes = [torch.empty(SIZE, SIZE) for _ in range(4)]
        module = make_fx(run)(*fakes)
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


def _write_row(one, other, cache, row):
    cache[row].copy_(one[0])


def _write_rows(one, other, cache, row):
    first = min(row, SIZE - 2)
    cache.index_put_((torch.arange(first, first + 2),), one[:2])


def _two(one, other, cache, row):
    left, right = (one * 2).split(SIZE // 2, dim=1)
    return torch.cat([right, left], dim=1)


STEPS = {
    "product": lambda one, other, cache, row: torch.tanh(one @ other),
    "sum": lambda one, other, cache, row: one + other,
    "turned": lambda one, other, cache, row: one.t() - other,
    "soft": lambda one, other, cache, row: torch.softmax(one, dim=-1),
    "two": _two,
    "write_row": _write_row,
    "write_rows": _write_rows,
    "read": lambda one, other, cache, row: cache[row] + one,
    "read_all": lambda one, other, cache, row: cache @ one * 0.1,
}


def scheduled(module, streams=4, merge=lambda task: False):
    """The tasks of a graph and a verified schedule of them, with the regions that `merge` allows."""
    graph = TaskGraph(tasks_of(module, COSTS))
    schedule = schedule_tasks(graph, COSTS.event.value, streams)
    names = {node.name for node in module.graph.nodes}
    schedule = aggregate_super_kernels(graph, schedule, COSTS, lambda task: task.name in names and merge(task))
    verify_schedule(graph, schedule)
    return graph, schedule
