"""Tensors inside of arguments, found and replaced by path, padded to a larger size and cut back."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def part_at(holder: Any, path: str) -> Any:
    """The part of some nested value that a path names, "" for all of it; LookupError names what is not there."""
    for key in path.split(".") if path else ():
        holder = _step(holder, key)
    return holder


def with_part(holder: Any, path: str, value: Any) -> Any:
    """A nested value with another part at a path; what the path leads through is copied, the rest is shared."""
    if not path:
        return value
    key, _, rest = path.partition(".")
    inner = with_part(_step(holder, key), rest, value)
    if isinstance(holder, tuple) and hasattr(holder, "_replace"):
        name = holder._fields[int(key)] if key.isdecimal() else key  # type: ignore[attr-defined]
        return holder._replace(**{name: inner})
    if isinstance(holder, tuple | list):
        items = list(holder)
        items[int(key)] = inner
        return type(holder)(items)
    if isinstance(holder, Mapping):
        return {**holder, _key_of(holder, key): inner}
    if dataclasses.is_dataclass(holder) and not isinstance(holder, type):
        return dataclasses.replace(holder, **{key: inner})
    changed = copy.copy(holder)
    setattr(changed, key, inner)
    return changed


def argument_at(arguments: Arguments, path: str) -> Any:
    """The part of a call's arguments at a path of `Entry.dynamic`; LookupError where there is none."""
    holder, rest = _split(arguments, path)
    return part_at(holder, rest)


def with_argument(arguments: Arguments, path: str, value: Any) -> Arguments:
    """A call's arguments with another part at a path of `Entry.dynamic`."""
    args, kwargs = arguments
    first, _, rest = path.partition(".")
    if first.isdecimal():
        place = int(first)
        return (*args[:place], with_part(args[place], rest, value), *args[place + 1 :]), kwargs
    return args, {**kwargs, first: with_part(kwargs[first], rest, value)}


def resized(tensor: Tensor, sizes: Mapping[int, int], fill: float) -> Tensor:
    """A new contiguous tensor of these sizes at these dimensions, with what fits of the old one and `fill` beyond.

    It is an inference tensor where the old one is, so that a graph for one serves the other.
    """
    shape = list(tensor.shape)
    for dim, size in sizes.items():
        shape[dim] = size
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        made = torch.full(shape, fill, dtype=tensor.dtype, device=tensor.device)
        kept = {dim: min(size, tensor.shape[dim]) for dim, size in sizes.items()}
        cut(made, kept).copy_(cut(tensor, kept))
    return made


def cut(tensor: Tensor, sizes: Mapping[int, int]) -> Tensor:
    """A view of the first so many rows at these dimensions."""
    for dim, size in sizes.items():
        tensor = tensor.narrow(dim, 0, size)
    return tensor


def write_back(tensor: Tensor, padded: Tensor, sizes: Mapping[int, int]) -> None:
    """Give a tensor what a call wrote into its padded copy, where it wrote anything."""
    written = cut(padded, sizes)
    if not torch.equal(written, tensor):
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            tensor.copy_(written)


def check_fill(fill: Any, dtype: torch.dtype) -> str:
    """Why a tensor of this dtype cannot be filled with a value; empty where it can."""
    if isinstance(fill, bool):
        return "" if dtype == torch.bool else f"{fill!r} is for tensors of bool, this one is {_name(dtype)}"
    if dtype == torch.bool:
        return f"{fill!r} is no value of a tensor of bool"
    if isinstance(fill, int):
        return ""
    if not isinstance(fill, float):
        return f"{fill!r} is no number"
    return "" if dtype.is_floating_point or dtype.is_complex else f"{fill!r} is no value of {_name(dtype)}"


def map_paths(paths: Mapping[str, Any], arguments: Arguments, change: Callable[[str, Tensor], Tensor]) -> Arguments:
    """Arguments with the tensor at each path changed; a tensor that stands at several paths stays one."""
    made: dict[tuple[int, str], Tensor] = {}
    for path in paths:
        old = argument_at(arguments, path)
        key = (id(old), repr(paths[path]))
        if key not in made:
            made[key] = change(path, old)
        if made[key] is not old:
            arguments = with_argument(arguments, path, made[key])
    return arguments


def _split(arguments: Arguments, path: str) -> tuple[Any, str]:
    args, kwargs = arguments
    first, _, rest = path.partition(".")
    if first.isdecimal():
        if int(first) >= len(args):
            raise LookupError(f"there is no argument {first}")
        return args[int(first)], rest
    if first not in kwargs:
        raise LookupError(f"there is no keyword argument {first!r}")
    return kwargs[first], rest


def _step(holder: Any, key: str) -> Any:
    try:
        if isinstance(holder, Mapping):
            return holder[_key_of(holder, key)]
        if isinstance(holder, list | tuple) and key.isdecimal():
            return holder[int(key)]
        return getattr(holder, key)
    except (LookupError, AttributeError, TypeError):
        raise LookupError(f"there is no {key!r} in a {type(holder).__name__}") from None


def _key_of(holder: Mapping[Any, Any], key: str) -> Any:
    return int(key) if key not in holder and key.isdecimal() else key


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
