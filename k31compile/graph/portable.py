"""What a confirmation learned, as plain JSON: numbers, words, types, leaves by number, classes of ours by name.

A class is written and read only if it says `@portable`: what a file names is never imported.
"""

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import torch
from torch import fx

_CLASSES: dict[str, Any] = {}
Class = TypeVar("Class", bound=type)


class NotPortable(Exception):
    """A value that has no text which another process would understand, or a text that stands for no value here."""


def portable(cls: Class) -> Class:
    """Let instances of a dataclass be remembered; its fields must be portable, too."""
    if not is_dataclass(cls) or cls.__qualname__ in _CLASSES:
        raise TypeError(f"{cls.__qualname__} is no dataclass, or another class of that name is portable")
    _CLASSES[cls.__qualname__] = cls
    return cls


def to_plain(value: Any, leaves: Sequence[fx.Node]) -> Any:
    """The value as JSON; nodes must be leaves.

    Raises:
        NotPortable: something in it has no such form.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, fx.Node):
        if value not in leaves:
            raise NotPortable(f"{value.name} is no leaf")
        return {"leaf": leaves.index(value)}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if type(value) in (tuple, list):
        return {type(value).__name__: [to_plain(part, leaves) for part in value]}
    if type(value) is dict and all(type(key) is str for key in value):
        return {"dict": {key: to_plain(part, leaves) for key, part in value.items()}}
    name = type(value).__qualname__
    if _CLASSES.get(name) is not type(value):
        raise NotPortable(f"a {name} is not portable")
    parts = fields(_CLASSES[name])
    return {"of": name, "fields": {one.name: to_plain(getattr(value, one.name), leaves) for one in parts}}


def from_plain(plain: Any, leaves: Sequence[fx.Node]) -> Any:
    """The inverse of `to_plain`, for a region with these leaves.

    Raises:
        NotPortable: it is no text of `to_plain`, or names a class or leaf that is not here.
    """
    if plain is None or type(plain) in (bool, int, float, str):
        return plain
    match plain:
        case {"leaf": int(number), **rest} if not rest and 0 <= number < len(leaves):
            return leaves[number]
        case {"dtype": str(name), **rest} if not rest and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        case {"tuple": list(parts), **rest} if not rest:
            return tuple(from_plain(part, leaves) for part in parts)
        case {"list": list(parts), **rest} if not rest:
            return [from_plain(part, leaves) for part in parts]
        case {"dict": dict(parts), **rest} if not rest:
            return {key: from_plain(part, leaves) for key, part in parts.items()}
        case {"of": str(name), "fields": dict(parts), **rest} if not rest and name in _CLASSES:
            cls = _CLASSES[name]
            if parts.keys() != {one.name for one in fields(cls)}:
                raise NotPortable(f"a {name} has other fields than {', '.join(parts)}")
            return cls(**{key: from_plain(part, leaves) for key, part in parts.items()})
    raise NotPortable(f"{str(plain)[:80]} stands for nothing")
