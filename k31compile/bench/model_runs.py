"""The suite of models: a process for each variant of a case, all open at once, that sample when it is their turn."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from k31compile.bench.alternate import alternate
from k31compile.bench.case import OURS
from k31compile.bench.growth import judge_growth
from k31compile.bench.measure import Settings
from k31compile.bench.models.case import ModelCase
from k31compile.bench.process import Worker, environment
from k31compile.bench.rows import Row, in_short
from k31compile.bench.statistics import quartiles, ratio_of
from k31compile.errors import BenchError

SUITE = "models"
_SAMPLE_LIMIT = 600.0


@dataclass(frozen=True)
class Place:
    """Where workers of this suite come from, and how long one may take until its first result.

    command: what follows the interpreter; target: the TARGET whose entries the cases are, "" for shipped cases.
    """

    command: Sequence[str]
    target: str = ""
    limit: float = 900.0


@dataclass
class Variant:
    """One variant of a case and its process; `found` is what its first call gave."""

    name: str
    worker: Worker
    found: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""
    skipped: str = ""
    extra: int | None = None

    @property
    def is_ready(self) -> bool:
        """Whether it gave the right result and can be sampled."""
        return not self.error and not self.skipped

    def open(self, task: Mapping[str, Any], limit: float) -> None:
        """Let it call its model once; only what k31 or a wrong result is to blame for is an error."""
        try:
            self.found = self.worker.ask({**task, "task": "open", "variant": self.name}, limit)
        except BenchError as failure:
            if self.name in (OURS, "eager"):
                self.error = failure.what
            else:
                self.skipped = f"{self.name}: {failure.what}"
            return
        self.skipped = self.found.get("skipped", "")
        self.error = self.found.get("wrong", "")


def run_models(
    cases: Sequence[ModelCase], settings: Settings, place: Place, advance: Callable[[str], None]
) -> list[Row]:
    """The rows of these cases, one for each opponent."""
    rows = []
    for case in cases:
        advance(case.full_name)
        with opened(case, settings, place) as variants:
            before = _conditions(case, variants)
            taken = _samples(variants, settings)
            had, floors = zip(before, _conditions(case, variants), strict=True)
            for variant in variants.values():
                if variant.is_ready:
                    variant.extra = variant.worker.ask({"task": "extra"}, _SAMPLE_LIMIT)
            part = None if case.part is None else _asked(variants, {"task": "part", "case": case.full_name})
        for opponent in settings.against:
            row = row_of(SUITE, case, settings, variants, opponent)
            if row.is_open:
                ours, other = (taken[name] for name in (OURS, opponent))
                row.take(ratio_of(ours, other), quartiles(ours)[1], quartiles(other)[1])
                row.peak_extra_bytes = variants[OURS].extra
                row.other_peak_extra_bytes = variants[opponent].extra
                row.refuse_where_others_worked(min(one for one in had if one is not None))
                row.details |= {} if part is None else {"part_seconds": part / 1e9}
                _tell_roof(row, [floor for floor in floors if floor is not None])
                row.judge(case.goals)
            rows.append(row)
    judge_growth(rows)
    return rows


@contextmanager
def opened(case: ModelCase, settings: Settings, place: Place) -> Iterator[dict[str, Variant]]:
    """The variants of a case after their first call; eager first, its result is the reference. Ended with the block."""
    variants: dict[str, Variant] = {}
    try:
        with tempfile.TemporaryDirectory(prefix="k31-bench-") as folder:
            for name in dict.fromkeys(["eager", OURS, *settings.against]):
                variants[name] = Variant(name, Worker(place.command, environment(settings.threads)))
                variants[name].open(task_of(case, settings, place, folder), place.limit)
                if not variants["eager"].is_ready:
                    break  # nothing can be checked
        yield variants
    finally:
        for variant in variants.values():
            variant.worker.stop()


def task_of(case: ModelCase, settings: Settings, place: Place, folder: str) -> dict[str, Any]:
    """What every variant of a case is told."""
    return {
        "case": case.label if place.target else case.full_name,
        "target": place.target,
        "threads": settings.threads,
        "reference": str(Path(folder) / "reference.pt"),
    }


def row_of(suite: str, case: ModelCase, settings: Settings, variants: Mapping[str, Variant], opponent: str) -> Row:
    """A row without numbers, with what stood in the way of them."""
    row = Row(suite, case.name, case.label, opponent, settings.threads, series=case.series, size=case.size)
    row.tokens = case.tokens
    involved = [variants[name] for name in ("eager", OURS, opponent) if name in variants]
    row.error = "; ".join(dict.fromkeys(f"{one.name}: {one.error}" for one in involved if one.error))
    row.skipped = "; ".join(dict.fromkeys(one.skipped for one in involved if one.skipped))
    if OURS in variants:
        row.details["fused"] = dict(variants[OURS].found.get("fused", {}))
    return row


def _conditions(case: ModelCase, variants: Mapping[str, Variant]) -> tuple[float | None, float | None]:
    """Which share of the cores this run gets now, and the nanoseconds that what a case cannot do without takes now."""
    floor = None if case.roof is None else _asked(variants, {"task": "floor", "case": case.full_name})
    return _asked(variants, {"task": "had"}), floor


def _tell_roof(row: Row, floors: Sequence[float]) -> None:
    """The share of the machine's speed that ours reached, and how far ahead of the opponent anything can be with it."""
    if not floors or row.noisy or row.seconds is None:
        return
    floor = min(floors) / 1e9
    row.details["floor_seconds"] = in_short(floor)
    row.tell_roof(floor / row.seconds)


def _asked(variants: Mapping[str, Variant], task: Mapping[str, Any]) -> float | None:
    """What the process of ours answers, None where it did not come so far."""
    if OURS not in variants or not variants[OURS].is_ready:
        return None
    answer: float | None = variants[OURS].worker.ask(task, _SAMPLE_LIMIT)
    return answer


def _samples(variants: Mapping[str, Variant], settings: Settings) -> dict[str, list[float]]:
    ready = {OURS: variants[OURS]} if OURS in variants and variants[OURS].is_ready else {}
    ready |= {name: variants[name] for name in settings.against if name in variants and variants[name].is_ready}
    if OURS not in ready or len(ready) == 1:
        return {}
    samplers = {
        name: functools.partial(one.worker.ask, {"task": "sample"}, _SAMPLE_LIMIT) for name, one in ready.items()
    }
    return alternate(samplers, settings.seconds, settings.fewest)
