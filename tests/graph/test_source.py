"""A node tells the user's file, line and module."""

import torch
from captured import capture
from torch import fx, nn

from k31compile.graph.source import module_path, source_line


def helper(x):
    return x.relu()


def program(x):
    y = helper(x)
    return y.sin()


class Inner(nn.Module):
    def forward(self, x):
        return x.relu()


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(Inner(), nn.Tanh()) for _ in range(2)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.sin()


def first_line(function):
    return function.__code__.co_firstlineno


def test_the_line_is_that_of_the_call():
    node = capture(program, torch.randn(3)).named("sin")
    assert source_line(node) == f"graph/test_source.py:{first_line(program) + 2}"


def test_the_line_is_that_of_the_innermost_function():
    node = capture(program, torch.randn(3)).named("relu")
    assert source_line(node) == f"graph/test_source.py:{first_line(helper) + 1}"


def test_a_line_of_a_module():
    node = capture(Outer(), torch.randn(3)).named("sin")
    assert source_line(node) == f"graph/test_source.py:{first_line(Outer.forward) + 3}"


def test_a_node_without_a_trace_is_called_by_its_name():
    graph = fx.Graph()
    assert source_line(graph.placeholder("cache")) == "node cache"


def test_the_module_path_is_qualified():
    captured = capture(Outer(), torch.randn(3))
    relus = captured.module.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default)
    assert [module_path(node) for node in relus] == ["layers.0.0", "layers.1.0"]


def test_the_root_module_has_no_path():
    assert module_path(capture(Outer(), torch.randn(3)).named("sin")) == ""


def test_unknown_is_empty():
    assert module_path(fx.Graph().placeholder("x")) == ""
