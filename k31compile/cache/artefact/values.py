"""Python values that a call may hold beside tensors, as plain text: numbers, names of classes, members of enums.

What was such a value when a graph was made is part of the graph, so it is compared and never converted.
"""

from __future__ import annotations

import enum
import importlib
import sys
import types
from typing import Any

import torch

from k31compile.errors import ArtefactError

Text = list[str]
"""[kind, text] of a value."""

_REPEATED = (bool, int, float, complex, bytes, range, type(None), type(...))
_SAID: dict[type, str] = {}
"""Classes whose one value is told by a word; `signature` has one."""
_OF_TORCH = (torch.dtype, torch.layout, torch.memory_format)
_FROM_FILE = "k31_target_"  # what the commands call a module that they load from a file


def text_of(value: Any) -> Text | None:
    """A value as [kind, text], equal for equal values only; None for what is no plain value."""
    kind = type(value)
    if kind in _SAID:
        return [_SAID[kind], ""]
    if isinstance(value, enum.Enum):
        return ["enum", f"{class_name(kind)}.{value.name}"]
    if kind is str:
        return ["str", value]
    if kind in _REPEATED:
        return [kind.__name__, repr(value)]
    if kind in _OF_TORCH or kind is torch.device:
        return [kind.__name__, str(value)]
    if kind is slice and all(type(part) in (int, type(None)) for part in (value.start, value.stop, value.step)):
        return ["slice", repr(value)]
    if kind in (set, frozenset):
        return _text_of_set(value)
    if isinstance(value, type):
        return ["class", class_name(value)]
    if kind is types.FunctionType and "<" not in value.__qualname__:
        return ["function", f"{value.__module__}:{value.__qualname__}"]
    return None


def register_word(kind: type, word: str) -> None:
    """Let the values of a class count as equal plain values, told by a word."""
    _SAID[kind] = word


def _text_of_set(values: Any) -> Text | None:
    texts = [text_of(value) for value in values]
    if any(text is None for text in texts):
        return None
    return [type(values).__name__, repr(sorted(text for text in texts if text is not None))]


def value_from(text: Text) -> Any:
    """The value that [kind, text] stands for, of the kinds that a result may hold.

    Raises:
        KeyError: no such kind.
    """
    kind, said = text
    if kind in ("dtype", "layout", "memory_format"):
        return getattr(torch, said.removeprefix("torch."))
    if kind == "enum":
        name, _, member = said.rpartition(".")
        return class_from(name)[member]  # type: ignore[index]
    return _MAKERS[kind](said)


_MAKERS: dict[str, Any] = {
    "NoneType": lambda _: None,
    "bool": lambda said: said == "True",
    "int": int,
    "float": float,
    "complex": complex,
    "str": str,
    "device": torch.device,
}
KINDS_OF_RESULTS = frozenset({*_MAKERS, "dtype", "layout", "memory_format", "enum"})
"""The kinds that `value_from` makes."""


def class_name(kind: type) -> str:
    """A class as module:name."""
    return f"{kind.__module__}:{kind.__qualname__}"


def is_class(kind: type, name: str) -> bool:
    """Whether a class has a name; a file that is run, or loaded by a command, is the module of its name."""
    if class_name(kind) == name:
        return True
    module, _, qualified = name.partition(":")
    mine, theirs = _plain(kind.__module__), _plain(module)
    return kind.__qualname__ == qualified and (mine == theirs or "__main__" in (mine, theirs))


def _plain(module: str) -> str:
    return module.removeprefix(_FROM_FILE)


def class_from(name: str) -> type:
    """The class of a name, imported where it is not there.

    Raises:
        ArtefactError: there is none here.
    """
    module, _, qualified = name.partition(":")
    for candidate in dict.fromkeys((module, _plain(module))):
        try:
            found: Any = sys.modules.get(candidate) or importlib.import_module(candidate)
            for part in qualified.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError):
            continue
        if isinstance(found, type):
            return found
    raise ArtefactError(
        f"its results are of class {qualified} of module {module}, which cannot be imported here",
        hint="install or put on PYTHONPATH the package that has it",
    )
