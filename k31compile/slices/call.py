"""A slice on the arguments that it was met with, to be run on others."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from k31compile.graph.sizes import hint
from k31compile.leaves.call import raised_to_float64
from k31compile.leaves.source import Read, Source, examine
from k31compile.slices.cut import Slice
from k31compile.slices.held import Held, Place, poison, text_of
from k31compile.slices.watch import run_observed

Tensors = Mapping[Place, torch.Tensor]
Numbers = Mapping[Place, int]


@dataclass(frozen=True)
class SliceCall:
    """A slice with what it was given; `distinct` names the integers of which no row can hold one twice."""

    slice: Slice
    held: Held
    distinct: frozenset[Place] = frozenset()

    @staticmethod
    def of(one: Slice, arguments: Mapping[str, Any], distinct: frozenset[Place] = frozenset()) -> SliceCall:
        """The call with these arguments.

        Raises:
            Unfit: something that it reads may change, or cannot be looked into.
        """
        return SliceCall(one, Held.of(arguments, one.function.__code__), distinct)

    @cached_property
    def sources(self) -> dict[types.FunctionType, Source]:
        """The slice and the methods that it may call, each with its helpers.

        Raises:
            Unfit: something other than the arguments may decide what one returns, or it changes something.
        """
        return {function: examine(function) for function in (self.slice.function, *self.held.functions)}

    @property
    def reads(self) -> tuple[Read, ...]:
        """What the slice itself reads from outside."""
        return self.sources[self.slice.function].reads

    def key(self) -> str:
        """Equal for calls that differ in the number of tokens alone."""
        digests = ",".join(source.digest for source in self.sources.values())
        distinct = sorted(map(str, self.distinct))
        return f"{digests}|{self.held.key()}|{distinct}"

    def token_tensors(self) -> dict[Place, torch.Tensor]:
        """The tensors that are given by themselves, not as part of a module."""
        return {place: tensor for place, tensor in self.held.tensors.items() if not self.is_in_module(place)}

    def is_in_module(self, place: Place) -> bool:
        """Whether a module leads to it."""
        return any(place[:length] in self.held.modules for length in range(1, len(place)))

    def numbers(self) -> dict[Place, int]:
        """The whole numbers that are given by themselves, most likely sizes."""
        given = {place: value for place, value in self.held.constants.items() if not self.is_in_module(place)}
        return {p: hint(v) for p, v in given.items() if isinstance(v, int | torch.SymInt) and type(v) is not bool}

    def names(self) -> set[str]:
        """Every name that the code mentions."""
        return {name for source in self.sources.values() for name in source.names}

    def floats(self) -> list[float]:
        """Numbers in the code and among what it reads: an activation's bounds are among them."""
        written = [float(n) for source in self.sources.values() for n in (*source.floats, *source.integers)]
        return [*written, *(float(v) for v in self.held.constants.values() if type(v) in (int, float))]

    def run(self, tensors: Tensors, numbers: Numbers) -> Any:
        """What the slice gives on these tensors; of others it may read the sizes alone.

        Raises:
            Mismatch: it uses others too, or cannot be run on these.
            Unfit: it changed something, drew random numbers, or raises where the data tell it to.
        """
        others = {place: poison(other) for place, other in self.held.tensors.items() if place not in tensors}
        arguments = self.held.filled({**others, **tensors}, numbers)
        given, unused = ({text_of(place): value for place, value in part.items()} for part in (tensors, others))
        return run_observed(given, unused, lambda: self.slice.function(*arguments), arguments)

    def run_in_float64(self, tensors: Tensors, numbers: Numbers) -> Any:
        """The same on float64 tensors, with every cast and factory in it at float64: its algebra."""
        with raised_to_float64():
            return self.run(tensors, numbers)
