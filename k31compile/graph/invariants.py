"""What every pass must keep, checked after each: a well-formed graph, outputs as they were, mutations in place."""

from collections.abc import Sequence
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


def check_invariants(before: fx.GraphModule, after: fx.GraphModule, pass_name: str) -> None:
    """Compare a graph with what a pass made of it.

    Raises:
        InvariantError: the graph is malformed, an output changed its shape, dtype, stride or device, or a mutation of
            an input was lost, added or moved to another input.
    """
    try:
        after.graph.lint()
        outputs = refresh_fakes(before, after)
    except Exception as error:
        raise InvariantError(f"pass {pass_name} left a graph that does not run: {error}") from error
    old_outputs = pytree.tree_leaves(fx.map_arg(before.graph.output_node().args[0], value_of))
    if len(outputs) != len(old_outputs):
        raise InvariantError(
            f"pass {pass_name} changed the number of outputs from {len(old_outputs)} to {len(outputs)}"
        )
    for i, (new, old) in enumerate(zip(outputs, old_outputs, strict=True)):
        _check_output(new, old, i, pass_name)
    if mutated_inputs(before) != mutated_inputs(after):
        raise InvariantError(
            f"pass {pass_name} changed the mutated inputs from {mutated_inputs(before)} to {mutated_inputs(after)}"
        )


def mutated_inputs(module: fx.GraphModule) -> list[str]:
    """The placeholders that the graph writes to, in order."""
    copies = module.graph.find_nodes(op="call_function", target=ATEN.copy_.default)
    return [node.args[0].name for node in copies]


def refresh_fakes(before: fx.GraphModule, after: fx.GraphModule) -> list[Any]:
    """Run anew, on fake values, every node whose inputs are not what they were; return the flat outputs."""
    old = {node.name: node for node in before.graph.nodes}
    inputs = [value_of(node) for node in before.graph.nodes if node.op == "placeholder"]
    with current_fake_mode_of(inputs), enable_python_dispatcher(), torch.no_grad():
        for node in after.graph.nodes:
            if node.op == "call_function" and not _reads_the_same(node, old.get(node.name)):
                _refresh(node)
    return pytree.tree_leaves(fx.map_arg(after.graph.output_node().args[0], value_of))


def _reads_the_same(node: fx.Node, old: fx.Node | None) -> bool:
    if old is None or old.target != node.target or len(old.all_input_nodes) != len(node.all_input_nodes):
        return False
    if _plain(node) != _plain(old):
        return False
    pairs = zip(node.all_input_nodes, old.all_input_nodes, strict=True)
    return all(_looks_the_same(value_of(new), value_of(was)) for new, was in pairs)


def _plain(node: fx.Node) -> str:
    """The arguments with a mark in place of every node."""
    return str(fx.map_arg((node.args, dict(node.kwargs)), lambda _: "node"))


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
