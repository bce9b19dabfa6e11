"""Products of one row with a small weight become sums; all others stay as they are."""

import copy
from typing import Any

import pytest
import torch
from torch import fx, nn

from k31compile.graph.trace import trace_functional
from k31compile.targets.small_products import MOST_NUMBERS, sum_small_products

ATEN = torch.ops.aten


class Odd(nn.Module):
    """A layer with a bias, one without, and a product that is written by hand."""

    def __init__(self, depth: int = 33, inner: int = 101) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(depth, inner), nn.Linear(inner, depth, bias=False)
        self.left = nn.Parameter(torch.randn(7, depth) / depth**0.5)
        self.added = nn.Parameter(torch.randn(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(torch.relu(self.up(x)))
        flat = y.reshape(-1, y.shape[-1])
        return torch.addmm(self.added, flat, self.left.t()) + flat @ self.left.t()


def traced(model: nn.Module, x: torch.Tensor) -> tuple[fx.GraphModule, tuple[torch.Tensor, ...]]:
    """The functional graph of a model, and its inputs."""
    kept: list[Any] = []

    def backend(module: fx.GraphModule, inputs: Any) -> Any:
        kept.extend((trace_functional(module, inputs), tuple(inputs)))
        return module.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(model, backend=backend, dynamic=False)(x)
    return kept[0], kept[1]


def products(module: fx.GraphModule) -> int:
    kinds = (ATEN.linear.default, ATEN.mm.default, ATEN.matmul.default, ATEN.addmm.default)
    return sum(node.target in kinds for node in module.graph.nodes)


@pytest.mark.parametrize("shape", [(1, 33), (1, 1, 33), (33,)], ids=str)
def test_the_sums_are_the_products(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model, x = Odd().eval(), torch.randn(*shape)
    module, inputs = traced(model, x)
    assert products(module) == 4
    assert sum_small_products(module) == 4
    assert products(module) == 0
    with torch.no_grad():
        want = copy.deepcopy(model).double()(x.double())
        (got,) = module(*inputs)
    assert got.shape == want.shape
    assert got.is_contiguous()
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()
    for node in module.graph.nodes:
        if node.op == "call_function":
            assert isinstance(node.meta.get("val"), torch.Tensor)


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (Odd(), torch.randn(2, 33)),
        (Odd().bfloat16(), torch.randn(1, 33).bfloat16()),
        (nn.Linear(MOST_NUMBERS // 64, 65), torch.randn(1, MOST_NUMBERS // 64)),
    ],
    ids=["two rows", "bfloat16", "large"],
)
def test_what_is_not_taken(model: nn.Module, x: torch.Tensor) -> None:
    module, _ = traced(model.eval(), x)
    before = products(module)
    assert sum_small_products(module) == 0
    assert products(module) == before > 0


def test_nothing_is_done_under_autocast() -> None:
    module, _ = traced(Odd().eval(), torch.randn(1, 33))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert sum_small_products(module) == 0


def test_a_method_that_writes_in_place_stays() -> None:
    """The graph around nested regions is as Dynamo has it, and there a write may look as if nobody used it."""
    graph = fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    x.meta["val"], weight.meta["val"] = torch.randn(1, 8), torch.randn(4, 8)
    graph.call_method("add_", (x, 1.0))
    made = graph.call_function(ATEN.linear.default, (x, weight))
    made.meta["val"] = torch.empty(1, 4)
    graph.output((made,))
    module = fx.GraphModule(nn.Module(), graph)
    assert sum_small_products(module) == 1
    given, weights = torch.randn(1, 8), torch.randn(4, 8)
    want = (given + 1) @ weights.t()
    assert torch.allclose(module(given, weights)[0], want, atol=1e-5)
