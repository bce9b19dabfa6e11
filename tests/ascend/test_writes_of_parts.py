"""Writes into parts of a cache, however the model names them: in GE a view is a copy, and a write into it is lost."""

import sys
from pathlib import Path

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

sys.path.insert(0, str(Path(__file__).parent))

from test_lowered_writes import Calls, judge

from k31compile.backend import captured_graph
from k31compile.entry import Entry
from k31compile.errors import TargetError
from k31compile.offline import compile_offline
from k31compile.targets.ascend.ge_options import ge_options
from k31compile.targets.ascend.offline.convert import convert
from k31compile.targets.ascend.offline.formats import mark_formats
from k31compile.targets.ascend.offline.session import open_session
from k31compile.targets.ascend.prepare import prepare
from k31compile.targets.ascend.profiles import profile_of

A3 = profile_of("ascend-a3")
ROWS, PLACES = (2, 8), torch.tensor([4, 1])


def position(cache, x):
    cache[:, 3:4] = x[:, None]
    return cache.sum(1)


def a_smaller_batch(cache, x):
    cache[:1, 2:4] = x
    return cache * 2


def window(cache, x):
    cache[:, :-1].copy_(cache[:, 1:].clone())
    cache[:, -1:] = x[:, None]
    return cache * 2


def selected(cache, x):
    before = cache.sum(1)
    cache[:, 2].copy_(x)
    return before, cache.sum(1)


def flat(cache, x):
    cache.view(-1)[8:24] = x.reshape(-1)
    return cache + 1


def turned(cache, x):
    cache.transpose(0, 1)[2] = x
    return cache.sum(2), cache.transpose(0, 1)[2]


def every_other(cache, x):
    cache[:, ::3] = x[:, None]
    return cache + 1


def rows_of_a_layer(cache, x):
    cache[1][PLACES] = x
    return cache[1].sum(0), cache + 1


def two_halves(cache, x):
    cache[0, PLACES, :3] = x[:, :3]
    first = cache.sum()
    cache[0, PLACES, 3:] = x[:, 3:]
    return first, cache.sum(1)


def along_a_view(cache, x):
    cache.view(-1, 8).index_copy_(0, PLACES, x)
    return cache.view(-1, 8)[PLACES]


def positions_of_a_batch(cache, x):
    cache[:, PLACES] = x
    return cache.mean(1)


def scattered(cache, x):
    old = cache.sum()
    cache.scatter_(1, PLACES.view(2, 1, 1).expand(2, 1, 8), x[:, None])
    cache[:, 0] = old
    return cache + 1


def filled(cache, x):
    cache[1].zero_()
    cache[0, 2:4].fill_(2.0)
    cache[0, PLACES] = 0.5
    return cache + x[0]


def a_view_read_on_both_sides(cache, x):
    layer = cache[0]
    old = layer * 1.0
    layer[PLACES] = x
    return old - cache[0], layer.sum()


WAYS = (
    position, a_smaller_batch, window, selected, flat, turned, every_other, rows_of_a_layer, two_halves, along_a_view,
    positions_of_a_batch, scattered, filled, a_view_read_on_both_sides,
)  # fmt: skip


@pytest.mark.parametrize("function", WAYS)
def test_a_part_is_written_in_the_cache_itself(function):
    draw = torch.Generator().manual_seed(0)
    judge(function, torch.randn(2, 6, 8, generator=draw), torch.randn(*ROWS, generator=draw))


@pytest.mark.parametrize("function", WAYS)
def test_the_cache_of_a_written_part_is_neither_copied_nor_assigned(function):
    made = compile_offline(Entry("part", Calls(function), (torch.randn(2, 6, 8), torch.randn(*ROWS))), A3.name)
    assert made.ge.counts()["ScatterNdUpdate"] >= 1
    assert "Assign" not in made.ge.counts()


def test_a_part_of_a_cache_with_gaps_is_refused():
    def write(cache, x):
        cache[:, 1] = x
        return x + 1

    with pytest.raises(TargetError, match=r"writes into a part of a tensor that GE cannot write into .*contiguous"):
        judge(write, torch.randn(2, 6, 8)[:, ::2], torch.randn(*ROWS))


def test_nobody_overtakes_a_reader_of_a_cache_on_his_stream():
    """No data leads from a reader to the next writer: GE is told to keep the order of the graph."""
    open_session(A3)
    assert ge_options()["compile options"]["graph"]["ge.topoSortingMode"] == "3"


def test_weights_in_blocks_are_marked_where_torchair_has_dropped_an_input():
    open_session(A3)
    inputs = torch.randn(3), torch.randn(4, 64).bfloat16(), torch.randn(64, 128).bfloat16()
    module = make_fx(lambda _unread, x, weight: (x @ weight,))(*inputs)
    names = [node.name for node in module.graph.find_nodes(op="placeholder")]
    graph = convert(module, inputs).definition
    mark_formats(graph, dict(zip(names, inputs, strict=True)), {names[2]})
    formats = {node.name: node.output_desc[0].attr["format_for_int"].i for node in graph.op if node.type == "Data"}
    assert formats == {names[1]: 2, names[2]: 29}


def test_what_depends_on_values_is_one_line_with_its_place():
    def choose(x, mask):
        return x[mask] * 2

    with pytest.raises(TargetError, match=r"aten.nonzero.default gives depends on the values .*parts.py:\d+\)"):
        judge(choose, torch.randn(4, 8), torch.tensor([True, False, True, True]))


def test_a_tensor_in_a_models_own_lines_is_on_the_device():
    def scale(x):
        return x * torch.tensor([1.0, 2.0, 3.0, 4.0])

    judge(scale, torch.randn(5, 4))
    made = compile_offline(Entry("constant", Calls(scale), (torch.randn(5, 4),)), A3.name)
    assert made.ge.counts()["Mul"] == 1


@pytest.mark.parametrize("function", WAYS)
def test_the_callers_entry_and_return_are_on_his_stream(function):
    open_session(A3)
    inputs = torch.randn(2, 6, 8), torch.randn(*ROWS)
    with torch.no_grad():
        module, tensors = captured_graph(Calls(function), inputs, {}, A3.name)
        stream_of = prepare(module, A3, tensors).schedule.stream_of
    assert stream_of["enter"] == stream_of["return"] == 0
