"""The arguments of a call as plain data: what holds what, by which class, down to tensors and plain values.

`describe` writes it at compile; a `Matcher` walks the arguments of a later call beside it and takes the tensors out.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from k31compile.cache.artefact.tensors import Mismatch
from k31compile.cache.artefact.values import class_name, is_class, text_of

Tree = dict[str, Any]
Step = list[Any]
"""["attribute", name], ["index", number] or ["key", kind, text]."""

_OPAQUE = (torch.nn.Module, types.ModuleType, types.GeneratorType, types.MethodType)
_BUILTIN = (list, tuple, dict)
_PLAIN_DATA = "tensors, plain values, tuples, lists, dicts and objects that hold these"


@dataclass
class Described:
    """A tree of arguments, and the tensors in it in the order of their numbers, with their paths."""

    tree: dict[str, Tree] = field(default_factory=dict)
    tensors: list[torch.Tensor] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    objects: dict[int, str] = field(default_factory=dict)
    held: list[Any] = field(default_factory=list)

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """The first number of a tensor."""
        return next((number for number, other in enumerate(self.tensors) if other is tensor), None)


def describe(arguments: Mapping[str, Any]) -> Described:
    """Write down the arguments of a call, by the names of the parameters.

    Raises:
        Mismatch: something in them that is no plain data.
    """
    described = Described()
    for name, value in arguments.items():
        described.tree[name] = _describe(value, name, described)
    return described


def _describe(value: Any, path: str, found: Described) -> Tree:
    if isinstance(value, torch.Tensor):
        found.tensors.append(value)
        found.paths.append(path)
        return {"tensor": len(found.tensors) - 1}
    text = text_of(value)
    if text is not None:
        return {"value": text}
    if id(value) in found.objects:
        return {"same": found.objects[id(value)]}
    if not isinstance(value, tuple):
        found.objects[id(value)] = path
        found.held.append(value)
    parts = parts_of(value)
    if parts is None:
        raise Mismatch(path, f"is a {type(value).__name__}", _PLAIN_DATA)
    kind, steps = parts
    _refuse_more(value, kind, path)
    tree: Tree = {kind: class_name(type(value)), "steps": [step for step, _ in steps]}
    tree["items"] = [_describe(part, path + told(step), found) for step, part in steps]
    return tree


def parts_of(value: Any) -> tuple[str, list[tuple[Step, Any]]] | None:
    """What a container is ("sequence", "mapping" or "object") and its parts by steps; None for what is none."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return "sequence", [(["attribute", name], part) for name, part in zip(value._fields, value, strict=True)]
    if isinstance(value, tuple | list):
        return "sequence", [(["index", index], part) for index, part in enumerate(value)]
    if isinstance(value, dict):
        texts = [(text_of(key), part) for key, part in value.items()]
        if any(text is None for text, _ in texts):
            return None
        return "mapping", [(["key", *text], part) for text, part in texts if text is not None]
    if isinstance(value, _OPAQUE) or callable(value):
        return None
    names = sorted(set(_attributes(value)))
    if not names and not hasattr(value, "__dict__"):
        return None
    return "object", [(["attribute", name], getattr(value, name)) for name in names]


def _attributes(value: Any) -> Iterator[str]:
    yield from vars(value) if hasattr(value, "__dict__") else ()
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name


def _refuse_more(value: Any, kind: str, path: str) -> None:
    """Raise Mismatch for a list, tuple or dict that has attributes beside its items, which a model can read."""
    if type(value) in _BUILTIN or kind == "object":
        return
    for name in _attributes(value):
        held = getattr(value, name)
        # A dataclass that is a dict, as transformers' ModelOutput, has its items twice, and None not among them.
        if kind == "sequence" or value.get(name) is not held:
            found = f"is a {type(value).__name__} with the attribute {name} beside its items"
            raise Mismatch(path, found, "items alone, or an object whose fields they are")


def told(step: Step) -> str:
    """A step as a user writes it."""
    if step[0] == "attribute":
        return f".{step[1]}"
    return f"[{step[1]}]" if step[0] == "index" else f"[{step[2]!r}]" if step[1] == "str" else f"[{step[2]}]"


