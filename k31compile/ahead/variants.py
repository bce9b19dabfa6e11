"""The compiles that one entry takes: one for its dynamic sizes from 2 on, and one for each size of 0 or 1.

A graph that is traced for many sizes is not right for sizes 0 and 1: torch takes those apart while it traces.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from k31compile.entry import Bounds, Entry

_LEAST = 2
_EXAMPLE = 7
"""A size to trace with where the example's own is 0 or 1: small and odd, so that it is no other size by chance."""


def variants(entry: Entry) -> Iterator[Entry]:
    """The entries that stand for one; the entry itself where nothing in it is dynamic."""
    bounds = {bound[0]: bound for dims in entry.dynamic.values() for bound in dims.values()}
    choices = [_choices(name, low, high) for name, low, high in bounds.values()]
    for chosen in itertools.product(*choices):
        fixed = {name: size for name, size in chosen if size is not None}
        yield _variant(entry, bounds, fixed)


def with_sizes(entry: Entry, sizes: Mapping[str, int]) -> Entry:
    """The entry with fixed sizes in the place of its dynamic ones."""
    bounds = {bound[0]: bound for dims in entry.dynamic.values() for bound in dims.values()}
    return _variant(entry, bounds, sizes)


def _choices(name: str, low: int, high: int) -> list[tuple[str, int | None]]:
    """Each fixed size, and None for the range from 2 on."""
    if low == high:
        return [(name, low)]
    small: list[tuple[str, int | None]] = [(name, size) for size in range(low, min(_LEAST, high + 1))]
    if high < _LEAST:
        return small
    if high == _LEAST or low == high:
        return [*small, (name, high)]
    return [(name, None), *small]


def _variant(entry: Entry, bounds: Mapping[str, Bounds], fixed: Mapping[str, int]) -> Entry:
    sizes = {name: _example_size(name, entry, bounds, fixed) for name in bounds}
    fresh: dict[int, torch.Tensor] = {}
    for path, dims in entry.dynamic.items():
        tensor = entry.at(path)
        wanted = {dim: sizes[name] for dim, (name, _, _) in dims.items()}
        fresh[id(tensor)] = _resized(fresh.get(id(tensor), tensor), wanted)
    args, kwargs = replaced((entry.args, dict(entry.kwargs)), fresh)
    dynamic = {
        path: {dim: (name, max(low, _LEAST), high) for dim, (name, low, high) in dims.items() if name not in fixed}
        for path, dims in entry.dynamic.items()
    }
    told = ", ".join(f"{name}={size}" for name, size in fixed.items() if bounds[name][1] != bounds[name][2])
    name = f"{entry.name}[{told}]" if told else entry.name
    return replace(
        entry, name=name, args=args, kwargs=kwargs, dynamic={path: dims for path, dims in dynamic.items() if dims}
    )


def _example_size(name: str, entry: Entry, bounds: Mapping[str, Bounds], fixed: Mapping[str, int]) -> int:
    if name in fixed:
        return fixed[name]
    for path, dims in entry.dynamic.items():
        for dim, bound in dims.items():
            size = int(entry.at(path).shape[dim])
            if bound[0] == name and size >= _LEAST:
                return size
    return min(_EXAMPLE, bounds[name][2])


def _resized(tensor: torch.Tensor, wanted: Mapping[int, int]) -> torch.Tensor:
    """The tensor with other sizes: cut, or with zeros behind its values; its dimensions stay nested as they are."""
    if all(tensor.shape[dim] == size for dim, size in wanted.items()):
        return tensor
    shape = list(tensor.shape)
    for dim, size in wanted.items():
        shape[dim] = size
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim))
    back = [order.index(dim) for dim in range(tensor.dim())]
    made = torch.zeros([shape[dim] for dim in order], dtype=tensor.dtype, device=tensor.device).permute(back)
    common = tuple(slice(0, min(left, right)) for left, right in zip(shape, tensor.shape, strict=True))
    made[common] = tensor.detach()[common]
    return made


def replaced(value: Any, fresh: Mapping[int, torch.Tensor]) -> Any:
    """A copy of arguments that holds the same tensors, except those that `fresh` has by identity."""
    memo: dict[int, Any] = {}
    _remember(value, fresh, memo, set())
    return copy.deepcopy(value, memo)


def _remember(value: Any, fresh: Mapping[int, torch.Tensor], memo: dict[int, Any], seen: set[int]) -> None:
    """Fill the memo of a deep copy with all tensors that a value holds."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        memo[id(value)] = fresh.get(id(value), value)
    elif isinstance(value, torch.nn.Module):
        memo[id(value)] = value
    elif isinstance(value, tuple | list | set):
        for part in value:
            _remember(part, fresh, memo, seen)
    elif isinstance(value, Mapping):
        for part in value.values():
            _remember(part, fresh, memo, seen)
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        _remember(vars(value), fresh, memo, seen)


__all__ = ["replaced", "variants"]
