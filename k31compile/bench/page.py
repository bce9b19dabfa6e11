"""The rows of a run as one HTML page that needs nothing else: tables, charts, and what it ran on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from k31compile.bench.charts import chart, lines_of
from k31compile.bench.rows import Row
from k31compile.bench.table import HEADS, cells, summary, title

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.15rem; border-bottom: 1px solid #8886; margin-top: 2.5rem; }
table { border-collapse: collapse; width: 100%; } th, td { text-align: left; padding: .25rem .6rem; }
th { border-bottom: 2px solid #8888; } td { border-bottom: 1px solid #8884; }
tr.wrong td { color: #c22; } .charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(28rem, 1fr)); }
figure { margin: 1rem; } figcaption { font-weight: 600; }
"""


def results_html(command: str, rows: Sequence[Row], machine: Mapping[str, Any], versions: Mapping[str, str]) -> str:
    """The page, a table and the charts of each suite."""
    parts = [f"<h1>k31 bench</h1><p><code>{escape(command)}</code></p><p>{escape(title(machine, versions))}</p>"]
    for suite in dict.fromkeys(row.suite for row in rows):
        own = [row for row in rows if row.suite == suite]
        parts.append(f"<h2>{escape(suite)}</h2><p>{escape(summary(own))}</p>{_table(own)}{_charts(own)}")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>k31 bench</title>'
        f"<style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def _table(rows: Sequence[Row]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in HEADS)
    body = "".join(
        f"<tr{' class=wrong' if row.error else ''}>"
        + "".join(f"<td>{escape(cell)}</td>" for cell in cells(row))
        + "</tr>"
        for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _charts(rows: Sequence[Row]) -> str:
    drawn = "".join(
        f"<figure><figcaption>{escape(series)}</figcaption>{chart(series, lines)}</figure>"
        for series, lines in lines_of(rows).items()
    )
    return f'<div class="charts">{drawn}</div>' if drawn else ""
