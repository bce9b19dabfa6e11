"""``k31 bench``: k31 against Inductor and eager, side by side in one run, checked before anything is timed."""

from __future__ import annotations

import fnmatch
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from k31compile.cli import console
from k31compile.errors import UsageError

if TYPE_CHECKING:
    from k31compile.bench.case import Case
    from k31compile.bench.measure import Settings
    from k31compile.bench.rows import Row

_WORKER = ("-m", "k31compile.cli.bench_worker")
_SECONDS, _QUICK_SECONDS = 3.0, 1.0  # for the rounds of one case


def bench(
    suite: Annotated[str, typer.Option(help="operators, or several with commas.")] = "operators",
    against: Annotated[
        str, typer.Option(help="inductor, max-autotune, eager; several with commas.")
    ] = "inductor,eager",
    only: Annotated[
        str | None, typer.Option(metavar="PATTERN", help="Cases with this in their name; * and ? as in file names.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer cases, smaller ones, less time for each.")] = False,
    listing: Annotated[bool, typer.Option("--list", help="Name the cases and measure nothing.")] = False,
    threads: Annotated[int, typer.Option(min=1, help="1: CPU time of the thread; more: wall time.")] = 1,
    seconds: Annotated[float | None, typer.Option(min=0.0, help="For the rounds of one case.")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--output-json", metavar="F", help="Write the JSON document to a file, too.")
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option("--output-md", metavar="F", help="Write the tables, as in benchmarks/RESULTS.md.")
    ] = None,
) -> int:
    """Measure k31 in turns with what the same PyTorch costs otherwise; exit 1 where a result is wrong."""
    for file in (json_file, markdown):
        if file is not None and not file.resolve().parent.is_dir():
            raise UsageError(f"there is no folder {file.resolve().parent} for {file}")
    opponents = _words(against, _opponents(), "opponent")
    _words(suite, ("operators",), "suite")
    cases = _chosen(only, quick)
    if listing:
        names = [case.full_name for case in cases]
        console.emit({"cases": names}, lambda out: out.print("\n".join(names), markup=False, highlight=False))
        return 0
    from k31compile.bench.measure import Settings

    default = _QUICK_SECONDS if quick else _SECONDS
    settings = Settings(opponents, threads, default if seconds is None else seconds)
    data, rows = _measured(cases, settings)
    if json_file is not None:
        json_file.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    if markdown is not None:
        from k31compile.bench.markdown import results_page

        page = results_page(_command(), rows, data["machine"], data["versions"])
        markdown.write_text(page, encoding="utf-8")
    console.emit(data, lambda out: _render(rows, data, out))
    return 1 if any(row.error for row in rows) else 0


def _opponents() -> tuple[str, ...]:
    from k31compile.bench.case import OPPONENTS

    return OPPONENTS


def _words(given: str, known: Sequence[str], kind: str) -> tuple[str, ...]:
    words = tuple(word.strip() for word in given.split(",") if word.strip())
    for word in words:
        if word not in known:
            raise UsageError(f"there is no {kind} {word!r}", hint=f"{kind}s: {', '.join(known)}")
    if not words:
        raise UsageError(f"no {kind} is named", hint=f"{kind}s: {', '.join(known)}")
    return tuple(dict.fromkeys(words))


def _chosen(only: str | None, quick: bool) -> list[Case]:
    from k31compile.bench.operators import operator_cases

    cases = [case for case in operator_cases() if case.is_quick or not quick]
    found = [case for case in cases if only is None or fnmatch.fnmatch(case.full_name, f"*{only}*")]
    if not found:
        raise UsageError(f"no case has {only!r} in its name", hint="k31 bench --list names them")
    return found


def _measured(cases: Sequence[Case], settings: Settings) -> tuple[dict[str, Any], list[Row]]:
    from k31compile.bench.operator_runs import facts, run_operators
    from k31compile.bench.rows import document

    machine, versions = facts(settings.threads, [*_WORKER, "operators"])
    with console.progress("bench", len(cases)) as advance:
        rows = run_operators(cases, settings, [*_WORKER, "operators"], advance)
    return document(rows, machine, versions), rows


def _command() -> str:
    """The command line as it was written, without options that only say where results go."""
    return " ".join(["k31", *sys.argv[1:]])


def _render(rows: Sequence[Row], data: dict[str, Any], out: Console) -> None:
    from k31compile.bench.table import HEADS, cells, summary, title

    table = console.table(*HEADS)
    for row in rows:
        table.add_row(*cells(row))
    out.print(title(data["machine"], data["versions"]), markup=False, highlight=False)
    out.print(table)
    out.print(summary(rows), markup=False, highlight=False)
