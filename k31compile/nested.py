"""Equal layers compiled once: bodies of nested regions are rewritten each on its own, their calls stay opaque.

torch 2.13 cannot trace functionally through `invoke_subgraph`, and marking module instances makes every layer use the
first one's weights; so layers are marked on their class, for the time of a call only.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch.utils import _pytree as pytree

from k31compile.graph.trace import current_fake_mode, fake_inputs

_CALL = torch.ops.higher_order.invoke_subgraph


def nested_calls(module: fx.GraphModule) -> list[fx.Node]:
    """The calls of nested regions in Dynamo's graph."""
    return [node for node in module.graph.nodes if is_nested_call(node)]


def is_nested_call(node: fx.Node) -> bool:
    """Whether the node calls a nested region."""
    return node.op == "call_function" and node.target is _CALL


def body_of(module: fx.GraphModule, call: fx.Node) -> str:
    """The name of the submodule that a call runs."""
    attribute = call.args[0]
    assert isinstance(attribute, fx.Node)
    return str(attribute.target)


@dataclass(frozen=True)
class FakeRun:
    """What one fake run of an outer graph gave: the operands of each body's first call, and the value of each node."""

    operands: dict[str, list[Any]]
    values: dict[fx.Node, Any]
    written: set[int]

    def is_written(self, value: torch.Tensor) -> bool:
        """Whether anything wrote in place into the memory of a value."""
        return value._version > 0 or self.memory(value) in self.written

    @staticmethod
    def memory(value: torch.Tensor) -> int:
        """The memory that a value shares with its views."""
        return int(value.untyped_storage()._cdata)


def run_fake(module: fx.GraphModule, example_inputs: Sequence[Any]) -> FakeRun:
    """Run the outer graph on fake tensors, and each body once however often it is called."""
    recorder = _Recorder(module)
    fake_mode = current_fake_mode()
    with fake_mode, enable_python_dispatcher(), torch.no_grad():
        recorder.run(*fake_inputs(example_inputs, fake_mode))
    return recorder.found


class _Recorder(fx.Interpreter):
    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.found = FakeRun({}, {}, set())
        self._bodies: dict[str, tuple[Any, list[int]]] = {}

    def run_node(self, node: fx.Node) -> Any:
        self.found.values[node] = super().run_node(node)
        return self.found.values[node]

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is not _CALL:
            return super().call_function(target, args, kwargs)
        body, _, *operands = args
        name = next(n for n, child in self.module.named_children() if child is body)
        if name not in self._bodies:
            self.found.operands[name] = operands
            before = [operand._version if isinstance(operand, torch.Tensor) else 0 for operand in operands]
            outputs = fx.Interpreter(body).run(*operands)
            tensors = [(i, x) for i, x in enumerate(operands) if isinstance(x, torch.Tensor)]
            self._bodies[name] = outputs, [i for i, tensor in tensors if tensor._version > before[i]]
            return outputs
        outputs, written = self._bodies[name]
        self.found.written.update(FakeRun.memory(operands[i]) for i in written)
        return pytree.tree_map_only(torch.Tensor, torch.empty_like, outputs)


def repeated_layers(model: nn.Module) -> list[type[nn.Module]]:
    """The classes of which a `ModuleList` of the model holds two or more: its layers."""
    found: dict[type[nn.Module], None] = {}
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            kinds = [type(child) for child in module]
            found.update({kind: None for kind in kinds if kinds.count(kind) > 1})
    inner = {type(m) for kind in found for layer in model.modules() if type(layer) is kind for m in _below(layer)}
    outer = [kind for kind in found if kind not in inner]
    # The forward of a derived layer may call its base's: of the two only the base can be a region.
    return [kind for kind in outer if not any(kind is not base and issubclass(kind, base) for base in outer)]


def why_not_regions(kinds: Sequence[type[nn.Module]], error: Exception) -> str:
    """What the report says where layers are compiled one by one, with Dynamo's own reason in one line."""
    lines = [line.strip() for line in str(error).splitlines()]
    told = next((line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: ")), lines[0])
    names = ", ".join(kind.__name__ for kind in kinds)
    return (
        f"{names}: each layer was traced and compiled anew, for as nested regions they cannot be traced "
        f"({told.split('. ')[0]}); "
        "a layer that returns only new tensors is compiled once for all of its kind"
    )


def _below(layer: nn.Module) -> Iterator[nn.Module]:
    for module in layer.modules():
        if module is not layer:
            yield module


@contextmanager
def marked(kinds: Sequence[type[nn.Module]], forwards: dict[type[nn.Module], Any]) -> Iterator[None]:
    """Mark these classes' forward as nested regions inside the block; `forwards` keeps the marked functions."""
    plain = {kind: kind.__dict__.get("forward") for kind in kinds}
    for kind in kinds:
        if kind not in forwards:
            # The limit of eight bodies is for models that compile anew at every call; layers that read
            # pool[self.index] are as many bodies as there are layers, and no more.
            forwards[kind] = torch.compiler.nested_compile_region(kind.forward, max_reuse_entries=1024)
        kind.forward = forwards[kind]
    try:
        yield
    finally:
        for kind, forward in plain.items():
            if forward is None:
                del kind.forward
            else:
                kind.forward = forward
