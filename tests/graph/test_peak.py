"""The predicted peak against a measured one: storages counted as they come and go in a real run."""

import weakref

import pytest
import torch
from captured import capture
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from k31compile.graph.peak import predict_memory
from k31compile.graph.sizes import nbytes_of
from k31compile.targets.reinplace import reinplace_cache_writes


class Allocations(TorchDispatchMode):
    """The most bytes of new storages that were alive at once."""

    def __init__(self, given):
        super().__init__()
        self.now, self.peak = 0, 0
        self.known = {t.untyped_storage()._cdata for t in given if isinstance(t, torch.Tensor)}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.count(tensor.untyped_storage())
        return result

    def count(self, storage):
        key, size = storage._cdata, storage.nbytes()
        if key in self.known:
            return
        self.known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self.free, key, size)

    def free(self, key, size):
        self.known.discard(key)
        self.now -= size


def measured(module, inputs):
    with torch.no_grad(), Allocations(inputs) as allocations:
        kept = module(*inputs)
    assert kept is not None
    return allocations.peak


def test_a_chain_needs_exactly_what_it_needs():
    def chain(x, w):
        wide = torch.mm(x, w).relu()
        narrow = wide.sum(1)
        again = torch.mm(x, w).sin()
        return narrow, again.cos() + 1

    traced = capture(chain, torch.randn(19, 8), torch.randn(8, 40))
    memory = predict_memory(traced.module)
    assert memory.peak == measured(traced.module, traced.inputs)
    assert memory.peak == 2 * 19 * 40 * 4 + 19 * 4
    assert (memory.weights, memory.inputs) == (0, (19 * 8 + 8 * 40) * 4)
    assert memory.at.startswith("graph/test_peak.py:")


def test_views_live_with_what_they_look_into():
    def views(x):
        big = x.exp()
        corner = big.view(4, 6, 5)[:, 2:4].transpose(0, 1)
        other = x.sin()
        return (other.sum() + corner).contiguous()

    traced = capture(views, torch.randn(24, 5))
    assert predict_memory(traced.module).peak == measured(traced.module, traced.inputs)


def test_several_outputs_of_one_operator_are_counted_each():
    def parts(x):
        values, indices = x.topk(3, -1)
        return values.sum(), indices

    traced = capture(parts, torch.randn(7, 50))
    memory = predict_memory(traced.module)
    assert memory.peak == measured(traced.module, traced.inputs) == 7 * 3 * (4 + 8) + 4


@pytest.mark.parametrize("in_place", [False, True])
def test_a_cache_write_costs_a_cache_unless_it_is_in_place(in_place):
    def write(cache, x):
        cache.index_copy_(0, torch.tensor([2, 5]), x)
        return (cache * 0.5).sum(0)

    cache = torch.randn(64, 16)
    traced = capture(write, cache, torch.randn(2, 16))
    if in_place:
        assert reinplace_cache_writes(traced.module) == 1
    predicted, seen = predict_memory(traced.module).peak, measured(traced.module, traced.inputs)
    cost = 64 * 16 * 4
    assert predicted // cost == seen // cost == (1 if in_place else 2)
    assert abs(predicted - seen) <= 32  # the positions, which the trace lifts to a constant


def test_dynamic_sizes_count_as_they_were_traced():
    def rows(x):
        return x.exp().sum(0)

    x = torch.randn(21, 8)
    torch._dynamo.mark_dynamic(x, 0)
    traced = capture(rows, x, dynamic=True)
    assert any(isinstance(size, torch.SymInt) for size in traced.input(0).meta["val"].shape)
    assert predict_memory(traced.module).peak == (21 * 8 + 8) * 4 == nbytes_of(traced.input(0)) + 32


def test_a_called_graph_counts_beside_what_is_alive():
    def outer(x):
        return x.exp().sum()

    def inner(x):
        return (x.sin() + x.cos()).sum()

    x = torch.randn(30, 4)
    called = capture(inner, x).module
    traced = capture(outer, x).module
    node = next(n for n in traced.graph.nodes if "sum" in n.name)
    alone = predict_memory(traced).peak
    within = predict_memory(traced, lambda n: called if n is node else None).peak
    assert alone == 30 * 4 * 4 + 4
    assert within == 30 * 4 * 4 + predict_memory(called).peak
