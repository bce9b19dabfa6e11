"""Where Dynamo took an input of a graph from, by the chain of its sources."""

from __future__ import annotations

from typing import Any

from torch import fx


def argument_root(node: fx.Node) -> str:
    """The name of the local variable that an input was reached from; empty where it was something else."""
    root: Any = _source(node)
    while getattr(root, "base", None) is not None:
        root = root.base
    is_cell = getattr(root, "is_derefed_cell_contents", False)
    name = getattr(root, "local_name", "")
    return "" if is_cell else str(name)


def name_of_source(node: fx.Node) -> str:
    """A name for a tensor that is neither an argument nor in the state dict: how Dynamo reached it."""
    source: Any = _source(node)
    return str(source.name if source is not None else node.name)


def _source(node: fx.Node) -> Any:
    return node.meta.get("source") or getattr(node, "_dynamo_source", None)
