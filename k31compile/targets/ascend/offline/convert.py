"""A graph of torch_npu operators through torchair's own compiler, stopped before anything is loaded onto a device."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

STREAM = "_user_stream_label"
SUPER_KERNEL = "_super_kernel_scope"
SUPER_KERNEL_OPTIONS = "_super_kernel_options"
_NOT_OPERATORS = ("Data", "Const", "NetOutput", "RefData")


@dataclass(frozen=True)
class GeNode:
    """One operator of the GE graph: name and type, whom it reads and waits for, its stream and its super kernel."""

    name: str
    type: str
    inputs: tuple[str, ...]
    waits_for: tuple[str, ...]
    stream: str
    super_kernel: str
    super_kernel_options: str


@dataclass(frozen=True)
class GeGraph:
    """What torchair made, as a protobuf."""

    definition: Any

    def operators(self) -> list[GeNode]:
        """All nodes that compute."""
        return [_read(node) for node in self.definition.op if node.type not in _NOT_OPERATORS]

    def counts(self) -> dict[str, int]:
        """How many operators there are of each type."""
        found: dict[str, int] = {}
        for node in self.operators():
            found[node.type] = found.get(node.type, 0) + 1
        return found

    def text(self) -> str:
        """The graph as protobuf text."""
        from google.protobuf import text_format

        return str(text_format.MessageToString(self.definition))


def convert(module: fx.GraphModule, example_inputs: Sequence[Any]) -> GeGraph:
    """Convert a functional ATen + torch_npu graph to GE with torchair's converters; needs an open session.

    example_inputs are CPU, meta or fake tensors: torchair is shown tensors of an NPU of their shapes and strides.

    Raises:
        RuntimeError: torchair's own, where an operator has no converter.
    """
    from torchair._utils.graph_transform_observer import GraphTransformObserver
    from torchair.configs.compiler_config import CompilerConfig
    from torchair.npu_fx_compiler import _NpuFxCompiler

    config = CompilerConfig()
    compiler = _NpuFxCompiler(config)
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    inputs = on_npu(example_inputs, mode)
    # torchair computes shapes under the mode of the compile that it runs in.
    with tracing(TracingContext(mode)), warnings.catch_warnings():
        # One for each operator whose symbolic shape it would ask of CANN; the graph has none.
        warnings.filterwarnings("ignore", message="infer and generate sym shape failed")
        made = compiler._gen_compiled_gm(module, inputs, GraphTransformObserver(module, inputs, config))
    return GeGraph(made.graph)


def on_npu(example_inputs: Sequence[Any], mode: FakeTensorMode) -> list[Any]:
    """Fake tensors on an NPU of the shapes, strides and dtypes of the inputs; what is no tensor stays."""
    with mode:
        return [
            torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="npu")
            if isinstance(value, torch.Tensor)
            else value
            for value in example_inputs
        ]


def _read(node: Any) -> GeNode:
    inputs = [name for name in node.input if name]
    return GeNode(
        name=node.name,
        type=node.type,
        inputs=tuple(name.split(":")[0] for name in inputs if not name.endswith(":-1")),
        waits_for=tuple(name.split(":")[0] for name in inputs if name.endswith(":-1")),
        stream=_attribute(node, STREAM),
        super_kernel=_attribute(node, SUPER_KERNEL),
        super_kernel_options=_attribute(node, SUPER_KERNEL_OPTIONS),
    )


def _attribute(node: Any, name: str) -> str:
    return node.attr[name].s.decode() if name in node.attr else ""
