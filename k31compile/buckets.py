"""Buckets: a few sizes that are compiled, and every smaller size served by the next of them, padded and cut.

`Bucketed` is the only way that a call takes: a size that no bucket holds is refused or compiled, as one says, and a
call that no compiled graph served is an error.
"""

from __future__ import annotations

import math
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from k31compile.bucket_sizes import Spec, bucket_sizes, combinations
from k31compile.counted import CountedBackend, own_error
from k31compile.entry import Entry
from k31compile.errors import BucketError
from k31compile.padding import argument_at, check_fill, cut, map_paths, part_at, resized, with_part, write_back

Sizes = Mapping[str, int]
"""The name of a dynamic dimension -> its size."""

__all__ = ["Bucket", "Bucketed", "Spec", "bucket_sizes", "combinations", "resize_entry"]

BEYOND = ("refuse", "compile")


def resize_entry(entry: Entry, sizes: Sizes, fill: Mapping[str, float] | None = None) -> Entry:
    """An entry whose named dimensions have these sizes: cut, or filled up with 0 unless `fill` names the path.

    Raises:
        BucketError: the entry names no such dimension.
    """
    dims = _dims_of(entry, sizes)
    fills = fill or {}

    def change(path: str, tensor: Tensor) -> Tensor:
        wanted = {dim: sizes[name] for dim, name in dims[path].items()}
        same = all(tensor.shape[dim] == size for dim, size in wanted.items())
        return tensor if same else resized(tensor, wanted, fills.get(path, 0))

    args, kwargs = map_paths(dims, (entry.args, dict(entry.kwargs)), change)
    return replace(entry, args=args, kwargs=kwargs, dynamic={})


