"""Who reads whose values, what is constant, and what every path out of the graph must pass."""

import pytest
import torch
from captured import capture, sketch

X = torch.arange(12.0).reshape(3, 4)

SHAPE_ONLY = {
    "zeros_like": torch.zeros_like,
    "ones_like": torch.ones_like,
    "full_like": lambda x: torch.full_like(x, 3),
    "new_zeros": lambda x: x.new_zeros(3, 4),
    "new_ones": lambda x: x.new_ones(3, 4),
    "new_full": lambda x: x.new_full((3, 4), 2.5),
}
CONSTANTS = {
    "arange": lambda x: torch.arange(4) + x,
    "tril": lambda x: torch.ones(3, 4).tril() * x,
    "triu_full": lambda x: torch.full((3, 4), float("-inf")).triu(1) + x,
    "eye": lambda x: torch.eye(4) + x[:1],
    "tensor": lambda x: torch.tensor([1.0, 2.0, 3.0, 4.0]) * x,
}
RANDOM = {
    "rand": lambda x: torch.rand(3, 4) + x,
    "randn_like": lambda x: torch.randn_like(x) + x,
    "bernoulli": lambda x: torch.bernoulli(torch.full((3, 4), 0.5)) + x,
    "dropout": lambda x: torch.nn.functional.dropout(torch.ones(3, 4), 0.5, training=True) + x,
    "randperm": lambda x: torch.randperm(4) + x,
}


@pytest.mark.parametrize("name", SHAPE_ONLY)
def test_a_lent_shape_is_no_value(name):
    captured = sketch(lambda x: SHAPE_ONLY[name](x) + 1, X)
    node = captured.named(name)
    assert captured.flow.inputs[node] == []
    assert node in captured.flow.constants


def test_a_write_over_everything_reads_only_what_it_writes():
    def program(cache, x):
        cache[1].copy_(x)
        return cache * 2

    captured = sketch(program, X.clone(), X[0].clone())
    copy = captured.named("copy")
    assert captured.flow.inputs[copy] == [copy.args[1]]


def test_a_size_is_no_value():
    captured = capture(lambda x: (torch.zeros(x.shape[0] + 1) + 1, x.sin()), X, dynamic=True)
    zeros = captured.named("zeros")
    assert zeros in captured.flow.constants
    assert captured.input(0) not in captured.flow.ancestors([zeros])


def test_a_tensor_that_lends_shape_and_value_is_read():
    captured = sketch(lambda x: torch.zeros_like(x) + x, X)
    assert captured.input(0) in captured.flow.inputs[captured.named("add")]


@pytest.mark.parametrize("name", CONSTANTS)
def test_what_depends_on_no_input_is_constant(name):
    captured = sketch(CONSTANTS[name], X)
    last = captured.outputs[0]
    operands = [n for n in last.all_input_nodes if captured.input(0) not in captured.flow.ancestors([n])]
    assert operands
    assert set(operands) <= captured.flow.constants
    assert last not in captured.flow.constants


@pytest.mark.parametrize("name", RANDOM)
def test_what_is_drawn_is_not_constant(name):
    captured = sketch(RANDOM[name], X)
    drawn = captured.named(name)
    assert drawn not in captured.flow.constants
    assert not captured.flow.descendants([drawn]) & captured.flow.constants


def test_a_parameter_is_no_constant():
    captured = capture(torch.nn.Linear(4, 4), X)
    assert captured.flow.constants <= {n for n in captured.nodes if n.op == "output"}


def diamond(x):
    top = x.sin()
    left, right = top * 2, top + 3
    joined = left - right
    return joined.relu().exp()


def test_post_dominators_of_a_diamond():
    captured = sketch(diamond, X)
    passed = list(captured.flow.post_dominators(captured.named("sin")))
    assert passed == [captured.named(name) for name in ("sub", "relu", "exp")]


def test_an_arm_is_dominated_by_the_join():
    captured = sketch(diamond, X)
    assert next(captured.flow.post_dominators(captured.named("mul"))) is captured.named("sub")


def test_an_arm_that_leaves_the_graph_ends_the_domination():
    captured = sketch(lambda x: (diamond(x), x.sin() * 2), X)
    assert next(captured.flow.post_dominators(captured.input(0)), None) is None


def test_a_write_to_an_input_is_a_way_out():
    def program(cache, x):
        top = x.sin()
        cache.add_(top)
        return top.exp()

    captured = sketch(program, X.clone(), X)
    assert list(captured.flow.post_dominators(captured.named("sin"))) == []


def test_between_is_every_path_and_nothing_else():
    captured = sketch(lambda x: (diamond(x), x.cos()), X)
    between = captured.flow.between([captured.named("sin")], [captured.named("sub")])
    assert between == {captured.named(name) for name in ("sin", "mul", "add", "sub")}


def test_a_walk_stops_where_it_is_told():
    captured = sketch(diamond, X)
    stop = captured.named("sub")
    above = captured.flow.ancestors([captured.named("exp")], stop={stop}.__contains__)
    assert above == {captured.named(name) for name in ("exp", "relu", "sub")}


def test_in_order_is_the_order_of_the_graph():
    captured = sketch(diamond, X)
    assert captured.flow.in_order(set(captured.nodes)) == captured.nodes


def test_what_is_remembered_is_computed_once():
    flow, calls = sketch(diamond, X).flow, []
    for _ in range(2):
        assert flow.remember("depth", lambda: calls.append(1) or 7) == 7
    assert calls == [1]
