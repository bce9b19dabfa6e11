"""What every pass must keep, checked after each: a well-formed graph, outputs as they were, mutations in place."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch.utils import _pytree as pytree

from k31compile.errors import InvariantError
from k31compile.graph.dataflow import ATEN
from k31compile.graph.rewrite import is_dense, same_sizes, same_strides
from k31compile.graph.sizes import value_of
from k31compile.graph.trace import current_fake_mode


@dataclass(frozen=True)
class _Record:
    """A node as it was; fx replaces arguments and never changes them in place."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    value: Any

    def is_of(self, node: fx.Node) -> bool:
        """Whether the node still says the same."""
        return node.target is self.target and node.args is self.args and node.kwargs is self.kwargs


@dataclass(frozen=True)
class Snapshot:
    """A graph as it was, to compare with what a pass made of it in place."""

    records: Mapping[fx.Node, _Record]
    outputs: Sequence[Any]
    mutated: Sequence[str]

    def is_current(self, graph: fx.Graph) -> bool:
        """Whether the graph is what it was, node by node."""
        nodes = list(graph.nodes)
        if len(nodes) != len(self.records):
            return False
        return all(a is b and self.records[a].is_of(a) for a, b in zip(nodes, self.records, strict=True))


def take_snapshot(module: fx.GraphModule) -> Snapshot:
    """What `check_invariants` compares with, taken before a pass."""
    nodes = module.graph.nodes
    records = {node: _Record(node.target, node.args, node.kwargs, value_of(node)) for node in nodes}
    return Snapshot(records, _output_values(module), mutated_inputs(module))


def check_invariants(before: Snapshot, module: fx.GraphModule, pass_name: str) -> None:
    """Compare a graph with what it was before a pass, running anew on fake values whatever reads something else.

    Raises:
        InvariantError: the graph is malformed, an output changed its shape, dtype, stride or device, or a mutation of
            an input was lost, added or moved to another input.
    """
    try:
        module.graph.lint()
        _refresh_fakes(before, module)
    except Exception as error:
        raise InvariantError(f"pass {pass_name} left a graph that does not run: {error}") from error
    outputs = _output_values(module)
    if len(outputs) != len(before.outputs):
        raise InvariantError(
            f"pass {pass_name} changed the number of outputs from {len(before.outputs)} to {len(outputs)}"
        )
    for i, (new, old) in enumerate(zip(outputs, before.outputs, strict=True)):
        _check_output(new, old, i, pass_name)
    if mutated_inputs(module) != before.mutated:
        raise InvariantError(
            f"pass {pass_name} changed the mutated inputs from {before.mutated} to {mutated_inputs(module)}"
        )


def mutated_inputs(module: fx.GraphModule) -> list[str]:
    """The placeholders that the graph writes to, in order."""
    copies = module.graph.find_nodes(op="call_function", target=ATEN.copy_.default)
    return [node.args[0].name for node in copies]


def _output_values(module: fx.GraphModule) -> list[Any]:
    return pytree.tree_leaves(fx.map_arg(module.graph.output_node().args[0], value_of))


def _refresh_fakes(before: Snapshot, module: fx.GraphModule) -> None:
    inputs = [value_of(node) for node in module.graph.nodes if node.op == "placeholder"]
    with current_fake_mode_of(inputs), enable_python_dispatcher(), torch.no_grad():
        for node in module.graph.nodes:
            if node.op == "call_function" and not _reads_the_same(node, before.records):
                _refresh(node)


def _reads_the_same(node: fx.Node, records: Mapping[fx.Node, _Record]) -> bool:
    old = records.get(node)
    if old is None or node.target is not old.target:
        return False
    if old.is_of(node):
        return all(_looks_the_same(value_of(source), records[source].value) for source in node.all_input_nodes)
    were: list[fx.Node] = []
    are: list[fx.Node] = []
    if _plain(node.args, node.kwargs, are) != _plain(old.args, old.kwargs, were) or len(are) != len(were):
        return False
    return all(_looks_the_same(value_of(new), records[was].value) for new, was in zip(are, were, strict=True))


def _plain(args: Any, kwargs: Any, nodes: list[fx.Node]) -> str:
    """The arguments with a mark in place of every node; the nodes are put into `nodes`."""

    def mark(node: fx.Node) -> str:
        nodes.append(node)
        return "node"

    return str(fx.map_arg((args, dict(kwargs)), mark))


def _looks_the_same(new: Any, old: Any) -> bool:
    if new is old:
        return True
    if not isinstance(new, torch.Tensor) or not isinstance(old, torch.Tensor):
        return False
    alike = new.dtype == old.dtype and new.device == old.device and same_sizes(new.shape, old.shape)
    return alike and same_sizes(new.stride(), old.stride())


def _refresh(node: fx.Node) -> None:
    if node.target is ATEN.copy_.default or not callable(node.target):
        return
    args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
    node.meta["val"] = node.target(*args, **kwargs)


def current_fake_mode_of(values: Sequence[Any]) -> Any:
    """The fake mode that these values belong to, or the current one."""
    return next((v.fake_mode for v in values if hasattr(v, "fake_mode")), None) or current_fake_mode()


def _check_output(new: Any, old: Any, index: int, pass_name: str) -> None:
    if not isinstance(old, torch.Tensor):
        return
    same = (
        isinstance(new, torch.Tensor)
        and new.dtype == old.dtype
        and new.device == old.device
        and same_sizes(new.shape, old.shape)
        and (same_strides(new, old) or not is_dense(old))
    )
    if not same:
        raise InvariantError(f"pass {pass_name} changed output {index} from {_describe(old)} to {_describe(new)}")


def _describe(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    return f"{value.dtype} {tuple(value.shape)} stride {value.stride()} on {value.device}"
