"""Calls that are equal become one, unless what they read is written, they are random, or they leave the graph."""

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from k31compile.targets.ascend.share_equal import drop_dead_copies, share_equal_calls


def shared(function, *inputs):
    module = make_fx(function)(*inputs)
    gone = share_equal_calls(module.graph)
    module.recompile()
    copies = [tensor.clone() for tensor in inputs]
    torch.testing.assert_close(module(*copies), function(*[tensor.clone() for tensor in inputs]), rtol=0, atol=0)
    return gone


def test_chains_that_are_equal_are_computed_once():
    def function(x):
        return ((x.view(-1) + 1) * 2) - ((x.view(-1) + 1) * 2).abs()

    assert shared(function, torch.randn(3, 4)) == 3


@pytest.mark.parametrize("part", [lambda x: x.max(1)[0], lambda x: (x + 1).view(-1), lambda x: x.exp()[1]])
def test_two_results_are_never_one_memory(part):
    module = make_fx(lambda x: (part(x), part(x)))(torch.randn(3, 4))
    share_equal_calls(module.graph)
    module.recompile()
    one, other = module(torch.randn(3, 4))
    kept = other.clone()
    one.add_(1)
    assert torch.equal(other, kept)


def test_constants_of_every_layer_are_made_once():
    def function(x):
        return (x + torch.arange(4)) * (x - torch.arange(4)) + torch.full((4,), 2.0) + torch.full((4,), 2.0)

    assert shared(function, torch.randn(4)) == 2


@pytest.mark.parametrize("wanted", [(1, 1.0), (True, 1), (0, False)])
def test_arguments_that_compare_equal_and_are_not(wanted):
    def function(x):
        one, other = wanted
        return torch.full((2,), one).sum() * 1.0 + torch.full((2,), other).sum() + x

    assert shared(function, torch.randn(1)) == 0


def test_what_reads_a_written_cache_stays():
    def function(cache, where):
        before = cache.index_select(0, where) * 1
        cache.index_fill_(0, where, 7.0)
        return before, cache.index_select(0, where) * 1

    assert shared(function, torch.randn(3, 2), torch.tensor([1])) == 0


def test_what_reads_a_view_of_a_written_value_stays():
    def function(x):
        made = x + 1
        rows = made.view(-1)
        before = rows[0] * 2
        made.mul_(3)
        return before + 0, made.view(-1)[0] * 2 + 0

    assert shared(function, torch.randn(2, 2)) == 0


def test_a_view_that_is_written_counts_for_its_whole():
    graph = fx.Graph()
    whole = graph.placeholder("whole")
    before = graph.call_function(torch.ops.aten.mul.Tensor, (whole, 2))
    part = graph.call_function(torch.ops.aten.narrow.default, (whole, 0, 0, 1))
    graph.call_function(torch.ops.aten.add_.Tensor, (part, 1))
    after = graph.call_function(torch.ops.aten.mul.Tensor, (whole, 2))
    graph.output(graph.call_function(torch.ops.aten.sub.Tensor, (after, before)))
    assert share_equal_calls(graph) == 0


def without_dead_copies(function, *inputs):
    module = make_fx(function)(*inputs)
    gone = drop_dead_copies(module.graph)
    module.recompile()
    copies = [tensor.clone() for tensor in inputs]
    expected = [tensor.clone() for tensor in inputs]
    torch.testing.assert_close(module(*copies), function(*expected), rtol=0, atol=0)
    torch.testing.assert_close(copies, expected, rtol=0, atol=0)
    return gone


def test_a_copy_over_what_is_read_no_more_goes_away():
    def function(x):
        made = x * 2
        return made.copy_(made + 1) * 3

    assert without_dead_copies(function, torch.randn(3)) == 1


def test_what_is_read_later_by_its_first_name_stays():
    graph = fx.Graph()
    x = graph.placeholder("x")
    made = graph.call_function(torch.ops.aten.mul.Tensor, (x, 2))
    graph.call_function(torch.ops.aten.copy_.default, (made, x))
    graph.output(graph.call_function(torch.ops.aten.mul.Tensor, (made, 3)))
    for node in (x, made):
        node.meta["val"] = torch.zeros(3)
    assert drop_dead_copies(graph) == 0


def over_an_input(x):
    return x.copy_(x + 1) * 3


def seen_by_a_view(x):
    made = x * 2
    view = made.view(-1)
    return made.copy_(made + 1) * 3 + view


def of_another_dtype(x):
    made = (x * 2).double()
    return made.copy_(x + 1) * 3


@pytest.mark.parametrize("function", [over_an_input, seen_by_a_view, of_another_dtype])
def test_a_copy_that_somebody_sees_stays(function):
    assert without_dead_copies(function, torch.randn(3)) == 0


def test_what_leaves_the_graph_stays_two_tensors():
    module = make_fx(lambda x: (x + 1, x + 1))(torch.zeros(2))
    assert share_equal_calls(module.graph) == 0


def test_what_is_drawn_stays():
    module = make_fx(lambda x: torch.bernoulli(x) + torch.bernoulli(x))(torch.full((50,), 0.5))
    assert share_equal_calls(module.graph) == 0
