"""A captured graph as a function that torch.onnx exports: k31 calls symbolic, writes in place as results."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from k31compile.graph.dataflow import ATEN
from k31compile.graph.sizes import value_of
from k31compile.graph.source import module_path, source_line
from k31compile.onnx_export.functions import DOMAIN, Functions, Kind


@dataclass
class Call:
    """A k31 call of the graph: its function, and where in the user's model it comes from."""

    kind: Kind
    module: str
    source: str


@dataclass
class Trace:
    """What one run of a `Program` found."""

    functions: Functions = field(default_factory=Functions)
    calls: list[Call] = field(default_factory=list)
    written: list[int] = field(default_factory=list)

    def begin(self) -> None:
        """Forget an earlier run; the object stays, for an export gives a module's attributes back as they were."""
        self.functions = Functions()
        self.calls.clear()
        self.written.clear()


class Program(nn.Module):
    """Takes the graph's inputs and constants; returns its results, then the new value of each input that it writes.

    `trace` is what the last run found: which inputs are written, by position, in the order of the results.
    `constants` are the tensors that the graph holds itself, by name; they are passed in as weights are.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__()
        self._held = (module,)  # not a part of this module: its tensors would be looked for under other names
        self.constants: dict[str, Tensor] = {}
        for node in module.graph.find_nodes(op="get_attr"):
            value = fx.graph_module._get_attr(module, node.target)
            if isinstance(value, Tensor):
                self.constants[node.target] = value
        self.trace = Trace()

    @property
    def graph(self) -> fx.Graph:
        """The captured graph."""
        return self._held[0].graph

    def forward(self, *inputs: Any) -> tuple[Any, ...]:
        """Run node by node, so that each keeps its line and module."""
        self.trace.begin()
        with fx.traceback.preserve_node_meta():
            count = len(inputs) - len(self.constants)
            constants = dict(zip(self.constants, inputs[count:], strict=True))
            results = _Run(self._held[0], self.trace, constants).run(*inputs[:count])
        return tuple(results)


class _Run(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, trace: Trace, constants: dict[str, Any]) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.trace, self.constants = trace, constants
        self.inputs = module.graph.find_nodes(op="placeholder")
        self.updated: dict[int, Any] = {}
        self._node: fx.Node | None = None

    def run_node(self, n: fx.Node) -> Any:
        self._node = n
        return super().run_node(n)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self.constants[target] if target in self.constants else super().get_attr(target, args, kwargs)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(target, torch._ops.OpOverload) and target.namespace == DOMAIN:
            return self._call(target._opname, args, kwargs)
        if target is ATEN.copy_.default:
            return self._write(*args)
        return super().call_function(target, args, kwargs)

    def output(self, target: Any, args: Any, kwargs: Any) -> Any:
        results = super().output(target, args, kwargs)
        flat = [results] if isinstance(results, Tensor) else list(results)
        self.trace.written.extend(self.updated)
        return [*flat, *self.updated.values()]

    def _call(self, operator: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self._node is not None
        kind, tensors = self.trace.functions.of_call(operator, args, kwargs)
        call = Call(kind, module_path(self._node), source_line(self._node))
        self.trace.calls.append(call)
        value = value_of(self._node)
        results = [value] if isinstance(value, Tensor) else list(value)
        made = torch.onnx.ops.symbolic_multi_out(
            f"{DOMAIN}::{operator}", tensors, {}, dtypes=[x.dtype for x in results],
            shapes=[tuple(x.shape) for x in results], version=1,
            metadata_props={"call": str(len(self.trace.calls) - 1)},
        )  # fmt: skip
        return made[0] if isinstance(value, Tensor) else tuple(made)

    def _write(self, target: Tensor, source: Tensor, *_: Any) -> Tensor:
        """What follows a write of an input reads the new value, and the model gives it back."""
        assert self._node is not None
        node = self._node.args[0]
        assert isinstance(node, fx.Node)
        assert node.op == "placeholder", "a functional graph writes nothing but its inputs"
        made = source.to(target.dtype).expand(target.shape)
        self.env[node] = self.updated[self.inputs.index(node)] = made
        return made
