"""What the tensors of a graph are called in an ONNX model: a weight by its path, an input by its way in the arguments.

Dynamo hands a graph the caller's own tensors, so each is found by identity.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, fx, nn

if TYPE_CHECKING:
    from k31compile.entry import Entry

_DEEPEST = 12


@dataclass(frozen=True)
class Named:
    """A tensor that a graph takes: its name, and whether it is part of the model rather than of a call."""

    name: str
    is_weight: bool


def name_inputs(entry: Entry, graph: fx.Graph, inputs: Sequence[Any], taken: set[str]) -> list[Named]:
    """The name of each input of a graph that was captured from an entry; all differ, also from those `taken`."""
    weights = _weights(entry.model)
    arguments: dict[int, str] = {}
    for path, tensor in argument_tensors(entry):
        arguments.setdefault(id(tensor), path)
    found: list[Named] = []
    used = set(taken)
    for node, value in zip(graph.find_nodes(op="placeholder"), inputs, strict=True):
        is_weight = id(value) not in arguments and (id(value) in weights or isinstance(value, nn.Parameter))
        name = arguments.get(id(value)) or weights.get(id(value)) or _source(node)
        while name in used:
            name += "_"
        used.add(name)
        found.append(Named(name, is_weight))
    return found


def argument_tensors(entry: Entry) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in the arguments of an entry, with its path."""
    for name, value in _bound(entry):
        yield from _tensors(name, value, set())


def _weights(model: Any) -> dict[int, str]:
    if not isinstance(model, nn.Module):
        return {}
    return {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def _bound(entry: Entry) -> Iterator[tuple[str, Any]]:
    call = entry.model.forward if isinstance(entry.model, nn.Module) else entry.model
    try:
        bound = inspect.signature(call).bind(*entry.args, **entry.kwargs)
    except (TypeError, ValueError):
        yield from ((f"input_{position}", value) for position, value in enumerate(entry.args))
        yield from entry.kwargs.items()
        return
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        yield from value.items() if kind is inspect.Parameter.VAR_KEYWORD else ((name, value),)


def _tensors(path: str, value: Any, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in a value, with its path: keys, positions and attributes."""
    if isinstance(value, Tensor):
        yield path, value
        return
    if id(value) in seen or path.count(".") > _DEEPEST or isinstance(value, nn.Module):
        return
    seen.add(id(value))
    for key, part in _parts(value):
        yield from _tensors(f"{path}.{key}", part, seen)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((str(key), part) for key, part in value.items())
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from zip(value._fields, value, strict=True)
    elif isinstance(value, list | tuple):
        yield from ((str(position), part) for position, part in enumerate(value))
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        yield from vars(value).items()


def _source(node: fx.Node) -> str:
    return str(node.meta.get("source_name") or node.name).removeprefix("l_").rstrip("_")
