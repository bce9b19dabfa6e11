"""Rows of a benchmark, one for each case and opponent, and the JSON document of a run."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from k31compile.bench.goals import UNTOLD, Goals
from k31compile.bench.statistics import Ratio

_ENOUGH = 0.85  # of the wall time of all threads: with less, a barrier waits for whoever was sent away
SUITES = ("operators", "models", "compile")


@dataclass
class Row:
    """A case against one opponent.

    Attributes:
        suite, name, case, against: what is compared; ratio: other / k31, None where nothing may be said.
        spread: distance of the quartiles of the ratio over its median; low, high: these quartiles.
        noisy: the spread was larger than the effect, so there is no ratio.
        roof: share of this run's own probe; peak_extra_bytes: beyond inputs and results, of one call of ours.
            in the suite of compiles the resident peak of the whole process.
        other_peak_extra_bytes: the same of the opponent; form: how the opponent's faster variant is written.
        seconds, other_seconds: median time of one call; rounds: how often all were measured in turns.
        threads: of the run; goal, must, verdict: what was wanted of the ratio, and whether it is met.
        roof_goal, roof_must, roof_verdict: the same of the roof. limit_seconds, limit_verdict: of a time limit.
        memory_limit: of the extra memory; memory_ratio_goal: how many times ours the opponent's must be;
        memory_verdict: of either. growth_verdict: of `details["growth"]`, see growth.py.
        error: a wrong result, or a failure of ours; there is no measurement then.
        skipped: why there is no measurement where nothing is wrong with k31.
        tokens: how many one call handles. series, size: where a chart shows it. details: what else was measured.

    """

    suite: str
    name: str
    case: str
    against: str
    threads: int
    ratio: float | None = None
    spread: float | None = None
    low: float | None = None
    high: float | None = None
    noisy: bool = False
    roof: float | None = None
    peak_extra_bytes: int | None = None
    other_peak_extra_bytes: int | None = None
    form: str = ""
    seconds: float | None = None
    other_seconds: float | None = None
    rounds: int = 0
    goal: float | None = None
    must: float | None = None
    verdict: str | None = None
    roof_goal: float | None = None
    roof_must: float | None = None
    roof_verdict: str | None = None
    limit_seconds: float | None = None
    limit_verdict: str | None = None
    memory_limit: int | None = None
    memory_ratio_goal: float | None = None
    memory_verdict: str | None = None
    growth_verdict: str | None = None
    error: str = ""
    skipped: str = ""
    series: str = ""
    size: float = 0.0
    tokens: int = 1
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def is_open(self) -> bool:
        """Whether nothing stands in the way of numbers."""
        return not self.error and not self.skipped

    def take(self, measured: Ratio, ours: float, other: float) -> None:
        """Note a ratio and the nanoseconds behind it; a noisy one leaves its quartiles only."""
        self.noisy = measured.is_noisy
        self.ratio = None if self.noisy else in_short(measured.middle)
        self.spread, self.rounds = in_short(measured.spread), measured.rounds
        self.low, self.high = in_short(measured.low), in_short(measured.high)
        self.seconds, self.other_seconds = ours / 1e9, other / 1e9

    def refuse_where_others_worked(self, had: float) -> None:
        """Take the ratio back, and every verdict on times, where the run had too little of its threads' time."""
        if had < _ENOUGH:
            self.noisy, self.ratio, self.roof = True, None, None
            self.details["refused"] = f"others were at work: {had:.0%} of the threads' time was this process's"

    def tell_roof(self, share: float | None) -> None:
        """Note the share of the probe that ours reached, and how far ahead of the opponent all of it would be."""
        if share is None or "refused" in self.details:
            return
        self.roof = in_short(share)
        if self.seconds is not None and self.other_seconds is not None:
            self.details["at_most"] = in_short(self.other_seconds / self.seconds / share)

    def judge(self, goals: Goals) -> None:
        """Hold what was measured against what is wanted."""
        bound = goals.ratios.get(self.against)
        if "refused" in self.details:
            self.verdict = UNTOLD
        elif bound is not None and self.low is not None and self.high is not None:
            self.goal, self.must = bound
            # a clear ratio is judged by its median, a noisy one by its quartiles
            low, high = (self.low, self.high) if self.ratio is None else (self.ratio, self.ratio)
            self.verdict = bound.verdict(low, high)
        if self.roof is not None:
            self.roof_goal, self.roof_must = goals.roof
            self.roof_verdict = goals.roof.verdict(self.roof, self.roof)
        if goals.seconds is not None and self.seconds is not None and not self.details.get("refused"):
            self.limit_seconds = goals.seconds
            self.limit_verdict = "goal" if self.seconds <= goals.seconds else "below"
        if goals.extra_bytes is not None and self.peak_extra_bytes is not None:
            self.memory_limit = goals.extra_bytes * self.threads
            self.memory_verdict = "goal" if self.peak_extra_bytes < self.memory_limit else "below"
        if None not in (goals.memory_ratio, self.peak_extra_bytes, self.other_peak_extra_bytes):
            wanted = goals.memory_ratio * self.peak_extra_bytes  # type: ignore[operator]
            self.memory_ratio_goal = goals.memory_ratio
            self.memory_verdict = "goal" if self.other_peak_extra_bytes >= wanted else "below"  # type: ignore[operator]


def document(rows: list[Row], machine: dict[str, Any], versions: dict[str, str]) -> dict[str, Any]:
    """The JSON document of a run."""
    return {"rows": [asdict(row) for row in rows], "machine": machine, "versions": versions}


def in_short(value: float) -> float:
    """Four digits: more is noise."""
    return float(f"{value:.4g}")


def row_from(data: dict[str, Any]) -> Row:
    """A row as another process sent it."""
    return Row(**data)
