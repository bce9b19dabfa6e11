"""Equal views are one value for their readers, unless something was written between them or they leave the graph."""

import torch
from torch import fx

from k31compile.graph.views import ATEN, share_equal_views


def _graph(write: bool = False, returned: bool = False) -> fx.Graph:
    graph = fx.Graph()
    x = graph.placeholder("x")
    first = graph.call_function(ATEN.slice.Tensor, (x, 1, 0, 3))
    if write:
        graph.call_function(ATEN.copy_.default, (x, x))
    second = graph.call_function(ATEN.slice.Tensor, (x, 1, 0, 3))
    other = graph.call_function(ATEN.slice.Tensor, (x, 1, 1, 4))
    sums = [graph.call_function(ATEN.add.Tensor, (second, one)) for one in (first, other)]
    graph.output((*sums, second) if returned else tuple(sums))
    return graph


def _slices_read(graph: fx.Graph) -> int:
    return sum(bool(node.users) for node in graph.nodes if node.target is ATEN.slice.Tensor)


def test_readers_share_the_first():
    graph = _graph()
    share_equal_views(graph)
    assert _slices_read(graph) == 2
    x = torch.randn(2, 5)
    mine = fx.GraphModule({}, graph)(x)
    assert torch.equal(mine[0], 2 * x[:, :3])
    assert torch.equal(mine[1], x[:, :3] + x[:, 1:4])


def test_a_write_or_a_result_keeps_them_apart():
    for graph in (_graph(write=True), _graph(returned=True)):
        share_equal_views(graph)
        assert _slices_read(graph) == 3
