"""What a check found: one line per stage, and the rule by which a stage is right."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from k31compile.errors import CheckError
from k31compile.report import Report

FACTOR = 4.0
"""How many times eager's own distance from float64 a stage may have."""


def floor_of(dtype: torch.dtype) -> float:
    """The relative error that is granted in any case: eager itself may happen to round to the exact result."""
    return (16 if dtype in (torch.float32, torch.float64) else 2) * torch.finfo(dtype).eps


@dataclass(frozen=True)
class Stage:
    """One place where the rewritten graph was compared.

    Attributes:
        name: path of a module, name of an operator, output or cache.
        kind: trace, module, selection, operator, cache, output or compiled.
        eager: relative error of the graph as written, in its own dtype, from float64.
        k31: relative error of the rewritten graph from float64.
        bound: the largest error at which the stage is right.
        overlap: of a selection: the part that eager, or the definition, selects too.
        note: what else must be known.

    """

    name: str
    kind: str
    eager: float
    k31: float
    bound: float
    overlap: float | None = None
    note: str = ""

    @property
    def ok(self) -> bool:
        """Whether the stage is within its bound; NaN is not."""
        return self.k31 <= self.bound

    def to_dict(self) -> dict[str, object]:
        """Return the stage as JSON values; an infinite error is null there."""
        numbers = {key: _finite(getattr(self, key)) for key in ("eager", "k31", "bound")}
        return {
            "name": self.name,
            "kind": self.kind,
            **numbers,
            "overlap": self.overlap,
            "note": self.note,
            "ok": self.ok,
        }


def judged(
    name: str, kind: str, eager: float, k31: float, dtype: torch.dtype, overlap: float | None = None, note: str = ""
) -> Stage:
    """Return the stage with the bound that its errors and its dtype give it."""
    return Stage(name, kind, eager, k31, FACTOR * eager + floor_of(dtype), overlap, note)


def _finite(value: float) -> float | None:
    return value if abs(value) < float("inf") else None


@dataclass
class CheckReport(Report):
    """A report with the stages that were compared, in the order in which the graph computes them.

    Attributes:
        stages: every comparison.

    """

    stages: list[Stage] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether something was compared and every stage is within its bound."""
        return bool(self.stages) and self.first_wrong() is None

    def first_wrong(self) -> Stage | None:
        """Return the first stage beyond its bound."""
        return next((stage for stage in self.stages if not stage.ok), None)

    def require_ok(self) -> None:
        """Raise CheckError, naming the first stage beyond its bound, unless all are within theirs."""
        wrong = self.first_wrong()
        if wrong is not None:
            raise CheckError(
                f"{wrong.kind} {wrong.name} is off by {wrong.k31:.2g}, its bound is {wrong.bound:.2g} "
                f"(eager: {wrong.eager:.2g}; relative to float64)",
            )
        if not self.stages:
            raise CheckError("nothing was compared", hint="the call made no graph that k31 could trace")

    def to_dict(self) -> dict[str, object]:
        """Return the report as JSON values, with the stages and the verdict."""
        data = {key: value for key, value in super().to_dict().items() if key != "stages"}
        wrong = self.first_wrong()
        stages = [stage.to_dict() for stage in self.stages]
        return {**data, "stages": stages, "ok": self.ok, "first_wrong": wrong.name if wrong else None}

    @staticmethod
    def joined(parts: Iterable[tuple[str, CheckReport]]) -> CheckReport:
        """Return one report over several entries, each stage under the name of its entry."""
        from dataclasses import replace

        named = list(parts)
        total = CheckReport(**vars(Report.merge(report for _, report in named)))
        for name, report in named:
            total.stages.extend(replace(stage, name=f"{name} {stage.name}") for stage in report.stages)
        return total
