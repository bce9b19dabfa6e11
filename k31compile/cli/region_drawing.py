"""A named region as a drawing: parts as boxes, each to the right of those that it reads."""

from __future__ import annotations

from html import escape
from typing import Any

_WIDE, _HIGH, _GAP_X, _GAP_Y = 128, 40, 34, 12
_COLOURS = {"product": "#4477aa", "norm": "#228833", "vector": "#ccbb44", "write": "#aa3377"}


def draw(region: dict[str, Any]) -> str:
    """Return an SVG of a region as `Report.regions` has it."""
    places = _places(region)
    boxes = "".join(_box(part, *places[part["name"]]) for part in region["parts"])
    lines = "".join(_line(places[a], places[b]) for a, b in region["edges"])
    width = max(x for x, _ in places.values()) + _WIDE + 1
    height = max(y for _, y in places.values()) + _HIGH + 1
    label = escape(f"{region['name']}: {len(region['parts'])} parts, {len(region['edges'])} edges", quote=True)
    return (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" style="max-width:100%" font-size="12" role="img" '
        f'aria-label="{label}">{lines}{boxes}</svg>'
    )


def _places(region: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """The corner of each part: a column for each step after the first, rows from the top."""
    column: dict[str, int] = {}
    rows: dict[int, int] = {}
    places: dict[str, tuple[int, int]] = {}
    for part in region["parts"]:
        name = part["name"]
        column[name] = 1 + max((column[a] for a, b in region["edges"] if b == name), default=-1)
        row = rows.get(column[name], 0)
        rows[column[name]] = row + 1
        places[name] = (column[name] * (_WIDE + _GAP_X), row * (_HIGH + _GAP_Y))
    return places


def _box(part: dict[str, Any], x: int, y: int) -> str:
    said = "1 node" if len(part["nodes"]) == 1 else f"{len(part['nodes'])} nodes"
    if part["weight_bytes"]:
        said += f", {part['weight_bytes']:,} B"
    return (
        f'<rect x="{x}" y="{y}" width="{_WIDE}" height="{_HIGH}" rx="5" fill="none" stroke-width="2" '
        f'stroke="{_COLOURS[part["kind"]]}"/>'
        f'<text x="{x + 8}" y="{y + 17}" fill="currentColor" font-weight="600">{escape(part["name"])}</text>'
        f'<text x="{x + 8}" y="{y + 33}" fill="currentColor" font-size="10">{said}</text>'
    )


def _line(begin: tuple[int, int], end: tuple[int, int]) -> str:
    x, y = begin[0] + _WIDE, begin[1] + _HIGH // 2
    to_x, to_y = end[0], end[1] + _HIGH // 2
    bend = (x + to_x) // 2
    return f'<path d="M{x} {y}C{bend} {y} {bend} {to_y} {to_x} {to_y}" fill="none" stroke="currentColor"/>'
