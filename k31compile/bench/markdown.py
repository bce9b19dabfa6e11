"""RESULTS.md: the tables of a run as they are committed, with the command that makes them again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from k31compile.bench.rows import Row
from k31compile.bench.table import HEADS, cells, summary, title


def results_page(command: str, rows: Sequence[Row], machine: Mapping[str, Any], versions: Mapping[str, str]) -> str:
    """The page, one table for each suite."""
    parts = [
        "# Results",
        f"Made by `{command}`. [docs/benchmarks.md](../docs/benchmarks.md) says how everything here is measured.",
        title(machine, versions) + ".",
    ]
    for suite in dict.fromkeys(row.suite for row in rows):
        own = [row for row in rows if row.suite == suite]
        parts += [f"## {suite}", _table(own), summary(own) + "."]
    return "\n\n".join(parts) + "\n"


def _table(rows: Sequence[Row]) -> str:
    lines = [HEADS, tuple("---" for _ in HEADS), *(cells(row) for row in rows)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
