"""The rows of a run as a table for people: what was measured, what was wanted, and whether it is met."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from k31compile.bench.goals import BELOW, FLOOR_MET, GOAL_MET, UNTOLD
from k31compile.bench.rows import Row

HEADS = ("operator or model", "case", "against", "faster by", "spread", "of the roof", "goal", "must", "extra", "met")

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
        "" if row.roof is None else f"{row.roof:.0%}",
        goal_text(row.goal, row.roof_goal, row.limit_seconds),
        goal_text(row.must, row.roof_must, None),
        memory_text(row.peak_extra_bytes),
        met_text(row),
    )


def ratio_text(row: Row) -> str:
    """The ratio, or that it cannot be told, with the quartiles; times for a case that has a time limit."""
    if row.low is None or row.high is None:
        return ""
    text = f"noisy: {row.low:.2f} .. {row.high:.2f}" if row.ratio is None else f"{row.ratio:.2f} x"
    if row.error:
        text += f" ERROR: {row.error}"
    if row.limit_seconds is not None and row.seconds is not None:
        text += f" ({row.seconds * 1e3:.2f} ms)"
    return text


def goal_text(ratio: float | None, roof: float | None, seconds: float | None) -> str:
    """What is wanted of ratio, roof and time, what nobody asks left out."""
    parts = [] if ratio is None else [f"{ratio:g} x"]
    parts += [] if roof is None else [f"{roof:.0%}"]
    parts += [] if seconds is None else [f"{seconds * 1e3:g} ms"]
    return ", ".join(parts)


def memory_text(count: int | None) -> str:
    """Bytes as MiB."""
    return "" if count is None else f"{count / 2**20:.1f} MiB"


def met_text(row: Row) -> str:
    """The verdict where there is one of the ratio and all others are the same, else each with its name."""
    named = {"ratio": row.verdict, "roof": row.roof_verdict, "time": row.limit_verdict, "memory": row.memory_verdict}
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
    words = [word for row in rows for word in (row.verdict, row.roof_verdict, row.limit_verdict, row.memory_verdict)]
    counts = {word: words.count(word) for word in (GOAL_MET, FLOOR_MET, BELOW, UNTOLD)}
    failed, skipped = (sum(bool(getattr(row, name)) for row in rows) for name in ("error", "skipped"))
    return (
        f"{counts[GOAL_MET]} goals met, {counts[FLOOR_MET]} at the floor only, {counts[BELOW]} below it, "
        f"{counts[UNTOLD]} that the noise hides; {len(rows)} rows, {failed} of them wrong, "
        f"{skipped} not measured"
    )
