"""Results that are views of what the caller gave, taken again behind a GE graph, where a view is a copy.

Who keeps such a result, `cache[:, :end]` for one, sees what later calls write, and what he writes is in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from k31compile.graph.sizes import is_tensor, value_of


@dataclass(frozen=True)
class ReturnedView:
    """A result that is a view of an input: the places of both, sizes and strides, and how far behind its start."""

    result: int
    position: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def find_returned_views(module: fx.GraphModule) -> list[ReturnedView]:
    """The results of a graph with writes in place that lie in an input's memory; weights may lie in blocks."""
    inputs = module.graph.find_nodes(op="placeholder")
    (results,) = module.graph.output_node().args
    found = []
    for i, node in enumerate(results if isinstance(results, list | tuple) else [results]):
        base, steps = _way_from_an_input(node) if isinstance(node, fx.Node) else (None, [])
        if base is None or base.meta.get("is_parameter", False):
            continue
        view = _taken(value_of(base), steps)
        if view is not None:
            place = inputs.index(base)
            found.append(ReturnedView(i, place, tuple(view.size()), view.stride(), int(view.storage_offset())))
    return found


def give_views(call: Callable[..., Any], views: Sequence[ReturnedView]) -> Callable[..., Any]:
    """The call with each of these results taken from the input that it was given."""
    if not views:
        return call

    def run(*args: Any) -> Any:
        results = list(call(*args))
        for one in views:
            given = args[one.position]
            is_whole = one.offset == 0 and (one.size, one.stride) == (given.size(), given.stride())
            place = given.storage_offset() + one.offset
            results[one.result] = given if is_whole else given.as_strided(one.size, one.stride, place)
        return tuple(results)

    return run


def _way_from_an_input(node: fx.Node) -> tuple[fx.Node | None, list[fx.Node]]:
    """The input whose memory a node's value may lie in, and what takes it from there; None where there is none."""
    steps: list[fx.Node] = []
    while node.op != "placeholder":
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node) or not _may_share(node):
            return None, []
        steps.insert(0, node)
        node = source
    return (node, steps) if is_tensor(node) else (None, [])


def _may_share(node: fx.Node) -> bool:
    """Whether a node's value may lie in the memory of its first argument: a view, a part, what it has written into."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return bool(target._schema.returns) and target._schema.returns[0].alias_info is not None
    return getattr(target, "__name__", "") == "getitem"


def _taken(given: torch.Tensor, steps: Sequence[fx.Node]) -> torch.Tensor | None:
    """The view that the steps take of a tensor like the given one, at offset 0; None where one of them copies."""
    whole = torch.empty_strided(given.size(), given.stride(), dtype=given.dtype, device="meta")
    value: Any = whole
    for step in steps:
        schema = getattr(step.target, "_schema", None)
        if schema is not None and schema.is_mutable:
            continue
        if any(isinstance(argument, fx.Node) for argument in step.args[1:]):
            return None
        value = step.target(value, *step.args[1:], **step.kwargs)  # type: ignore[operator]
    is_view = isinstance(value, torch.Tensor) and value.dtype == given.dtype
    return value if is_view and value.untyped_storage()._cdata == whole.untyped_storage()._cdata else None
