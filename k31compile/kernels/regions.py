"""``k31::call_region``: a nested region's built library, called by name from a graph that is built itself.

No mathematics is behind it, so it is no entry of `OPERATORS`: it runs what `open_region` was given. Its kernels are C++
alone (cpu/torch_regions.cpp), and before a region is opened there is none to call.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from k31compile.errors import NativeError
from k31compile.kernels.cpu.loader import available
from k31compile.kernels.library import LIBRARY

CALL = "call_region(str region, Tensor[] inputs) -> Tensor[]"
CALL_IN_PLACE = "call_region_(str region, Tensor(a!)[] written, Tensor[] read) -> Tensor[]"
_OPEN = "open_region(str region, str library, int[] order, Tensor[] inputs, Tensor[] outputs) -> ()"
_CLOSE = "close_region(str region) -> ()"


@dataclass(frozen=True)
class Shape:
    """Sizes, strides and dtype of a tensor, all numbers."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def empty(self, device: str = "cpu") -> torch.Tensor:
        """A tensor that looks so."""
        return torch.empty_strided(self.sizes, self.strides, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class RegionShapes:
    """What a region takes and gives, and which of its inputs, by position, it writes."""

    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    written: tuple[int, ...]

    @property
    def order(self) -> list[int]:
        """Where each input stands among the written ones followed by the others."""
        others = [i for i in range(len(self.inputs)) if i not in self.written]
        return [[*self.written, *others].index(i) for i in range(len(self.inputs))]


_SHAPES: dict[str, RegionShapes] = {}
"""Of each region that a graph of this process was traced with; a few hundred bytes each, and never out of date."""


class OpenRegion:
    """A region that graphs of this process can call, for as long as this object lives."""

    def __init__(self, name: str, library: Path, shapes: RegionShapes) -> None:
        """Load a library that AOTInductor built; its name stands for its bytes and shapes.

        It becomes code of this process: whoever calls this has checked it.

        Raises:
            NativeError: it does not load here, or the kernels were built without torch's headers.
        """
        serves, why = available()
        if not serves or not _has_kernel():
            raise NativeError(f"nested regions are called through Python: {why}")
        inputs, outputs = ([shape.empty("meta") for shape in part] for part in (shapes.inputs, shapes.outputs))
        try:
            torch.ops.k31.open_region(name, str(library), shapes.order, inputs, outputs)
        except RuntimeError as error:
            raise NativeError(f"a region does not load: {str(error).strip().splitlines()[0]}") from error
        _SHAPES[name] = shapes
        self.name, self.shapes = name, shapes
        self.close = weakref.finalize(self, torch.ops.k31.close_region, name)
        self.close.atexit = False


def _has_kernel() -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key("k31::call_region", "CPU")


def _outputs(name: str) -> list[torch.Tensor]:
    return [shape.empty() for shape in _SHAPES[name].outputs]


def _call_fake(region: str, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    # What it would write is given back beside its outputs: a graph that is all values has no other way to say it.
    return [*_outputs(region), *(torch.empty_like(inputs[i]) for i in _SHAPES[region].written)]


def _call_in_place_fake(region: str, written: Sequence[torch.Tensor], read: Sequence[torch.Tensor]) -> Any:
    return _outputs(region)


# A region's library reads memory by the strides that it was built for; the kernel copies what lies otherwise.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
for _schema, _fake in ((CALL, _call_fake), (CALL_IN_PLACE, _call_in_place_fake)):
    LIBRARY.define(_schema, tags=_TAGS)
    torch.library.register_fake(f"k31::{_schema.partition('(')[0]}", _fake, lib=LIBRARY)
LIBRARY.define(_OPEN)
LIBRARY.define(_CLOSE)
