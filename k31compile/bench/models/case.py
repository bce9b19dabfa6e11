"""A case that is a whole model: how it is called, what it is held to, and how far its results may be off."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from k31compile.bench.case import Roof, Thunk
from k31compile.bench.goals import Goals
from k31compile.entry import Entry


@dataclass(frozen=True)
class ModelCase:
    """One call of a model, to be made anew in the process of each variant.

    Attributes:
        name, label: the model, and which call of it.
        make: builds model and arguments; the same numbers in every process.
        tokens: how many one call handles.
        goals: what it is held to. series, size: where a chart shows it. is_quick: part of what `--quick` measures.
        whole: k31 compiles it by `k31compile.compile` and not by `torch.compile`.
        options: of k31.
        part: makes a call of what must grow with the size of a case, where that is to be left out of a growth.
        roof: finds out what one call cannot do without: bytes to read, or products of its weights.
        needs: a package without which there is nothing to measure, and the extra that brings it.

    """

    name: str
    label: str
    make: Callable[[], Entry]
    tokens: int = 1
    goals: Goals = field(default_factory=lambda: Goals(extra_bytes=None))
    series: str = ""
    size: float = 0.0
    is_quick: bool = False
    whole: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    part: Callable[[], Thunk] | None = None
    roof: Callable[[], Roof] | None = None
    needs: tuple[str, str] | None = None

    @property
    def full_name(self) -> str:
        """Name and call, as `--only` sees them."""
        return f"{self.name} {self.label}"
