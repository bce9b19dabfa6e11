"""``k31 explain``: what the compiler does with a model, near misses first, as text, JSON or one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from k31compile.cli import console, html, target
from k31compile.errors import NotBuiltYetError, UsageError

if TYPE_CHECKING:
    from k31compile.entry import Entry
    from k31compile.report import Report


def explain(
    target_name: Annotated[str, typer.Argument(metavar="TARGET", help=target.HELP)],
    html_file: Annotated[
        Path | None, typer.Option("--html", metavar="F", help="Write one self-contained page.")
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Build a shipped model with its first N layers only.")] = None,
    lock: Annotated[Path | None, typer.Option(metavar="F", help="Write a fusion contract (not built yet).")] = None,
) -> None:
    """Say what is fused in a model, what is not, and why; each entry is called once, operator by operator."""
    if lock is not None:
        raise NotBuiltYetError("a fusion contract (--lock) is not built yet", hint="--json lists the fusions")
    if html_file is not None and not html_file.resolve().parent.is_dir():
        raise UsageError(f"there is no folder {html_file.resolve().parent} for {html_file}")
    entries = target.load_entries(target_name, layers=layers)
    found: list[tuple[str, Report]] = []
    with console.progress("explain", len(entries)) as advance:
        for entry in entries:
            advance(entry.name)
            found.append((entry.name, explained(entry)))
    data = result(target_name, found)
    if html_file is not None:
        html_file.write_text(html.page(f"k31 explain {target_name}", found), encoding="utf-8")
    console.emit(data, lambda out: _render(found, html_file, out))


def explained(entry: Entry) -> Report:
    """Return the report over all graphs of one call of an entry."""
    from k31compile.explain import explain as explain_call

    with entry.grad_mode():
        report = explain_call(entry.model, *entry.args, **entry.kwargs)  # type: ignore[arg-type]
    report.notes.extend(_meta_note(entry))
    if entry.mode == "grad":
        report.notes.append("the entry asks for gradients; k31 compiles for inference: this is the call without")
    return report


def result(name: str, found: list[tuple[str, Report]]) -> dict[str, Any]:
    """Return the JSON of reports by entry: their merged report, and each under its name."""
    from k31compile.report import Report

    merged = found[0][1] if len(found) == 1 else Report.merge(report for _, report in found)
    return {**merged.to_dict(), "target": name, "entries": {entry: report.to_dict() for entry, report in found}}


def _meta_note(entry: Entry) -> list[str]:
    config = getattr(entry.model, "config", None)
    depth = getattr(config, "num_hidden_layers", None)
    if not entry.name.startswith("full:") or depth is None:
        return []
    whole = f"all {depth}" if depth == 93 else f"the first {depth} of 93"
    return [f"meta device: {whole} layers were traced and rewritten, nothing was computed (--layers N chooses)"]


def _render(found: list[tuple[str, Report]], html_file: Path | None, out: Console) -> None:
    for name, report in found:
        out.rule(name, style="dim") if out.is_terminal else out.print(f"== {name}", markup=False, highlight=False)
        report.render(out)
    if html_file is not None:
        out.print(f"written: {html_file}", markup=False, highlight=False)
