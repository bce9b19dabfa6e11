"""The functional graph of a program, as the backend would get it from Dynamo, and how to look at it."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from k31compile.graph.dataflow import Dataflow
from k31compile.graph.trace import trace_functional


@dataclass
class Captured:
    """One traced graph, the inputs that Dynamo gave it at the last call and the results of that call."""

    module: fx.GraphModule
    dynamo: fx.GraphModule
    inputs: list[Any] = field(default_factory=list)
    results: Any = None

    @property
    def nodes(self):
        return list(self.module.graph.nodes)

    @property
    def flow(self):
        return Dataflow(self.module.graph)

    @property
    def operators(self):
        return operators(self.module)

    @property
    def outputs(self):
        return list(self.module.graph.output_node().args[0])

    def named(self, name):
        """The only node of an operator, by its name without the overload."""
        return one(self.module, name)

    def input(self, i):
        """The i-th input tensor."""
        return [n for n in self.module.graph.find_nodes(op="placeholder") if isinstance(n.meta["val"], torch.Tensor)][i]

    def run(self, *inputs):
        return self.module(*(inputs or self.inputs))


def capture(program, *args, dynamic=None):
    """Trace `program` as torch.compile(backend="k31") does and run it once on `args`, which it may write to."""
    found = []

    def backend(module, example_inputs):
        captured = Captured(trace_functional(module, example_inputs), module)
        found.append(captured)

        def run(*inputs):
            captured.inputs = list(inputs)
            return captured.module(*inputs)

        return run

    torch._dynamo.reset()
    with torch.no_grad():
        results = torch.compile(program, backend=backend, dynamic=dynamic, fullgraph=True)(*args)
    assert len(found) == 1
    found[0].results = results
    return found[0]


def sketch(program, *args):
    """Trace `program` of tensors without Dynamo: fast, for what depends on neither origins, weights nor symbols."""
    graph = fx.Graph()
    graph.output(graph.call_function(_as_tuple(program), tuple(graph.placeholder(f"x{i}") for i in range(len(args)))))
    module = fx.GraphModule(torch.nn.Module(), graph)
    return Captured(trace_functional(module, args), module, list(args))


def _as_tuple(program):
    def run(*args):
        result = program(*args)
        return result if isinstance(result, tuple) else (result,)

    return run


def operators(module):
    """The operators of a graph in order, without overloads: `relu`, `copy_`, `k31.lightning_indexer`."""
    return [name_of(n) for n in module.graph.nodes if isinstance(n.target, torch._ops.OpOverload)]


def name_of(node):
    """An operator without its overload and, for torch's own, without its namespace."""
    return str(node.target).rpartition(".")[0].removeprefix("aten.")


def one(module, name):
    """The only node of an operator."""
    found = [n for n in module.graph.nodes if isinstance(n.target, torch._ops.OpOverload) and name_of(n) == name]
    assert len(found) == 1, f"{len(found)} of {name} in {operators(module)}"
    return found[0]
