"""A region's hash is what it computes: equal for equal layers, different for any other arithmetic."""

import pytest
import torch
import torch.nn.functional as F
from captured import capture, sketch
from regions import hash_of, whole
from torch import nn

from k31compile.graph.region import Region

X, W = torch.randn(3, 4), torch.randn(4, 4)


def layer(x, w):
    return (F.linear(x, w) * 0.5).masked_fill(torch.tensor([True, False, False, True]), -1.0).softmax(-1)


VARIANTS = {
    "an operator": lambda x, w: (
        (F.linear(x, w) + 0.5).masked_fill(torch.tensor([True, False, False, True]), -1.0).softmax(-1)
    ),
    "an argument": lambda x, w: (
        (F.linear(x, w) * 0.25).masked_fill(torch.tensor([True, False, False, True]), -1.0).softmax(-1)
    ),
    "an integer for a float": lambda x, w: (
        (F.linear(x, w) * 0.5).masked_fill(torch.tensor([True, False, False, True]), -1).softmax(-1)
    ),
    "a dimension": lambda x, w: (
        (F.linear(x, w) * 0.5).masked_fill(torch.tensor([True, False, False, True]), -1.0).softmax(0)
    ),
    "a constant's value": lambda x, w: (
        (F.linear(x, w) * 0.5).masked_fill(torch.tensor([True, True, False, True]), -1.0).softmax(-1)
    ),
    "the order of operands": lambda x, w: (
        (F.linear(w, x).t() * 0.5).masked_fill(torch.tensor([True, False, False, True]), -1.0).softmax(-1)
    ),
    "a cast": lambda x, w: (
        (F.linear(x, w) * 0.5)
        .masked_fill(torch.tensor([True, False, False, True]), -1.0)
        .softmax(-1, dtype=torch.float64)
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_another_program_has_another_hash(name):
    assert hash_of(sketch(VARIANTS[name], X, W)) != hash_of(sketch(layer, X, W))


def test_the_same_program_has_the_same_hash():
    def renamed(hidden, projection):
        mask = torch.tensor([True, False, False, True])
        logits = F.linear(hidden, projection)
        return torch.softmax(torch.masked_fill(torch.mul(logits, 0.5), mask, -1.0), -1)

    assert hash_of(sketch(renamed, X + 1, W * 2)) == hash_of(sketch(layer, X, W))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.b(self.a(x).relu())


def test_two_layers_of_one_model_have_the_same_hash():
    layers = [Layer() for _ in range(3)]
    captured = capture(nn.Sequential(*layers), X)
    linears = captured.module.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
    hashes = []
    # The first layer's input stands before some of its weights, so its leaves have another order.
    for inner, outer in (linears[2:4], linears[4:6]):
        relu = outer.args[0]
        leaves = (*inner.all_input_nodes, *[n for n in outer.all_input_nodes if n is not relu])
        hashes.append(Region.between(captured.flow, leaves, [outer]).canonical_hash)
    assert hashes[0] == hashes[1]


@pytest.mark.parametrize(
    "other",
    [X.double(), torch.randn(4, 3).t(), torch.randn(5, 4), torch.randn(3, 8)[:, ::2]],
    ids=["dtype", "order in memory", "shape", "stride"],
)
def test_another_leaf_has_another_hash(other):
    assert hash_of(sketch(lambda x: x.sin(), other)) != hash_of(sketch(lambda x: x.sin(), X))


def test_which_leaf_is_used_where_counts():
    straight = hash_of(sketch(lambda x, y: x.sin() - y, X, X.clone()))
    assert straight != hash_of(sketch(lambda x, y: y.sin() - x, X, X.clone()))


def test_which_value_is_the_output_counts():
    captured = sketch(lambda x: x.sin().cos(), X)
    leaves, sin, cos = [captured.input(0)], captured.named("sin"), captured.named("cos")
    hashes = {Region.between(captured.flow, leaves, outs).canonical_hash for outs in ([sin], [cos], [sin, cos])}
    assert len(hashes) == 3


def test_a_constant_of_another_dtype_has_another_hash():
    def program(dtype):
        return lambda x: x + torch.tensor([1, 0, 0, 1], dtype=dtype)

    assert hash_of(sketch(program(torch.int64), X)) != hash_of(sketch(program(torch.int32), X))


def symbolic(program, *shapes):
    return hash_of(capture(program, *(torch.randn(shape) for shape in shapes), dynamic=True))


def test_equal_under_other_symbols():
    """One program, traced once where its lengths are s0, s1 and once where other sizes took these names."""
    captured = capture(
        lambda a, b, c, d: ((a @ b).sin(), (c @ d).sin()),
        *(torch.randn(s) for s in ((5, 6), (6, 7), (8, 9), (9, 10))),
        dynamic=True,
    )
    tensors = [captured.input(i) for i in range(4)]
    hashes = [
        Region.between(captured.flow, tensors[2 * i : 2 * i + 2], [captured.outputs[i]]).canonical_hash
        for i in range(2)
    ]
    assert hashes[0] == hashes[1]


def test_other_lengths_of_one_symbol_are_equal():
    assert symbolic(lambda x: x.sin(), (5, 6)) == symbolic(lambda x: x.sin(), (9, 7))


def test_one_symbol_for_two_sizes_is_another_structure():
    assert symbolic(lambda x: x.sin(), (5, 5)) != symbolic(lambda x: x.sin(), (5, 6))


def test_another_expression_is_another_structure():
    one = symbolic(lambda x: torch.zeros(x.shape[0] + 1, x.shape[0]) @ x, (5, 6))
    assert one != symbolic(lambda x: torch.zeros(x.shape[0] + 2, x.shape[0]) @ x, (5, 6))


def test_a_number_is_not_a_symbol():
    assert symbolic(lambda x: x.sin(), (5, 6)) != hash_of(sketch(lambda x: x.sin(), torch.randn(5, 6)))


def test_an_input_that_is_no_leaf_is_named():
    captured = sketch(lambda x, y: x.sin() + y.cos(), X, X.clone())
    with pytest.raises(ValueError, match=captured.input(1).name):
        Region.between(captured.flow, [captured.input(0)], captured.outputs)


def test_a_region_holds_its_constants_and_nothing_beside_it():
    captured = sketch(lambda x: (x.sin() + torch.arange(4), x.cos()), X)
    region = Region.between(captured.flow, [captured.input(0)], captured.outputs[:1])
    assert region.nodes == tuple(captured.named(name) for name in ("sin", "arange", "add"))
    assert whole(captured).nodes[-1] is captured.named("cos")
