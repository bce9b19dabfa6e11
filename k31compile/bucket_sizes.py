"""The sizes that are compiled: a list of them, or the multiples of a stride up to a maximum and the maximum itself."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from k31compile.errors import BucketError

Spec = Sequence[int] | Mapping[str, int]
"""Sizes: a list of them, or (max, stride), or {"max": ..., "stride": ...}."""

_MOST_SIZES = 10_000


def bucket_sizes(spec: Spec, name: str = "sizes") -> tuple[int, ...]:
    """The sizes of buckets, ascending: those of a list, or the multiples of a stride with the maximum itself.

    ``(13, 8)`` and ``{"max": 13, "stride": 8}`` give (8, 13); ``[8, 13]`` gives (8, 13).

    Raises:
        BucketError: it is none of these.
    """
    match spec:
        case {"max": top, "stride": stride, **rest} if not rest:
            return _stepped(top, stride, name)
        case tuple():
            if len(spec) != 2:
                raise BucketError(f"buckets of {name!r} are {spec!r}", hint="write (max, stride), or a list of sizes")
            return _stepped(*spec, name)
        case list() if spec and all(_is_size(size) for size in spec):
            return tuple(sorted(set(spec)))
    raise BucketError(
        f"buckets of {name!r} are {spec!r}",
        hint="write a list of sizes from 1 on, as [1, 4, 13], or {max = 13, stride = 8}",
    )


def combinations(buckets: Mapping[str, Spec]) -> list[dict[str, int]]:
    """Every bucket of several names: each size of one with each size of the others."""
    sizes = {name: bucket_sizes(spec, name) for name, spec in buckets.items()}
    return [dict(zip(sizes, chosen, strict=True)) for chosen in itertools.product(*sizes.values())]


def _stepped(top: Any, stride: Any, name: str) -> tuple[int, ...]:
    for word, value in (("max", top), ("stride", stride)):
        if not _is_size(value):
            raise BucketError(f"{word} of the buckets of {name!r} is {value!r}", hint="give a whole number from 1 on")
    if top // stride > _MOST_SIZES:
        hint = f"at most {_MOST_SIZES}: take a larger stride"
        raise BucketError(f"buckets of {name!r} would be {top // stride}", hint=hint)
    return tuple(sorted({*range(stride, top + 1, stride), top}))


def _is_size(value: Any) -> bool:
    return type(value) is int and value >= 1
