"""What a traced graph is: one spelling an operator, composite operators whole, origins, weights, no asserts."""

import pytest
import torch
import torch.nn.functional as F
from captured import capture
from torch import nn

COMPOSITES = {
    "einsum": lambda x, w: torch.einsum("ab,cb->ac", x, w),
    "linear": lambda x, w: F.linear(x, w),
    "softmax": lambda x, w: F.softmax(x * w, dim=-1),
    "topk": lambda x, w: (x * w).topk(2),
    "matmul": lambda x, w: x @ w,
    "layer_norm": lambda x, w: F.layer_norm(x, (4,), w[0]),
    "silu": lambda x, w: F.silu(x * w),
}


@pytest.mark.parametrize("name", COMPOSITES)
def test_composite_operators_stay_whole(name):
    captured = capture(COMPOSITES[name], torch.randn(4, 4), torch.randn(4, 4))
    assert captured.operators.count(name) == 1
    assert not {"bmm", "mm", "addmm", "_softmax", "native_layer_norm"} & set(captured.operators)


@pytest.mark.parametrize(
    "spelling",
    [
        lambda x: x.relu(),
        torch.relu,
        F.relu,
        nn.ReLU(),
        lambda x: x.clone().relu_(),
    ],
    ids=["method", "function", "functional", "module", "in_place"],
)
def test_one_spelling_an_operator(spelling):
    captured = capture(lambda x: spelling(x) + 1, torch.randn(4))
    assert [name for name in captured.operators if name != "clone"] == ["relu", "add"]


def test_every_node_carries_a_fake_value():
    captured = capture(lambda x: (x.topk(2).values + x.shape[0]).sum(-1), torch.randn(5, 4), dynamic=True)
    for node in captured.nodes:
        assert node.op == "output" or "val" in node.meta, node


def test_asserts_are_gone_and_what_they_looked_at():
    def program(x):
        torch._check(x.shape[0] > 2)
        torch._assert_async((x < 1e9).all())
        return x.to(torch.float64) + 1

    captured = capture(program, torch.randn(6, 4), dynamic=True)
    assert captured.operators == ["to", "add"] or captured.operators == ["_to_copy", "add"]


def test_weights_are_marked_and_inputs_are_not():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 3))
            self.register_buffer("table", torch.randn(2, 3))

        def forward(self, x):
            return x @ self.weight + self.table

    captured = capture(Model(), torch.randn(2, 3))
    marks = {n.meta["source_name"]: n.meta["is_parameter"] for n in captured.module.graph.find_nodes(op="placeholder")}
    assert len(marks) == 3
    assert [name for name, marked in marks.items() if marked] == [name for name in marks if "weight" in name]


def test_a_float_input_is_its_number_under_dynamic():
    captured = capture(lambda x, scale: x * scale, torch.randn(3), 0.37, dynamic=True)
    assert captured.named("mul").args[1] == 0.37


def test_another_float_gives_another_result():
    def backend(module, example_inputs):
        from k31compile.graph.trace import trace_functional

        return trace_functional(module, example_inputs).forward

    compiled = torch.compile(lambda x, scale: x * scale, backend=backend, dynamic=True)
    x = torch.randn(3)
    for scale in (0.5, 2.5, -1.0, 0.5):
        torch.testing.assert_close(compiled(x, scale), x * scale)


def test_a_graph_that_cannot_be_traced_says_so():
    from k31compile.errors import TraceError
    from k31compile.graph.trace import trace_functional

    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_method("no_such_method", (x,)))
    with pytest.raises(TraceError, match="no_such_method") as caught:
        trace_functional(torch.fx.GraphModule(nn.Module(), graph), [torch.randn(3)])
    assert caught.value.__cause__ is not None
