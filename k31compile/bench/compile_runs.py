"""The suite of compiles: first calls of a model in processes with empty caches, and again with what these left."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from k31compile.bench.case import OURS
from k31compile.bench.fresh import empty_caches
from k31compile.bench.measure import Settings
from k31compile.bench.model_runs import Place, Variant, row_of, task_of
from k31compile.bench.models.case import ModelCase
from k31compile.bench.process import Worker
from k31compile.bench.rows import Row, in_short
from k31compile.bench.statistics import quartiles, ratio_of

SUITE = "compile"
_FEW = 3  # runs from which on a spread can be told


def run_compiles(
    cases: Sequence[ModelCase], settings: Settings, place: Place, advance: Callable[[str], None], repeats: int
) -> list[Row]:
    """Rows of cold and of warm first calls against each opponent that compiles.

    Three repeats and more have quartiles as elsewhere; fewer have none, and the details say how many there were.
    """
    rows = []
    for case in cases:
        advance(case.full_name)
        runs = [_once(case, settings, place) for _ in range(repeats)]
        for opponent in settings.against:
            if opponent != "eager":
                rows += [_row(case, settings, runs, opponent, state) for state in ("cold", "warm")]
    return rows


def _once(case: ModelCase, settings: Settings, place: Place) -> dict[str, dict[str, Variant]]:
    """Every variant cold and then warm, one process after the other."""
    found: dict[str, dict[str, Variant]] = {"cold": {}, "warm": {}}
    with tempfile.TemporaryDirectory(prefix="k31-bench-") as folder:
        for name in dict.fromkeys(["eager", OURS, *settings.against]):
            with empty_caches() as variables:
                for state in ("cold", "warm"):
                    worker = Worker(place.command, {**variables, "OMP_NUM_THREADS": str(settings.threads)})
                    found[state][name] = variant = Variant(name, worker)
                    try:
                        variant.open(task_of(case, settings, place, folder), place.limit)
                    finally:
                        worker.stop()
                    if name == "eager" or not variant.is_ready:
                        break
            if not found["cold"]["eager"].is_ready:
                break  # nothing can be checked
    found["warm"]["eager"] = found["cold"]["eager"]
    return found


def _row(
    case: ModelCase, settings: Settings, runs: Sequence[Mapping[str, Mapping[str, Variant]]], opponent: str, state: str
) -> Row:
    row = row_of(SUITE, case, settings, runs[0][state], opponent)
    row.case = f"{case.label}, {state}"
    names = (OURS, opponent)
    bad = [run for run in runs if any(name not in run[state] or not run[state][name].is_ready for name in names)]
    if bad:
        row.skipped = row.skipped or ("" if row.error else "a process of an earlier step did not give its result")
        return row
    ours, other = ([run[state][name].found for run in runs] for name in names)
    _take(row, [one["first_seconds"] for one in ours], [one["first_seconds"] for one in other])
    row.peak_extra_bytes, row.other_peak_extra_bytes = (max(map(_peak, found)) for found in (ours, other))
    row.details |= {
        "cpu_seconds": min(one["first_cpu_seconds"] for one in ours),
        "other_cpu_seconds": min(one["first_cpu_seconds"] for one in other),
        "runs": len(runs),
    }
    return row


def _peak(found: Mapping[str, Any]) -> int:
    return int(found["resident_peak"] or 0)


def _take(row: Row, ours: Sequence[float], other: Sequence[float]) -> None:
    if len(ours) >= _FEW:
        row.take(ratio_of(ours, other), quartiles(ours)[1] * 1e9, quartiles(other)[1] * 1e9)
        return
    row.seconds, row.other_seconds, row.rounds = statistics.median(ours), statistics.median(other), len(ours)
    row.ratio = in_short(row.other_seconds / row.seconds)
    row.low = row.high = row.ratio
