"""Super kernels on the CPU: each is one compiled call, writes its caches in place, and gives the same numbers."""

import random

import pytest
import torch
from drawn_modules import drawn_module, inputs, scheduled
from torch.fx.experimental.proxy_tensor import make_fx

from k31compile.passes.schedule.schedule import Schedule, SuperKernel
from k31compile.targets.streams.scheduled_module import ScheduledModule


def every(draw):
    """Most tasks may join, so that there are several regions with others between them."""
    return lambda task: draw.random() < 0.9


@pytest.mark.parametrize("count", [1, pytest.param(12, marks=pytest.mark.slow)])
def test_drawn_graphs_with_regions_give_what_they_give_eagerly(count):
    regions = 0
    for seed in range(count):
        draw = random.Random(f"merged {seed}")
        module = drawn_module(draw, steps=14)
        _, schedule = scheduled(module, merge=every(draw))
        given, expected = inputs(seed), inputs(seed)
        results = [*module(*expected), *expected]
        run = ScheduledModule(module, schedule, poison=True)
        torch.testing.assert_close([*run(*given), *given], results)
        apart = ScheduledModule(module, schedule, merge=False)
        apart(*inputs(seed))
        saved = sum(len(region.tasks) - 1 for region in schedule.super_kernels)
        assert run.launched == apart.launched - saved
        regions += len(schedule.super_kernels)
    assert regions >= count


def writes_and_reads(x, cache):
    a = torch.exp(x)
    view = cache[0]
    view.add_(a)
    b = cache[0] * 2
    cache[1].copy_(b)
    return torch.tanh(b), cache.sum(0)


def test_writes_inside_of_a_region_are_seen_inside_and_outside():
    module = make_fx(writes_and_reads, tracing_mode="fake")(torch.zeros(8), torch.zeros(2, 8))
    order = [node.name for node in module.graph.nodes if node.name.partition("_")[0] in TASKS]
    schedule = Schedule((tuple(order),), (), (), {}, 0.0, 0.0, 0.0, 0.0, (SuperKernel("all", tuple(order[1:])),))
    run = ScheduledModule(module, schedule, poison=True)
    cache, expected = torch.ones(2, 8), torch.ones(2, 8)
    x = torch.randn(8)
    for _ in range(2):
        wanted = [*writes_and_reads(x, expected), expected]
        torch.testing.assert_close([*run(x, cache), cache], wanted)
        assert run.launched == 2


TASKS = ("exp", "add", "mul", "copy", "tanh", "sum")


def test_one_memory_under_two_names_is_not_handed_to_what_was_compiled_for_two():
    def run(one, other):
        one.add_(1)
        return (other * 2,)

    module = make_fx(run, tracing_mode="fake")(torch.zeros(4), torch.zeros(4))
    schedule = Schedule((("add_", "mul"),), (), (), {}, 0.0, 0.0, 0.0, 0.0, (SuperKernel("both", ("add_", "mul")),))
    merged = ScheduledModule(module, schedule)
    both = torch.ones(4)
    assert merged(both, both)[0].tolist() == [4.0] * 4
    assert merged(torch.ones(4), torch.ones(4))[0].tolist() == [2.0] * 4
