"""``k31 bench``: k31 against Inductor and eager, side by side in one run, checked before anything is timed."""

from __future__ import annotations

import fnmatch
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from k31compile.cli import console, target
from k31compile.errors import UsageError

if TYPE_CHECKING:
    from k31compile.bench.measure import Settings
    from k31compile.bench.rows import Row

_WORKER = ("-m", "k31compile.cli.bench_worker")
_FILES = ("json_file", "html_file", "markdown")
_SECONDS, _QUICK_SECONDS = 3.0, 1.0  # for the rounds of one case


def bench(
    context: typer.Context,
    target_name: Annotated[
        str | None, typer.Argument(metavar="[TARGET]", help=f"Measure its entries instead of ours: {target.HELP}")
    ] = None,
    suite: Annotated[
        str | None, typer.Option(help="operators (default), models (default with a TARGET), compile; with commas.")
    ] = None,
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
    repeats: Annotated[int, typer.Option(min=1, help="Of each compile.")] = 1,
    limit: Annotated[float, typer.Option(min=1.0, help="Seconds until the first result of one model.")] = 900.0,
    json_file: Annotated[
        Path | None, typer.Option("--output-json", metavar="F", help="Write the JSON document to a file, too.")
    ] = None,
    html_file: Annotated[Path | None, typer.Option("--html", metavar="F", help="Write a page with charts.")] = None,
    markdown: Annotated[
        Path | None, typer.Option("--output-md", metavar="F", help="Write the tables, as in benchmarks/RESULTS.md.")
    ] = None,
) -> int:
    """Measure k31 in turns with what the same PyTorch costs otherwise; exit 1 where a result is wrong."""
    for file in (json_file, html_file, markdown):
        if file is not None and not file.resolve().parent.is_dir():
            raise UsageError(f"there is no folder {file.resolve().parent} for {file}")
    from k31compile.bench.case import OPPONENTS
    from k31compile.bench.measure import Settings
    from k31compile.bench.rows import SUITES, document

    opponents = _words(against, OPPONENTS, "opponent")
    suites = _words(suite or ("models" if target_name else "operators"), SUITES, "suite")
    if target_name and "operators" in suites:
        raise UsageError("the suite of operators has cases of its own and takes no TARGET")
    cases = {name: _chosen(_cases(name, target_name), only, quick) for name in suites}
    if not any(cases.values()):
        raise UsageError(f"no case has {only!r} in its name", hint="k31 bench --list names them")
    if listing:
        _list(cases)
        return 0
    default = _QUICK_SECONDS if quick else _SECONDS
    settings = Settings(opponents, threads, default if seconds is None else seconds)
    machine, versions = _facts(threads)
    rows: list[Row] = []
    with console.progress("bench", sum(map(len, cases.values()))) as advance:
        for name, chosen in cases.items():
            rows += _run(name, chosen, settings, (target_name or "", limit, repeats), advance)
    data = document(rows, machine, versions)
    _write(_command(context), data, rows, (json_file, html_file, markdown))
    console.emit(data, lambda out: _render(rows, data, out))
    return 1 if any(row.error for row in rows) else 0


def _words(given: str, known: Sequence[str], kind: str) -> tuple[str, ...]:
    words = tuple(word.strip() for word in given.split(",") if word.strip())
    for word in words:
        if word not in known:
            raise UsageError(f"there is no {kind} {word!r}", hint=f"{kind}s: {', '.join(known)}")
    if not words:
        raise UsageError(f"no {kind} is named", hint=f"{kind}s: {', '.join(known)}")
    return tuple(dict.fromkeys(words))


def _cases(suite: str, target_name: str | None) -> list[Any]:
    if target_name:
        from k31compile.bench.models.case import ModelCase

        # loaded here only for their names: the process of each variant loads its own
        names = [entry.name for entry in target.load_entries(target_name)]
        return [ModelCase(target_name, name, _made_elsewhere, is_quick=True) for name in names]
    if suite == "operators":
        from k31compile.bench.operators import operator_cases

        return list(operator_cases())
    from k31compile.bench.models import model_cases

    return list(model_cases())


def _made_elsewhere() -> Any:
    raise AssertionError("entries of a target are made by the processes that measure them")


def _chosen(cases: Sequence[Any], only: str | None, quick: bool) -> list[Any]:
    wanted = [case for case in cases if case.is_quick or not quick]
    return [case for case in wanted if only is None or fnmatch.fnmatch(case.full_name, f"*{only}*")]


def _list(cases: dict[str, list[Any]]) -> None:
    names = {suite: [case.full_name for case in chosen] for suite, chosen in cases.items()}
    lines = "\n".join(f"{suite}: {name}" for suite, chosen in names.items() for name in chosen)
    console.emit({"cases": names}, lambda out: out.print(lines, markup=False, highlight=False))


def _facts(threads: int) -> tuple[dict[str, Any], dict[str, str]]:
    from k31compile.bench.operator_runs import facts

    return facts(threads, [*_WORKER, "operators"])


def _run(suite: str, cases: Sequence[Any], settings: Settings, how: tuple[str, float, int], advance: Any) -> list[Row]:
    if suite == "operators":
        from k31compile.bench.operator_runs import run_operators

        return run_operators(cases, settings, [*_WORKER, suite], advance)
    from k31compile.bench.compile_runs import run_compiles
    from k31compile.bench.model_runs import Place, run_models

    target_name, limit, repeats = how
    place = Place([*_WORKER, suite], target_name, limit)
    if suite == "compile":
        return run_compiles(cases, settings, place, advance, repeats)
    return run_models(cases, settings, place, advance)


def _command(context: typer.Context) -> str:
    """The command line that measures the same, without the files that this one writes."""
    words = ["k31", "bench"]
    for parameter in context.command.params:
        value = context.params.get(str(parameter.name))
        if value in (None, False, parameter.default) or parameter.name in _FILES:
            continue
        words += [] if parameter.name == "target_name" else [parameter.opts[0]]
        words += [] if value is True else [str(value)]
    return shlex.join(words)


def _write(
    command: str, data: dict[str, Any], rows: Sequence[Row], files: tuple[Path | None, Path | None, Path | None]
) -> None:
    json_file, html_file, markdown = files
    if json_file is not None:
        json_file.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    if html_file is not None:
        from k31compile.bench.page import results_html

        html_file.write_text(results_html(command, rows, data["machine"], data["versions"]), encoding="utf-8")
    if markdown is not None:
        from k31compile.bench.markdown import results_page

        markdown.write_text(results_page(command, rows, data["machine"], data["versions"]), encoding="utf-8")


def _render(rows: Sequence[Row], data: dict[str, Any], out: Console) -> None:
    from k31compile.bench.table import HEADS, cells, summary, title

    table = console.table(*HEADS)
    for row in rows:
        table.add_row(*cells(row))
    out.print(title(data["machine"], data["versions"]), markup=False, highlight=False)
    out.print(table)
    out.print(summary(rows), markup=False, highlight=False)
