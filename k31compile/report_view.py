"""How a report looks on a terminal and as plain text."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from k31compile.report import Report


def show(report: Report, console: Console) -> None:
    """Print the headline, then fusions, refusals (near misses first), notes, evidence and costs."""
    style = "bold green" if report.fused else "bold white on red"
    console.print(f"[{style}]{escape(report.headline())}[/]", soft_wrap=True)
    if report.fused or report.contains:
        console.print(_fusion_table(report))
    for region, places in alike(report.regions):
        times = f"{len(places)} times, first in" if len(places) > 1 else "in"
        line = f"{region['name']} {times} {places[0]}: {in_parts(region)}"
        console.print(f"[dim]{escape(line)}[/]", soft_wrap=True)
    for refusal in report.near_misses_first():
        label = "near miss" if refusal.near_miss else "refused"
        console.print(f"[yellow]{label}[/] {escape(str(refusal))}", soft_wrap=True)
    for row in report.weights:
        if row["reason"]:
            console.print(f"[dim]{escape(plain(row))}[/]", soft_wrap=True)
    for note in report.notes:
        console.print(f"[cyan]note[/] {escape(note)}", soft_wrap=True)
    for choice in report.choice:
        console.print(f"[dim]{escape(chosen(choice))}[/]", soft_wrap=True)
    for leaf in report.leaves:
        console.print(f"[dim]{escape(kept(leaf))}[/]", soft_wrap=True)
    for confirmation in report.confirmations:
        console.print(f"[dim]{escape(confirmed(confirmation))}[/]", soft_wrap=True)
    console.print(escape(_summary(report)), soft_wrap=True, highlight=False)


def as_text(report: Report) -> str:
    """Return the report as plain text, without colour and independent of the terminal."""
    buffer = io.StringIO()
    show(report, Console(file=buffer, width=110, color_system=None, force_terminal=False, emoji=False))
    return buffer.getvalue().rstrip()


def confirmed(confirmation: dict[str, Any]) -> str:
    """Say what a confirmation is: evidence from samples, with its sizes and tolerance."""
    seen = f"confirmed on {confirmation['samples']} samples in float64"
    seen = f"remembered: {seen} before" if confirmation.get("remembered") else seen
    text = f"{confirmation['name']}: {seen}"
    details = [
        f"{label} {confirmation[key]}"
        for key, label in (("sizes", "sizes"), ("tolerance", "tolerance"), ("worst_error", "worst error"))
        if confirmation.get(key) is not None
    ]
    return f"{text} ({', '.join(details)})" if details else text


def plain(row: dict[str, Any]) -> str:
    """Say which weight keeps its plain layout, and why."""
    remedy = f"; {row['remedy']}" if row["remedy"] else ""
    shape = "x".join(map(str, row["shape"]))
    return f"weight {row['name']} ({row['dtype']} {shape}) stays as it is: {row['reason']}{remedy}"


def chosen(choice: dict[str, Any]) -> str:
    """Say which of two builds of a graph runs, and what a call of each took."""
    seconds = ", ".join(f"{name} {spent * 1e3:.3g} ms" for name, spent in choice["seconds"].items())
    return f"measured once, kept: this graph runs as {choice['taken']} ({seconds} a call)"


def alike(regions: Iterable[dict[str, Any]]) -> list[tuple[dict[str, Any], list[str]]]:
    """Return the named regions, those with the same parts and edges once, with every place where such a one is."""
    kinds: dict[str, tuple[dict[str, Any], list[str]]] = {}
    for region in regions:
        structure = repr((region["name"], [part["name"] for part in region["parts"]], region["edges"]))
        places = kinds.setdefault(structure, (region, []))[1]
        places.extend([region["where"]] * region["calls"])
    return list(kinds.values())


def in_parts(region: dict[str, Any]) -> str:
    """Say the parts of a named region with arrows from each to those that read it."""
    left = [tuple(edge) for edge in region["edges"]]
    alone = [part["name"] for part in region["parts"] if not any(part["name"] in edge for edge in left)]
    chains: list[list[str]] = [[name] for name in alone]
    while left:
        chain = list(left.pop(0))
        while following := next((edge for edge in left if edge[0] == chain[-1]), None):
            left.remove(following)
            chain.append(following[1])
        chains.append(chain)
    return "; ".join(" -> ".join(chain) for chain in chains)


def kept(leaf: dict[str, Any]) -> str:
    """Say which function was kept whole, as what, and on what evidence."""
    calls = "1 call" if leaf["calls"] == 1 else f"{leaf['calls']} calls"
    lengths = ", ".join(map(str, leaf["lengths"]))
    return (
        f"{leaf['operator']}: the function {leaf['function']} ({leaf['where']}), {leaf['why']}, {calls}: "
        f"{leaf['text']} "
        f"(lengths {lengths}, worst error {leaf['worst_error']:.1e})"
    )


def _fusion_table(report: Report) -> Table:
    table = Table("operator", "call sites", "inside larger ones", "provider", "why")
    for name in sorted(report.fused | report.contains):
        provider = report.providers.get(name, {})
        table.add_row(
            escape(name),
            str(report.fused.get(name, 0)),
            str(report.contains.get(name, 0)),
            escape(provider.get("provider", "")),
            escape(provider.get("why", "")),
        )
    return table


def _summary(report: Report) -> str:
    seconds = sum(report.phases.values())
    phases = ", ".join(f"{name} {spent:.2f} s" for name, spent in report.phases.items())
    graphs = "1 graph" if report.graphs == 1 else f"{report.graphs} graphs"
    breaks = "1 break" if report.graph_breaks == 1 else f"{report.graph_breaks} breaks"
    text = f"{graphs}, {breaks}, {report.nodes_before} nodes before and {report.nodes_after} after"
    return f"{text}; {seconds:.2f} s ({phases})" if phases else text
