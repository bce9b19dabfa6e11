"""``k31 check``: a model's compiled graphs, stage by stage against float64."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from k31compile.cli import console, target
from k31compile.cli.calling import calling
from k31compile.cli.check_lock import check_lock

if TYPE_CHECKING:
    from k31compile.check import CheckReport, Stage

_SHOWN = ("trace", "selection", "operator", "output", "compiled")


def check(
    target_name: Annotated[str, typer.Argument(metavar="TARGET", help=target.HELP)],
    dtype: Annotated[str | None, typer.Option(help="fp32 or bf16; default: as the entry is, fp32 if shipped.")] = None,
    all_stages: Annotated[bool, typer.Option("--all", help="Show every module, not the worst of each layer.")] = False,
    layers: Annotated[int | None, typer.Option(help="Build a shipped model with its first N layers only.")] = None,
    lock: Annotated[Path | None, typer.Option(metavar="F", help="Hold the fusion contract F instead.")] = None,
) -> int:
    """Compare a model as compiled with float64, stage by stage; exit 1 names the first stage beyond its bound.

    With --lock, compare instead what is fused in each layer, and the memory, with a contract of `k31 explain --lock`.
    """
    if lock is not None:
        return check_lock(target_name, lock, dtype, layers)
    entries = target.load_entries(target_name, dtype, layers)
    from k31compile.check import CheckReport
    from k31compile.check import check as run_check

    found = []
    with console.progress("check", len(entries)) as advance:
        for entry in entries:
            advance(entry.name)
            with calling(entry) as said:
                report = run_check(entry)
            report.notes += said
            found.append((entry.name, report))
    total = CheckReport.joined(found) if len(found) > 1 else found[0][1]
    data: dict[str, Any] = {**total.to_dict(), "target": target_name, "dtype": dtype}
    console.emit(data, lambda out: _render(total, all_stages, out))
    if console.json_wanted():
        return 0 if total.ok else 1
    total.require_ok()
    return 0


def _render(report: CheckReport, all_stages: bool, out: Console) -> None:
    out.print(report.headline(), markup=False, highlight=False)
    table = console.table("stage", "kind", "eager", "k31", "bound", "", "note")
    for stage in report.stages if all_stages else _abridged(report.stages):
        note = stage.note if stage.overlap is None else f"{stage.overlap:.1%} the same keys  {stage.note}".rstrip()
        numbers = (f"{value:.1e}" for value in (stage.eager, stage.k31, stage.bound))
        table.add_row(stage.name, stage.kind, *numbers, "ok" if stage.ok else "WRONG", note)
    out.print(table)
    for note in report.notes:
        out.print(note, markup=False, highlight=False)
    wrong = sum(not stage.ok for stage in report.stages)
    verdict = "all within their bounds" if not wrong else f"{wrong} beyond their bounds"
    out.print(f"{len(report.stages)} stages compared, {verdict}", highlight=False)
    out.print("errors are relative to float64 with the same selections; bound: 4 x eager + a floor of the dtype")


def _abridged(stages: list[Stage]) -> list[Stage]:
    """What is not a module, the worst module of each layer, the worst cache, and all that is wrong."""
    worst: dict[tuple[str, str], Stage] = {}
    for stage in stages:
        key = (stage.kind, _layer(stage.name) if stage.kind == "module" else "")
        if stage.kind not in _SHOWN and (key not in worst or _strain(stage) > _strain(worst[key])):
            worst[key] = stage
    kept = {id(stage) for stage in worst.values()}
    return [stage for stage in stages if stage.kind in _SHOWN or not stage.ok or id(stage) in kept]


def _strain(stage: Stage) -> float:
    return stage.k31 / stage.bound


def _layer(name: str) -> str:
    head, _, rest = name.partition("layers.")
    return f"{head}layers.{rest.partition('.')[0]}" if rest else name
