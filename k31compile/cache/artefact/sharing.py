"""Which tensors of a call may lie in one memory: a graph that writes was traced for tensors that are apart."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

import torch

from k31compile.cache.artefact.tensors import ALL_TENSORS_FIT, Mismatch, TensorPromise, extent

Span = tuple[int, int, int]
"""First byte, the byte behind the last, and the number of the tensor."""


class SharingCheck:
    """The check of one entry's tensors against each other and against the weights that its graph takes."""

    def __init__(
        self, promises: Sequence[TensorPromise], weights: Mapping[str, torch.Tensor], written: Iterable[str]
    ) -> None:
        """`weights` are those of the graph by name, `written` the names of those that it updates."""
        self._promises = promises
        self._has_written = any(promise.written for promise in promises)
        changed = set(written)
        self._weights = _Held(weights) if self._has_written else _Held({})
        self._state = _Held({name: tensor for name, tensor in weights.items() if name in changed})

    def __call__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Raise Mismatch where two are one that were not at compile, or lie in one memory that the call writes to."""
        first: dict[int, int] = {}
        for number, (tensor, promise) in enumerate(zip(tensors, self._promises, strict=True)):
            same = first.setdefault(id(tensor), number)
            if same != (number if promise.same is None else promise.same):
                other = self._promises[same if promise.same is None else promise.same].path
                found, allowed = f"is the same tensor as {other}", "a tensor of its own"
                if promise.same is not None:
                    found, allowed = f"is another tensor than {other}", "the same one, as at compile"
                raise Mismatch(promise.path, found, allowed, ALL_TENSORS_FIT)
        if not self._has_written and not self._state:
            return
        spans = sorted(
            (*extent(tensor), number) for number, tensor in enumerate(tensors) if first[id(tensor)] == number
        )
        self._check_weights(spans)
        if self._has_written:
            self._check_overlap(spans)

    def _check_weights(self, spans: Sequence[Span]) -> None:
        for begin, end, number in spans:
            held = self._weights if self._promises[number].written else self._state
            if held and (name := held.overlapping(begin, end)):
                raise Mismatch(
                    self._promises[number].path,
                    f"shares memory with {name}, which this artefact holds",
                    "memory of its own, since the call writes to one of them",
                    ALL_TENSORS_FIT,
                )

    def _check_overlap(self, spans: Sequence[Span]) -> None:
        """Raise where memory that the graph writes to is also that of another tensor; spans by their begin."""
        furthest: dict[bool, tuple[int, int]] = {True: (-1, -1), False: (-1, -1)}  # written -> (end, number)
        for begin, end, number in spans:
            if begin == end:
                continue
            written = self._promises[number].written
            for other_written, (other_end, other) in furthest.items():
                if begin < other_end and (written or other_written):
                    raise Mismatch(
                        self._promises[number].path,
                        f"shares memory with {self._promises[other].path}",
                        "memory of its own, since the call writes to one of them",
                        ALL_TENSORS_FIT,
                    )
            if end > furthest[written][0]:
                furthest[written] = (end, number)


class _Held:
    """Where tensors lie that stay where they are, to be asked at every call."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        spans = sorted((*extent(tensor), name) for name, tensor in tensors.items())
        self._spans = [span for span in spans if span[0] < span[1]]
        self._begins = [begin for begin, _, _ in self._spans]
        self._ends = list(itertools.accumulate((end for _, end, _ in self._spans), max))

    def __bool__(self) -> bool:
        return bool(self._spans)

    def overlapping(self, begin: int, end: int) -> str:
        """The name of a tensor with a byte between these; "" where there is none."""
        before = bisect_left(self._begins, end)
        if begin == end or not before or self._ends[before - 1] <= begin:
            return ""
        return next(name for _, other_end, name in self._spans[:before] if other_end > begin)