@dataclass
class Bucket:
    """One compiled size: how many calls it served, which sizes those had, and how many graphs were compiled for it."""

    sizes: dict[str, int]
    is_beyond: bool = False
    calls: int = 0
    served: set[tuple[int, ...]] = field(default_factory=set)
    backend: CountedBackend = field(default_factory=CountedBackend, repr=False)
    run: Callable[..., Any] = field(default=lambda: None, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        counted = {"calls": self.calls, "compiles": self.backend.compiles, "beyond": self.is_beyond}
        return {"sizes": dict(self.sizes), "served": sorted(map(list, self.served)), **counted}


class Bucketed:
    """A model that is called with any size up to a maximum, by graphs that were compiled for a few sizes.

    The dimensions are those that the entry names in `dynamic`. A call's tensors are copied into the bucket's size,
    `fill` beyond them; what a call writes into such a copy is written back to the caller's tensor. What is not named
    passes as it is, so state that is shared by all requests is updated in place, and the model must promise two
    things: a row of an output depends on its own rows of the arguments only, and a row that holds nothing but `fill`
    writes to no state that somebody reads. For K3.1 both hold with 0 for tokens, `start`, `block_table`,
    `state_rows` and `lengths`: row 0 of every state and block 0 of every page are nobody's.

    Attributes:
        names: of the dimensions, in the order of `buckets`.
        eager: how many calls no compiled graph served; each of them was an error.

    """

    def __init__(
        self,
        entry: Entry,
        buckets: Mapping[str, Spec],
        *,
        fill: Mapping[str, float],
        outputs: Mapping[str, Mapping[int, str]],
        beyond: str = "refuse",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """See the class.

        `fill` has a value for every path of `entry.dynamic`; `outputs` says which dimensions of which outputs are cut:
        {path: {dim: name}}, the path "" for an output that is one tensor. Calls run in the entry's mode.

        Raises:
            BucketError: something of it is missing or does not fit.
        """
        if beyond not in BEYOND:
            raise BucketError(f"beyond does not take {beyond!r}", hint=f"it takes {' or '.join(map(repr, BEYOND))}")
        self._entry, self._options, self._beyond = entry, dict(options or {}), beyond
        self._buckets = {name: bucket_sizes(spec, name) for name, spec in buckets.items()}
        self.names = tuple(self._buckets)
        self._dims = _dims_of(entry, self._buckets)
        self._least = {name: low for dims in entry.dynamic.values() for name, low, _ in dims.values()}
        self._fill, self._outputs = dict(fill), {path: dict(dims) for path, dims in outputs.items()}
        self._check_fill()
        self._check_outputs()
        self.eager = 0
        self._made: dict[tuple[int, ...], Bucket] = {}
        self._lock = threading.RLock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model with arguments as its entry has them, of any size that a bucket holds.

        Raises:
            BucketError: the sizes contradict each other or no bucket holds them, or no compiled graph served the call.
        """
        arguments = (args, kwargs)
        sizes = self._sizes(arguments)
        bucket = self._bucket(sizes)
        copies: list[tuple[Tensor, Tensor, dict[int, int]]] = []

        def pad(path: str, tensor: Tensor) -> Tensor:
            wanted = {dim: bucket.sizes[name] for dim, name in self._dims[path].items()}
            if tensor.is_contiguous() and all(tensor.shape[dim] == size for dim, size in wanted.items()):
                return tensor
            padded = resized(tensor, wanted, self._fill[path])
            copies.append((tensor, padded, {dim: tensor.shape[dim] for dim in wanted}))
            return padded

        padded_args, padded_kwargs = map_paths(self._dims, arguments, pad)
        result = self._run(bucket, padded_args, padded_kwargs)
        for tensor, padded, kept in copies:
            write_back(tensor, padded, kept)
        with self._lock:
            bucket.calls += 1
            bucket.served.add(tuple(sizes.values()))
        return self._cut(result, sizes, bucket)

    def warm(self) -> None:
        """Compile every bucket now, each by one call with the entry's arguments at its size.

        The calls really happen, with copies of what is named in `dynamic` and with the entry's own tensors else.
        """
        for sizes in combinations({name: list(found) for name, found in self._buckets.items()}):
            small = resize_entry(self._entry, sizes, self._fill)
            self._run(self._bucket(sizes), small.args, dict(small.kwargs))

    @property
    def calls(self) -> int:
        """How many calls were served."""
        return sum(bucket.calls for bucket in self._made.values())

    @property
    def compiles(self) -> int:
        """How many graphs were compiled, or found in the cache."""
        return sum(bucket.backend.compiles for bucket in self._made.values())

    def bucket_of(self, **sizes: int) -> dict[str, int]:
        """The sizes of the bucket that serves these; BucketError as for a call."""
        return self._chosen({name: sizes[name] for name in self.names})[0]

    def to_dict(self) -> dict[str, Any]:
        """Which sizes each bucket serves, and what was called and compiled so far."""
        ranges = {
            name: [{"from": low, "to": high, "bucket": high} for low, high in self._ranges(name)] for name in self.names
        }
        made = [bucket.to_dict() for bucket in self._made.values()]
        return {"sizes": ranges, "beyond": self._beyond, "buckets": made, "calls": self.calls} | {
            "eager": self.eager,
            "compiles": self.compiles,
        }

    def summary(self) -> str:
        """Lines that say which bucket serves each size, and how often each was called and compiled."""
        lines = []
        for name in self.names:
            spans = ", ".join(f"{_span(low, high)} -> {high}" for low, high in self._ranges(name))
            end = "refused" if self._beyond == "refuse" else "compiled for their own size"
            lines.append(f"{name}: {spans}; beyond {self._buckets[name][-1]}: {end}")
        for bucket in self._made.values():
            beyond = ", beyond the maximum" if bucket.is_beyond else ""
            counted = f"{_many(bucket.calls, 'call')}, {_many(bucket.backend.compiles, 'graph')}"
            lines.append(f"  {_text(bucket.sizes)}: {counted}{beyond}")
        total = math.prod(len(sizes) for sizes in self._buckets.values())
        counted = f"{_many(self.calls, 'call')}, {self.eager} eager"
        lines.append(f"{counted}; {_many(self.compiles, 'graph')} for {_many(total, 'bucket')}")
        return "\n".join(lines)

    def _ranges(self, name: str) -> Iterator[tuple[int, int]]:
        low = max(self._least[name], 1)
        for high in self._buckets[name]:
            if high >= low:
                yield low, high
                low = high + 1

    def _sizes(self, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> dict[str, int]:
        found: dict[str, int] = {}
        for path, dims in self._dims.items():
            try:
                tensor = argument_at(arguments, path)
            except LookupError as error:
                hint = "call it with the arguments of its entry, by position and keyword as there"
                raise self._wrong(f"{path!r} is missing: {error.args[0]}", hint=hint) from None
            shape = getattr(tensor, "shape", None)
            if not isinstance(tensor, Tensor) or shape is None:
                raise self._wrong(f"{path!r} is a {type(tensor).__name__}, not a tensor", hint="pass a tensor")
            if len(shape) != len(argument_at((self._entry.args, dict(self._entry.kwargs)), path).shape):
                hint = "pass as many as the entry's tensor has"
                raise self._wrong(f"{path!r} has {len(shape)} dimensions", hint=hint)
            for dim, name in dims.items():
                size = int(shape[dim])
                if found.setdefault(name, size) != size:
                    what = f"{name!r} is {found[name]} in one argument and {size} in dimension {dim} of {path!r}"
                    raise self._wrong(what, hint="one name is one size")
        return {name: found[name] for name in self.names}

    def _chosen(self, sizes: Sizes) -> tuple[dict[str, int], bool]:
        chosen, is_beyond = {}, False
        for name, size in sizes.items():
            fitting = [bucket for bucket in self._buckets[name] if bucket >= size]
            least = max(self._least[name], 1)
            if size < least:
                raise self._wrong(f"{name!r} is {size}, and the least is {least}", hint="do not call it for nothing")
            if not fitting and self._beyond == "refuse":
                listed = ", ".join(map(str, self._buckets[name]))
                raise self._wrong(f"{name!r} is {size}, beyond the largest of its buckets {listed}")
            chosen[name] = fitting[0] if fitting else size
            is_beyond |= not fitting
        return chosen, is_beyond

    def _bucket(self, sizes: Sizes) -> Bucket:
        chosen, is_beyond = self._chosen(sizes)
        key = tuple(chosen.values())
        with self._lock:
            if key not in self._made:
                bucket = Bucket(chosen, is_beyond, backend=CountedBackend(self._options))
                # A code object of its own for each bucket: Dynamo limits how often it compiles one.
                bucket.run = torch.compile(
                    _own_code(self._entry.model), backend=bucket.backend, fullgraph=True, dynamic=False
                )
                self._made[key] = bucket
            return self._made[key]

    def _run(self, bucket: Bucket, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        before = bucket.backend.runs
        try:
            with self._entry.grad_mode():
                result = bucket.run(*args, **kwargs)
        except torch._dynamo.exc.BackendCompilerFailed as error:
            raise own_error(error) from error
        except (torch._dynamo.exc.Unsupported, torch._dynamo.exc.FailOnRecompileLimitHit) as error:
            why = str(error).strip().splitlines()[0]
            hint = "k31 explain names the place"
            raise self._wrong(f"the call is not one compiled graph: {why}", hint=hint) from error
        if bucket.backend.runs == before:
            self.eager += 1
            raise self._wrong("the call ran as it is written, no compiled graph served it", hint="k31 explain says why")
        return result

    def _cut(self, result: Any, sizes: Sizes, bucket: Bucket) -> Any:
        for path, dims in self._outputs.items():
            try:
                tensor = part_at(result, path)
            except LookupError as error:
                hint = "name what the model gives"
                raise self._wrong(f"outputs names {path!r}: {error.args[0]}", hint=hint) from None
            for dim, name in dims.items():
                if not isinstance(tensor, Tensor) or dim >= tensor.dim() or tensor.shape[dim] != bucket.sizes[name]:
                    found = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
                    wanted = f"its dimension {dim} should be {bucket.sizes[name]}, {name!r}"
                    raise self._wrong(
                        f"output {path!r} is {found}, and {wanted}", hint="correct outputs={path: {dim: name}}"
                    )
            kept = {dim: sizes[name] for dim, name in dims.items()}
            if any(size != bucket.sizes[dims[dim]] for dim, size in kept.items()):
                result = with_part(result, path, cut(tensor, kept))
        return result

    def _check_fill(self) -> None:
        for path in self._dims:
            if path not in self._fill:
                hint = f"add fill={{{path!r}: 0}}, or another value that the model takes for nothing"
                raise self._wrong(f"nothing says with what {path!r} is padded", hint=hint)
            dtype = argument_at((self._entry.args, dict(self._entry.kwargs)), path).dtype
            if why := check_fill(self._fill[path], dtype):
                raise self._wrong(f"{path!r} cannot be padded: {why}", hint="give a value of its dtype")
        for path in self._fill:
            if path not in self._dims:
                raise self._wrong(f"fill names {path!r}", hint=f"padded are: {', '.join(self._dims)}")

    def _check_outputs(self) -> None:
        for path, dims in self._outputs.items():
            for dim, name in dims.items():
                if name not in self.names or type(dim) is not int or dim < 0:
                    names = ", ".join(self.names)
                    hint = f"write {{dim: name}} with a dimension from 0 on and one of {names}"
                    raise self._wrong(f"outputs says {{{dim!r}: {name!r}}} of {path!r}", hint=hint)

    def _wrong(self, what: str, hint: str | None = None) -> BucketError:
        return BucketError(what, where=f"entry {self._entry.name!r}", hint=hint)


def _dims_of(entry: Entry, names: Mapping[str, Any]) -> dict[str, dict[int, str]]:
    """Which dimensions of which arguments have a name of these: path -> dimension from 0 on -> name."""
    found: dict[str, dict[int, str]] = {}
    for path, dims in entry.dynamic.items():
        rank = entry.at(path).dim()
        chosen = {dim % rank: bounds[0] for dim, bounds in dims.items() if bounds[0] in names}
        if chosen:
            found[path] = chosen
    known = sorted({bounds[0] for dims in entry.dynamic.values() for bounds in dims.values()})
    for name in names:
        if name not in known:
            what = f"the entry has no dimension {name!r}" if known else "the entry names no dynamic dimension"
            hint = (
                f"it names {', '.join(known)}" if known else "write Entry(..., dynamic={path: {dim: (name, 1, max)}})"
            )
            raise BucketError(what, where=f"entry {entry.name!r}", hint=hint)
    return found


def _own_code(model: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    return types.FunctionType(call.__code__.replace(), call.__globals__, "call", closure=call.__closure__)


def _span(low: int, high: int) -> str:
    return str(low) if low == high else f"{low}..{high}"


def _many(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def _text(sizes: Sizes) -> str:
    return ", ".join(f"{name} {size}" for name, size in sizes.items())
