"""A report as one HTML page that needs nothing else: no script, no network, no font of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

from k31compile.cli import region_drawing

if TYPE_CHECKING:
    from k31compile.report import Report
    from k31compile.timeline.page import Planned

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.15rem; border-bottom: 1px solid #8886; margin-top: 2.5rem; }
h3 { font-size: 1rem; margin-bottom: .3rem; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .25rem .6rem; vertical-align: top; }
th { border-bottom: 2px solid #8888; } td { border-bottom: 1px solid #8884; } td.n { text-align: right; }
.lead { font-weight: 600; } .none { color: #c22; } .miss { color: #b60; font-weight: 600; } code { font-size: .9em; }
"""
_WIDTH = 640


def page(title: str, reports: Sequence[tuple[str, Report]], planned: Mapping[str, Planned] | None = None) -> str:
    """Return the page over one report per entry, with the timeline of each that has a schedule."""
    body = "".join(_section(name, report) + _timeline((planned or {}).get(name)) for name, report in reports)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>{body}</body></html>\n"
    )


def _timeline(planned: Planned | None) -> str:
    from k31compile.timeline.page import section

    return section(planned) if planned is not None else ""


def _section(name: str, report: Report) -> str:
    lead = "lead" if report.fused else "lead none"
    parts = [f'<h2>{escape(name)}</h2><p class="{lead}">{escape(report.headline())}</p>', _bars(report)]
    if report.refused:
        rows = (
            (
                ("miss", "near miss") if refusal.near_miss else "refused",
                refusal.name,
                refusal.reason,
                refusal.where,
                refusal.hint,
            )
            for refusal in report.near_misses_first()
        )
        parts.append(_table("Not fused", ("", "fusion", "why", "where", "what to change"), rows))
    names = sorted(report.fused | report.contains)
    fused = (
        (
            name,
            report.fused.get(name, 0),
            report.contains.get(name, 0),
            report.providers.get(name, {}).get("provider", ""),
            report.providers.get(name, {}).get("why", ""),
        )
        for name in names
    )
    if names:
        parts.append(_table("Fused", ("operator", "call sites", "inside larger ones", "provider", "why"), fused))
    parts.extend((_regions(report), _evidence(report), _costs(report)))
    return "".join(parts)


def _regions(report: Report) -> str:
    from k31compile.report_view import alike

    drawn = (
        f"<h3>{escape(region['name'])}</h3>{region_drawing.draw(region)}"
        f"<p>{len(places)} of this kind: {escape(', '.join(places))}</p>"
        for region, places in alike(report.regions)
    )
    return "".join(drawn)


def _evidence(report: Report) -> str:
    from k31compile.report_view import confirmed

    lines = [*report.notes, *map(confirmed, report.confirmations)]
    return (
        "<h3>Notes and evidence</h3><ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"
        if lines
        else ""
    )


def _costs(report: Report) -> str:
    passes = ((run.name, run.changed, f"{run.seconds:.2f}", run.numerics) for run in report.passes)
    phases = ((name, f"{seconds:.2f}") for name, seconds in report.phases.items())
    versions = ", ".join(f"{name} {version}" for name, version in sorted(report.versions.items()))
    return (
        _table("Passes", ("pass", "places changed", "seconds", "numerics"), passes)
        + _table("Phases", ("phase", "seconds"), phases)
        + f"<p>{report.graphs} graphs, {report.graph_breaks} graph breaks; {escape(versions)}</p>"
    )


def _bars(report: Report) -> str:
    """The picture: nodes of the graph before and after, to one scale."""
    most = max(report.nodes_before, report.nodes_after, 1)
    rows = (("before", report.nodes_before, "#8899aa"), ("after", report.nodes_after, "#2a9d5c"))
    bars = "".join(
        f'<text x="0" y="{y + 16}" fill="currentColor">{label}</text>'
        f'<rect x="60" y="{y}" width="{max(1, count * (_WIDTH - 160) // most)}" height="22" fill="{colour}"/>'
        f'<text x="{66 + max(1, count * (_WIDTH - 160) // most)}" y="{y + 16}" fill="currentColor">{count} nodes</text>'
        for y, (label, count, colour) in zip((0, 30), rows, strict=True)
    )
    label = f"nodes before {report.nodes_before}, after {report.nodes_after}"
    return f'<svg viewBox="0 0 {_WIDTH} 56" width="100%" font-size="14" role="img" aria-label="{label}">{bars}</svg>'


def _table(title: str, heads: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = "".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in rows)
    return f"<h3>{escape(title)}</h3><table><tr>{head}</tr>{body}</table>"


def _cell(value: object) -> str:
    if isinstance(value, tuple):
        return f'<td class="{escape(str(value[0]))}">{escape(str(value[1]))}</td>'
    kind = ' class="n"' if isinstance(value, int | float) else ""
    return f"<td{kind}>{escape(str(value))}</td>"
