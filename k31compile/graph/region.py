"""A region: what lies between some leaves and some outputs, as it stands in the user's graph."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from k31compile.graph.dataflow import Dataflow
from k31compile.graph.sizes import expression_of, value_of


@dataclass(frozen=True)
class Region:
    """The nodes that compute `outputs` from `leaves`, in order; the leaves are not among them, constants are."""

    leaves: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]

    @staticmethod
    def between(flow: Dataflow, leaves: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> "Region":
        """The region from `leaves` to `outputs`.

        Raises:
            ValueError: an output depends on a tensor of the caller that is no leaf.
        """
        ordered = tuple(flow.in_order(leaves))
        cut = set(ordered)
        inner = flow.ancestors(outputs, stop=cut.__contains__) - cut
        # Shapes come from anywhere: a node that lends only its shape is not part of what is computed.
        for node in inner:
            if node.op == "placeholder" and node not in flow.constants:
                raise ValueError(f"{node.name} reaches the outputs and is no leaf")
        return Region(ordered, tuple(outputs), tuple(flow.in_order(inner)))

    @cached_property
    def canonical_hash(self) -> str:
        """A hash of what the region computes: equal for equal layers, whatever their names and weights."""
        ids: dict[fx.Node, str] = {}
        symbols: dict[str, int] = {}
        for i, leaf in enumerate(self.leaves):
            ids[leaf] = f"leaf{i}:{_meta_text(leaf, symbols)}"
        for node in self.nodes:
            ids[node] = _digest(
                str(node.op),
                str(node.target) if node.op == "call_function" else _meta_text(node, symbols) + _content(node),
                _argument_text(node.args, ids, symbols),
                _argument_text(sorted(node.kwargs.items()), ids, symbols),
            )
        return _digest(*(ids[leaf] for leaf in self.leaves), *(ids[out] for out in self.outputs))


def _content(node: fx.Node) -> str:
    """A constant tensor by its values: two masks of one shape are two regions."""
    if node.op != "get_attr":
        return ""
    tensor = attribute_of(node).detach().cpu().contiguous()
    return _digest(str(tensor.dtype), tensor.reshape(-1).view(torch.uint8).numpy().tobytes().hex())


def attribute_of(node: fx.Node) -> torch.Tensor:
    """The tensor that a get_attr node names."""
    module: Any = node.graph.owning_module
    for name in str(node.target).split("."):
        module = getattr(module, name)
    assert isinstance(module, torch.Tensor)
    return module


def text_of_values(nodes: Sequence[fx.Node]) -> str:
    """Types, sizes and strides of some nodes, symbols by their own names: equal texts, equal fake values."""
    parts = []
    for node in nodes:
        value = value_of(node)
        is_tensor = isinstance(value, torch.Tensor)
        parts.append(f"{value.dtype}{tuple(value.shape)}{value.stride()}{value.device}" if is_tensor else repr(value))
    return ";".join(parts)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\x1f".join(parts).encode()).hexdigest()


def _meta_text(node: fx.Node, symbols: dict[str, int]) -> str:
    value = value_of(node)
    if isinstance(value, torch.Tensor):
        sizes = ",".join(_size_text(s, symbols) for s in value.shape)
        strides = ",".join(_size_text(s, symbols) for s in value.stride())
        return f"{value.dtype}[{sizes}|{strides}]"
    return _size_text(value, symbols)


def _size_text(size: Any, symbols: dict[str, int]) -> str:
    if not isinstance(size, torch.SymInt):
        return repr(size)
    expression = expression_of(size)
    for symbol in sorted(expression.free_symbols, key=str):
        symbols.setdefault(str(symbol), len(symbols))
    names = {symbol: type(symbol)(f"n{symbols[str(symbol)]}") for symbol in expression.free_symbols}
    return str(expression.xreplace(names))


def _argument_text(argument: Any, ids: dict[fx.Node, str], symbols: dict[str, int]) -> str:
    if isinstance(argument, fx.Node):
        # A node outside the region lends only its shape.
        return ids.get(argument) or _meta_text(argument, symbols)
    if isinstance(argument, list | tuple):
        return "(" + ",".join(_argument_text(a, ids, symbols) for a in argument) + ")"
    return repr(argument)
