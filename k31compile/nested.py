"""Equal layers compiled once: bodies of nested regions are rewritten each on its own, their calls stay opaque.

torch 2.13 cannot trace functionally through `invoke_subgraph`, and marking module instances makes every layer use the
first one's weights; so layers are marked on their class, for the time of a call only.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch._dispatch.python import enable_python_dispatcher

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


def body_inputs(module: fx.GraphModule, example_inputs: Sequence[Any]) -> dict[str, list[Any]]:
    """For each body the fake operands of its first call, from one fake run of the outer graph."""
    recorder = _Recorder(module)
    fake_mode = current_fake_mode()
    with fake_mode, enable_python_dispatcher(), torch.no_grad():
        recorder.run(*fake_inputs(example_inputs, fake_mode))
    return recorder.operands


class _Recorder(fx.Interpreter):
    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.operands: dict[str, list[Any]] = {}

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is not _CALL:
            return super().call_function(target, args, kwargs)
        body, _, *operands = args
        name = next(n for n, child in self.module.named_children() if child is body)
        self.operands.setdefault(name, operands)
        return fx.Interpreter(body).run(*operands)


def repeated_layers(model: nn.Module) -> list[type[nn.Module]]:
    """The classes of which a `ModuleList` of the model holds two or more: its layers."""
    found: dict[type[nn.Module], None] = {}
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            kinds = [type(child) for child in module]
            found.update({kind: None for kind in kinds if kinds.count(kind) > 1})
    inner = {type(m) for kind in found for layer in model.modules() if type(layer) is kind for m in _below(layer)}
    return [kind for kind in found if kind not in inner]


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
