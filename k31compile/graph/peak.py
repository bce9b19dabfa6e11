"""What a graph needs of memory when it runs node by node, predicted from the fake values: nothing is run.

A value lives from the node that makes it to its last reader, and views live with what they look into. Memory that an
operator takes and gives back inside itself (composite ATen operators, workspaces of kernels) is not seen.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from k31compile.graph.sizes import hint
from k31compile.graph.source import source_line

Called = Callable[[fx.Node], fx.GraphModule | None]


@dataclass(frozen=True)
class Memory:
    """Bytes by hints: weights and other inputs, which the caller holds, and the most of all else alive at once."""

    weights: int
    inputs: int
    peak: int
    at: str

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; `at` is the line of the user's code where the peak is reached."""
        return {"weights": self.weights, "inputs": self.inputs, "peak": self.peak, "at": self.at}


def predict_memory(module: fx.GraphModule, body_of: Called = lambda _: None) -> Memory:
    """The memory of one call of `module`; `body_of` gives the graph that a node calls, if it calls one.

    Dynamic sizes count with the values that they had when the graph was traced. Outputs belong to the peak.
    """
    lives = _Lives(module.graph)
    weights, inputs = 0, 0
    for node in module.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            held = sum(_bytes_of(tensor) for tensor in _tensors(node))
            is_weight = node.op == "get_attr" or node.meta.get("is_parameter", False)
            weights, inputs = weights + held * is_weight, inputs + held * (not is_weight)
    alive, peak, at = 0, 0, ""
    for node in module.graph.nodes:
        alive += lives.born.get(node, 0)
        body = body_of(node)
        inside = max(0, predict_memory(body, body_of).peak - lives.born.get(node, 0)) if body else 0
        if alive + inside > peak:
            peak, at = alive + inside, source_line(node)
        alive -= lives.ended.get(node, 0)
    return Memory(weights, inputs, peak, at)


class _Lives:
    """For each node the bytes that it makes, and the bytes of which it is the last reader."""

    def __init__(self, graph: fx.Graph) -> None:
        self.born: dict[fx.Node, int] = {}
        self.ended: dict[fx.Node, int] = {}
        maker: dict[int, fx.Node] = {}
        owners: dict[fx.Node, set[fx.Node]] = {}
        last: dict[fx.Node, fx.Node] = {}
        for node in graph.nodes:
            owners[node] = self._owners(node, maker, owners)
            for read in (node, *node.all_input_nodes):
                for owner in owners[read]:
                    last[owner] = node
        for owner, node in last.items():
            if node.op != "output":
                self.ended[node] = self.ended.get(node, 0) + self.born.get(owner, 0)

    def _owners(self, node: fx.Node, maker: dict[int, fx.Node], owners: dict[fx.Node, set[fx.Node]]) -> set[fx.Node]:
        """The nodes that made the memory of this node's tensors, itself among them where some of it is new."""
        written = _returned_arguments(node)
        if written:
            return {owner for source in written for owner in owners[source]}
        found: set[fx.Node] = set()
        for tensor in _tensors(node):
            known = maker.setdefault(_storage(tensor), node)
            found.add(known)
            if known is node and node.op == "call_function":
                self.born[node] = self.born.get(node, 0) + _bytes_of(tensor)
        return found


def _returned_arguments(node: fx.Node) -> list[fx.Node]:
    """The arguments that an operator writes and returns: its fake value may be one of its own."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not any(r.alias_info is not None and r.alias_info.is_write for r in schema.returns):
        return []
    written = [a.alias_info is not None and a.alias_info.is_write for a in schema.arguments]
    return [arg for arg, is_written in zip(node.args, written, strict=False) if is_written and isinstance(arg, fx.Node)]


def _tensors(node: fx.Node) -> Iterator[torch.Tensor]:
    value = node.meta.get("val", node.meta.get("example_value"))
    return (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _bytes_of(tensor: torch.Tensor) -> int:
    return hint(tensor.untyped_storage().nbytes())
