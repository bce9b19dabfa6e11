"""Programs: built libraries called one after the other, in one call from Python (cpu/torch_programs.cpp).

No mathematics is behind these operators, so they are no entries of `OPERATORS`.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from k31compile.errors import NativeError
from k31compile.kernels.cpu.loader import available
from k31compile.kernels.library import LIBRARY


@dataclass(frozen=True)
class Shape:
    """Sizes, strides and dtype of a tensor on the CPU, all numbers."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(value: torch.Tensor) -> Shape:
        """That of a tensor.

        Raises:
            NativeError: a size is dynamic.
        """
        if not all(isinstance(number, int) for number in (*value.shape, *value.stride(), value.storage_offset())):
            raise NativeError("a size between nested regions is dynamic")
        return Shape(tuple(value.shape), tuple(value.stride()), value.dtype)

    def empty(self, device: str = "cpu") -> torch.Tensor:
        """A tensor that looks so."""
        return torch.empty_strided(self.sizes, self.strides, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class BuiltLibrary:
    """A library of AOTInductor, what it takes and gives, and which of its inputs it writes."""

    path: Path
    inputs: tuple[Shape, ...]
    written: tuple[int, ...]
    outputs: tuple[Shape, ...]


@dataclass(frozen=True)
class Call:
    """A call of the n-th library: values are numbers, those of a program's inputs from 0 on."""

    library: int
    reads: Sequence[int]
    makes: Sequence[int]


@dataclass(frozen=True)
class View:
    """A value that is a part of another one: its shape, and how many elements behind the other's first it begins."""

    read: int
    made: int
    shape: Shape
    offset: int

    @property
    def reads(self) -> Sequence[int]:
        """What it is made from."""
        return (self.read,)

    @property
    def makes(self) -> Sequence[int]:
        """What it makes."""
        return (self.made,)


@dataclass
class Program:
    """Libraries and the order of their calls."""

    count_inputs: int
    libraries: list[BuiltLibrary] = field(default_factory=list)
    steps: list[Call | View] = field(default_factory=list)
    outputs: Sequence[int] = ()

    def told(self) -> tuple[list[int], list[torch.Tensor]]:
        """The program as numbers, and the shapes that these count, as torch_programs.cpp reads it."""
        shapes: list[Shape] = []

        def counted(places: Sequence[int]) -> list[int]:
            return [len(places), *places]

        def added(some: Sequence[Shape]) -> list[int]:
            shapes.extend(some)
            return counted(range(len(shapes) - len(some), len(shapes)))

        last = self._last_readings()
        numbers = [self.count_inputs, 1 + max([self.count_inputs - 1, *(i for step in self.steps for i in step.makes)])]
        for library in self.libraries:
            numbers += [*added(library.inputs), *counted(library.written), *added(library.outputs)]
        shapes.append(Shape((), (), torch.float32))
        nothing = len(shapes) - 1
        numbers.append(len(self.steps))
        for step, ended in zip(self.steps, last, strict=True):
            values = [*counted(step.reads), *counted(step.makes), *counted(ended)]
            if isinstance(step, Call):
                numbers += [step.library, *values, nothing, 0]
            else:
                numbers += [-1, *values, added([step.shape])[1], step.offset]
        return [*numbers, *counted(self.outputs)], [shape.empty("meta") for shape in shapes]

    def _last_readings(self) -> list[list[int]]:
        """For each step the values that nobody reads behind it, so that their memory is free again."""
        later, found = set(self.outputs), list[list[int]]()
        for step in reversed(self.steps):
            ended = sorted({*step.reads, *step.makes} - later)
            later |= set(ended)
            found.append(ended)
        return found[::-1]


class OpenProgram:
    """A program whose libraries are loaded, for as long as this object lives. Threads may run it side by side."""

    def __init__(self, program: Program) -> None:
        """Load the libraries; they become code of this process: whoever calls this has checked them.

        Raises:
            NativeError: one does not load here, or the kernels were built without torch's headers.
        """
        serves, why = available()
        if not serves or not torch._C._dispatch_has_kernel_for_dispatch_key(
            "k31::run_program", "CompositeImplicitAutograd"
        ):
            raise NativeError(f"nothing but Python can call libraries here: {why}")
        try:
            self._number = torch.ops.k31.open_program([str(one.path) for one in program.libraries], *program.told())
        except RuntimeError as error:
            raise NativeError(f"a library does not load: {str(error).strip().splitlines()[0]}") from error
        self._run = torch.ops.k31.run_program.default
        weakref.finalize(self, torch.ops.k31.close_program.default, self._number).atexit = False

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What the program makes of its inputs; it may have written into these."""
        return self._run(self._number, inputs)  # type: ignore[no-any-return]


LIBRARY.define("open_program(str[] libraries, int[] numbers, Tensor[] shapes) -> int")
LIBRARY.define("run_program(int program, Tensor[] inputs) -> Tensor[]")
LIBRARY.define("close_program(int program) -> ()")


_REGIONS: dict[str, tuple[Sequence[Shape], Sequence[int]]] = {}
"""Outputs of each region that a graph was traced with, and which inputs it writes; never out of date, and small."""


def tell_region(name: str, outputs: Sequence[Shape], written: Sequence[int]) -> None:
    """Let `call_region` be traced with a region's name."""
    _REGIONS[name] = outputs, written


def _outputs(name: str) -> list[torch.Tensor]:
    return [shape.empty() for shape in _REGIONS[name][0]]


def _call_fake(region: str, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [*_outputs(region), *(torch.empty_like(inputs[i]) for i in _REGIONS[region][1])]


def _call_in_place_fake(region: str, written: Sequence[torch.Tensor], read: Sequence[torch.Tensor]) -> Any:
    return _outputs(region)


# They stand in graphs that become programs, and are never called: of the first the values that a region would write are
# results beside its others, since a graph that is all values has no other way to say it.
for _schema, _fake in (
    ("call_region(str region, Tensor[] inputs) -> Tensor[]", _call_fake),
    ("call_region_(str region, Tensor(a!)[] written, Tensor[] read) -> Tensor[]", _call_in_place_fake),
):
    LIBRARY.define(_schema)
    torch.library.register_fake(f"k31::{_schema.partition('(')[0]}", _fake, lib=LIBRARY)
