"""``k31 explain``: what the compiler does with a model, near misses first, as text, JSON or one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

import k31compile
from k31compile.cli import console, html, target
from k31compile.cli.calling import calling
from k31compile.errors import UsageError

if TYPE_CHECKING:
    from k31compile.contract.lockfile import Graph
    from k31compile.entry import Entry
    from k31compile.report import Report
    from k31compile.timeline.page import Planned


def explain(
    target_name: Annotated[str, typer.Argument(metavar="TARGET", help=target.HELP)],
    html_file: Annotated[
        Path | None, typer.Option("--html", metavar="F", help="Write one self-contained page.")
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Build a shipped model with its first N layers only.")] = None,
    lock: Annotated[Path | None, typer.Option(metavar="F", help="Write a fusion contract, e.g. k31.lock.")] = None,
    layout: Annotated[
        str, typer.Option(help="auto, nd or nz: with nz, which weights are packed, and why not.")
    ] = "auto",
    product: Annotated[
        str | None, typer.Option("--target", help="Predict a schedule for ascend-a3, ascend-950 or cuda.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="F", help="Write that schedule as trace events for Perfetto.")
    ] = None,
) -> None:
    """Say what is fused in a model, what is not, and why; each entry is called once, operator by operator."""
    _require_target(product, trace)
    for file in (html_file, lock, trace):
        if file is not None and not file.resolve().parent.is_dir():
            raise UsageError(f"there is no folder {file.resolve().parent} for {file}")
    k31compile.Options(layout=layout)
    entries = target.load_entries(target_name, layers=layers)
    found: list[tuple[str, Report]] = []
    graphs: list[Graph] = []
    planned: dict[str, Planned] = {}
    with console.progress("explain", len(entries)) as advance:
        for entry in entries:
            advance(entry.name)
            report, made = explained_graphs(entry, layout)
            found.append((entry.name, report))
            graphs += made
            if product is not None:
                planned |= _planned(entry, report, product)
    data = result(target_name, found)
    if lock is not None:
        write_lock(lock, target_name, graphs)
    if html_file is not None:
        html_file.write_text(html.page(f"k31 explain {target_name}", found, planned), encoding="utf-8")
    if trace is not None:
        trace.write_text(_trace_of(planned), encoding="utf-8")
    console.emit(data, lambda out: _render(found, [file for file in (html_file, lock, trace) if file], out))


def _require_target(product: str | None, trace: Path | None) -> None:
    if product is None and trace is not None:
        raise UsageError("--trace is a schedule for a target", hint="add --target ascend-a3, ascend-950 or cuda")
    if product is not None:
        from k31compile.passes.schedule.cost_model import known_targets

        if product not in known_targets():
            raise UsageError(f"there is no target {product!r}", hint=f"targets: {', '.join(known_targets())}")


def _planned(entry: Entry, report: Report, product: str) -> dict[str, Planned]:
    """The predicted schedule of an entry, told in its report; none where a call is more than one graph."""
    from k31compile.backend import captured_graph
    from k31compile.errors import TraceError
    from k31compile.timeline.plan import plan

    try:
        with calling(entry), entry.grad_mode():
            module, _ = captured_graph(entry.model, entry.args, entry.kwargs, "cpu")
    except TraceError as error:
        report.notes.append(f"no schedule is predicted: {error.what}")
        return {}
    planned = plan(entry.name, module, product)
    report.schedule = planned.schedule.counts()
    report.notes.append(planned.summary())
    return {entry.name: planned}


def _trace_of(planned: dict[str, Planned]) -> str:
    from k31compile.timeline.page import trace_text

    return trace_text(list(planned.values()))


def explained(entry: Entry, layout: str = "auto") -> Report:
    """Return the report over all graphs of one call of an entry, with this layout of weights."""
    from k31compile.explain import explain_with

    options = {"codegen": "ops", "layout": layout}
    with calling(entry) as said, entry.grad_mode():
        report = explain_with(options, entry.model, *entry.args, **entry.kwargs)  # type: ignore[arg-type]
    report.notes.extend([*said, *_meta_note(entry)])
    if entry.mode == "grad":
        report.notes.append("the entry asks for gradients; k31 compiles for inference: this is the call without")
    return report


def explained_graphs(entry: Entry, layout: str = "auto") -> tuple[Report, list[Graph]]:
    """Return the report over one call of an entry, and each of its graphs as a contract has it."""
    from k31compile.contract.lockfile import graphs_of
    from k31compile.report import reports

    known = len(reports())
    report = explained(entry, layout)
    return report, graphs_of(entry.name, reports()[known:])


def write_lock(path: Path, target_name: str, graphs: list[Graph]) -> None:
    """Write a contract of these graphs; LockError where the file is not ours or cannot be written."""
    from k31compile.contract.lockfile import Contract, write_contract

    write_contract(path, Contract(target_name, tuple(graphs), made_with()))


def made_with() -> dict[str, str]:
    """Return the versions that decide what a graph gets, without the build of torch."""
    import torch

    return {"k31compile": k31compile.__version__, "torch": str(torch.__version__).partition("+")[0]}


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


def _render(found: list[tuple[str, Report]], written: list[Path], out: Console) -> None:
    for name, report in found:
        out.rule(name, style="dim") if out.is_terminal else out.print(f"== {name}", markup=False, highlight=False)
        report.render(out)
    for file in written:
        out.print(f"written: {file}", markup=False, highlight=False)