class Matcher:
    """Takes the tensors out of the arguments of a call, in the order of their numbers, if all else is as promised."""

    def __init__(self, tree: Mapping[str, Tree], told_tensors: list[str]) -> None:
        self._told = told_tensors
        self._roots = {name: self._make(node, name) for name, node in tree.items()}

    def take(self, arguments: Mapping[str, Any], tensors: list[Any]) -> None:
        """Put the tensors of a call into their places; a tensor's own properties are not looked at here.

        Raises:
            Mismatch: the arguments are not built as they were at compile, or a plain value is another. What comes
                before it is in its place.
        """
        seen: dict[str, Any] = {}
        for name, value in arguments.items():
            self._roots[name].take(value, tensors, seen)

    def _make(self, node: Tree, path: str) -> _Node:
        if "tensor" in node:
            return _Tensor(path, node["tensor"], self._told[node["tensor"]])
        if "value" in node:
            return _Value(path, node["value"])
        if "same" in node:
            return _Same(path, node["same"])
        kind = next(key for key in ("sequence", "mapping", "object") if key in node)
        steps = node["steps"]
        items = [self._make(part, path + told(step)) for step, part in zip(steps, node["items"], strict=True)]
        return _Container(path, kind, node[kind], steps, items)


class _Node:
    def __init__(self, path: str) -> None:
        self.path = path

    def take(self, value: Any, out: list[Any], seen: dict[str, Any]) -> None:
        raise NotImplementedError


class _Tensor(_Node):
    def __init__(self, path: str, number: int, told: str) -> None:
        super().__init__(path)
        self.number, self.told = number, told

    def take(self, value: Any, out: list[Any], seen: dict[str, Any]) -> None:
        if not isinstance(value, torch.Tensor):
            found = "is None" if value is None else f"is {_short(value)}"
            raise Mismatch(self.path, found, self.told)
        out[self.number] = value


class _Value(_Node):
    def __init__(self, path: str, text: list[str]) -> None:
        super().__init__(path)
        self.text = text

    def take(self, value: Any, out: list[Any], seen: dict[str, Any]) -> None:
        text = text_of(value)
        if text != self.text and not (text and self._is_class(value, text)):
            kind, said = self.text
            allowed = repr(said) if kind == "str" else said if kind != "class" else f"class {said}"
            raise Mismatch(self.path, f"is {_short(value)}", f"{allowed}, which is part of what was compiled")

    def _is_class(self, value: Any, text: list[str]) -> bool:
        return self.text[0] == text[0] == "class" and is_class(value, self.text[1])


class _Same(_Node):
    def __init__(self, path: str, other: str) -> None:
        super().__init__(path)
        self.other = other

    def take(self, value: Any, out: list[Any], seen: dict[str, Any]) -> None:
        if value is not seen.get(self.other):
            raise Mismatch(self.path, "is an object of its own", f"the object that is {self.other}")


class _Container(_Node):
    def __init__(self, path: str, kind: str, name: str, steps: list[Step], items: list[_Node]) -> None:
        super().__init__(path)
        self.kind, self.name, self.steps, self.items = kind, name, steps, items
        self._last: type | None = None

    def take(self, value: Any, out: list[Any], seen: dict[str, Any]) -> None:
        cls = type(value)
        if cls is not self._last:
            if not is_class(cls, self.name):
                raise Mismatch(self.path, f"is {_short(value)}", f"a {self.name.partition(':')[2]}")
            self._last = cls
        _refuse_more(value, self.kind, self.path)
        seen[self.path] = value
        if self.kind == "sequence":
            parts = list(value)
            if len(parts) != len(self.items):
                raise Mismatch(self.path, f"has {len(parts)} items", str(len(self.items)))
        else:
            parts = self._parts(value)
        for node, part in zip(self.items, parts, strict=True):
            node.take(part, out, seen)

    def _parts(self, value: Any) -> list[Any]:
        found = parts_of(value)
        steps = [step for step, _ in found[1]] if found else []
        if steps != self.steps:
            odd = [step for step in steps if step not in self.steps] + [
                step for step in self.steps if step not in steps
            ]
            names = ", ".join(told(step).lstrip(".") for step in self.steps)
            what = f"differs in {told(odd[0]).lstrip('.')}" if odd else "has its parts in another order"
            raise Mismatch(self.path, what, f"{names or 'nothing in it'}")
        assert found is not None
        return [part for _, part in found[1]]


def _short(value: Any) -> str:
    text = text_of(value)
    if text is None or text[0] in ("class", "function"):
        return f"a {type(value).__name__}"
    return repr(value) if len(repr(value)) < 60 else f"a {type(value).__name__}"
