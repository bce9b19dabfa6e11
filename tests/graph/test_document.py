"""A graph through JSON and back: the same results, every kind of argument, symbols as symbols, or a reason."""

import json
import math

import pytest
import torch
from captured import capture
from torch import fx

from k31compile.errors import DocumentError
from k31compile.graph.document import read_graph, write_graph


def through(module, inputs):
    """The graph, inputs and mode of another process."""
    return read_graph(json.loads(json.dumps(write_graph(module, inputs))))


def test_a_traced_graph_computes_the_same():
    table = torch.arange(12.0).view(3, 4)

    def program(x, cache, w):
        cache.index_copy_(1, torch.tensor([2, 0]), x[..., :2].transpose(1, 2))
        values, indices = (x @ w).topk(3, dim=-1)
        mixed = torch.einsum("bts,bt->bs", values, x.sum(-1).to(torch.float64).float())
        return (
            mixed.masked_fill(mixed < 0, -math.inf),
            indices,
            torch.zeros(3, dtype=torch.int32),
            x[:, 1:, None],
            table,
        )

    captured = capture(program, torch.randn(2, 5, 6), torch.randn(2, 4, 5), torch.randn(6, 7))
    traced, inputs = captured.module, [torch.randn_like(tensor) for tensor in captured.inputs]
    again, fakes, mode = through(traced, inputs)
    assert [str(node.target) for node in again.graph.nodes] == [str(node.target) for node in traced.graph.nodes]
    assert [node.name for node in again.graph.nodes] == [node.name for node in traced.graph.nodes]
    ours, theirs = ([tensor.clone() for tensor in inputs] for _ in range(2))
    for got, wanted in zip(again(*ours), traced(*theirs), strict=True):
        assert torch.equal(got, wanted)
    for got, wanted in zip(ours, theirs, strict=True):
        assert torch.equal(got, wanted)
    assert sum(not torch.equal(got, before) for got, before in zip(ours, inputs, strict=True)) == 1
    for fake, real in zip(fakes, inputs, strict=True):
        assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)
        assert fake.fake_mode is mode


def test_strides_stay():
    def program(x):
        return x.exp()

    x = torch.randn(4, 6, 10)[:, ::2].transpose(0, 2)
    _, (fake,), _ = through(capture(program, x).module, [x])
    assert fake.stride() == x.stride()


def test_every_kind_of_argument_comes_back():
    values = (
        None, True, 3, 2.5, math.inf, -math.inf, 1 + 2j, "sum", [1, [2, (3,)]], {"a": (1, None)}, slice(None, 4, 2),
        ..., torch.float8_e4m3fn, torch.device("meta"), torch.strided, torch.channels_last,
    )  # fmt: skip
    graph = fx.Graph()
    x = graph.placeholder("x")
    made = graph.call_function(torch.ops.aten.add.Tensor, (x, values), {"other": [x, (x,)], "nan": math.nan})
    graph.output((made,))
    again, *_ = through(fx.GraphModule(torch.nn.Module(), graph), [None])
    first, node, _ = again.graph.nodes
    assert node.args == (first, values)
    assert [type(item) for item in node.args[1]][:8] == [type(item) for item in values][:8]
    assert node.kwargs["other"] == [first, (first,)]
    assert math.isnan(node.kwargs["nan"])


def test_symbols_stay_symbols():
    def program(x, y):
        return torch.cat([x, y]).view(-1, 2, 4)

    x, y = torch.randn(10, 8), torch.randn(6, 8)
    for tensor in (x, y):
        torch._dynamo.mark_dynamic(tensor, 0)
    captured = capture(program, x, y)
    inputs = [node.meta["val"] for node in captured.module.graph.find_nodes(op="placeholder")]
    again, fakes, mode = through(captured.module, inputs)
    sizes = [fake for fake in fakes if isinstance(fake, torch.SymInt)]
    tensors = [fake for fake in fakes if isinstance(fake, torch.Tensor)]
    assert len(sizes) == len(tensors) == 2
    assert [str(t.shape[0].node.expr) for t in tensors] == [str(size.node.expr) for size in sizes]
    with mode:
        (result,) = again(*fakes)
    assert str(result.shape[0]) != "16"
    (real,) = again(*_arguments(fakes, x, y))
    assert torch.equal(real, program(x, y))


def _arguments(fakes, *tensors):
    """Real arguments in the places of the fakes: the tensors in their order, and the sizes that they have."""
    given = iter(tensors)
    placed = [next(given) if isinstance(fake, torch.Tensor) else fake for fake in fakes]
    sizes = {
        str(fake.shape[0].node.expr): real.shape[0]
        for fake, real in zip(fakes, placed, strict=True)
        if isinstance(fake, torch.Tensor)
    }
    return [sizes[str(value.node.expr)] if isinstance(value, torch.SymInt) else value for value in placed]


class Opaque:
    pass


@pytest.mark.parametrize(
    ("target", "argument", "says"),
    [
        (torch.ops.aten.relu.default, range(3), "an argument is a range"),
        (lambda x: x, 1, "cannot be found by a name"),
    ],
)
def test_what_has_no_plain_form_is_refused(target, argument, says):
    graph = fx.Graph()
    graph.output((graph.call_function(target, (graph.placeholder("x"), argument)),))
    with pytest.raises(DocumentError, match=says):
        write_graph(fx.GraphModule(torch.nn.Module(), graph), [None])


def test_an_input_of_another_kind_is_refused():
    graph = fx.Graph()
    graph.output((graph.placeholder("x"),))
    module = fx.GraphModule(torch.nn.Module(), graph)
    for value in (Opaque(), torch.eye(3).to_sparse()):
        with pytest.raises(DocumentError, match="an input is a"):
            write_graph(module, [value])
