"""The rows of a run as a table for people: what was measured, what was wanted, and whether it is met.

Times and memory are k31's / the opponent's; memory is beyond inputs and results, in the suite of compiles all of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from k31compile.bench.goals import BELOW, FLOOR_MET, GOAL_MET, UNTOLD
from k31compile.bench.rows import Row

HEADS = (
    "operator or model", "case", "against", "faster by", "spread", "time", "roof", "at most", "goal", "must", "memory",
    "met",
)  # fmt: skip

_WORDS = {GOAL_MET: "yes", FLOOR_MET: "floor only", BELOW: "NO", UNTOLD: "noisy", None: ""}


def cells(row: Row) -> tuple[str, ...]:
    """The texts of one row, in the order of `HEADS`."""
    against = f"{row.against} ({row.form})" if row.form else row.against
    if row.low is None:
        why = f"ERROR: {row.error}" if row.error else f"not measured: {row.skipped}"
        return (row.name, row.case, against, why, *[""] * (len(HEADS) - 4))
    return (
        row.name,
        row.case,
        against,
        ratio_text(row),
        "" if row.spread is None else f"{row.spread:.2f}",
        time_text(row.seconds, row.other_seconds),
        "" if row.roof is None else f"{row.roof:.0%}",
        "" if (most := row.details.get("at_most")) is None else f"{most:.3g} x",
        goal_text(row.goal, row.roof_goal, row.limit_seconds),
        goal_text(row.must, row.roof_must, None),
        memory_text(row.peak_extra_bytes, row.other_peak_extra_bytes),
        met_text(row),
    )


def ratio_text(row: Row) -> str:
    """The ratio, or its quartiles and that it cannot be told; with the error of another form of the opponent."""
    assert row.low is not None
    assert row.high is not None
    text = f"noisy: {row.low:.2f} .. {row.high:.2f}" if row.ratio is None else f"{row.ratio:.2f} x"
    return f"{text} ERROR: {row.error}" if row.error else text


def time_text(ours: float | None, other: float | None) -> str:
    """Times of one call, k31 / other, in one unit."""
    if ours is None or other is None:
        return ""
    factor, unit = next(((f, u) for f, u in ((1.0, "s"), (1e3, "ms")) if ours * f >= 1), (1e6, "us"))
    return f"{_digits(ours * factor)} / {_digits(other * factor)} {unit}"


def goal_text(ratio: float | None, roof: float | None, seconds: float | None) -> str:
    """What is wanted of ratio, roof and time, what nobody asks left out."""
    parts = [] if ratio is None else [f"{ratio:g} x"]
    parts += [] if roof is None else [f"{roof:.0%}"]
    parts += [] if seconds is None else [f"{seconds * 1e3:g} ms"]
    return ", ".join(parts)


def memory_text(ours: int | None, other: int | None) -> str:
    """Bytes as MiB, k31 / other."""
    if ours is None:
        return ""
    told = f"{ours / 2**20:.1f}"
    return f"{told} MiB" if other is None else f"{told} / {other / 2**20:.1f} MiB"


def met_text(row: Row) -> str:
    """The verdict where there is one of the ratio and all others are the same, else each with its name."""
    named = _verdicts(row)
    told = {name: word for name, word in named.items() if word is not None}
    if "ratio" in told and len(set(told.values())) == 1:
        return _WORDS[next(iter(told.values()))]
    return ", ".join(f"{name} {_WORDS[word]}" for name, word in told.items())


def title(machine: Mapping[str, Any], versions: Mapping[str, str]) -> str:
    """One line on what this ran on."""
    malloc = "large temporaries kept" if machine["malloc_keeps_temporaries"] else "large temporaries given back"
    setting = ", ".join(f"{name}={value}" for name, value in machine["malloc"].items()) or "as shipped"
    return (
        f"{machine['processor']}, {machine['cores']} cores, {machine['capability']}, threads: {machine['threads']} "
        f"({machine['time']}), malloc: {malloc} ({setting}), load {machine['load']}, "
        f"torch {versions['torch']}, Python {versions['python']}, k31compile {versions['k31compile']}"
    )


def summary(rows: Sequence[Row]) -> str:
    """How many rows meet goal, floor, neither, or could not be told."""
    # roof, time and memory of a case are the same in its rows of all opponents
    told = {
        (row.suite, row.name, row.case, kind, row.against if kind in ("ratio", "memory") else ""): word
        for row in rows
        for kind, word in _verdicts(row).items()
    }
    words = list(told.values())
    counts = {word: words.count(word) for word in (GOAL_MET, FLOOR_MET, BELOW, UNTOLD)}
    failed, skipped = (sum(bool(getattr(row, name)) for row in rows) for name in ("error", "skipped"))
    return (
        f"{counts[GOAL_MET]} goals met, {counts[FLOOR_MET]} at the floor only, {counts[BELOW]} below it, "
        f"{counts[UNTOLD]} that the noise hides; {len(rows)} rows, {failed} of them wrong, "
        f"{skipped} not measured"
    )


def _digits(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _verdicts(row: Row) -> dict[str, str | None]:
    return {
        "ratio": row.verdict,
        "roof": row.roof_verdict,
        "time": row.limit_verdict,
        "memory": row.memory_verdict,
        "growth": row.growth_verdict,
    }
