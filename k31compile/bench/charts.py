"""Charts as SVG: time against length, or against layers, one line for each who computes it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from html import escape

from k31compile.bench.case import OURS
from k31compile.bench.rows import Row

Points = list[tuple[float, float]]

_COLOURS = {OURS: "#228833", "inductor": "#4477aa", "max-autotune": "#aa3377", "eager": "#ccbb44"}
_OTHER = "#888888"
_WIDE, _HIGH, _LEFT, _BELOW, _RIGHT, _TOP = 640, 300, 70, 36, 110, 12


def lines_of(rows: Sequence[Row]) -> dict[str, dict[str, Points]]:
    """Series -> who -> (size, milliseconds for one token of it), ordered by size; noisy times are times, too."""
    found: dict[str, dict[str, dict[float, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        if not row.series or row.seconds is None or row.other_seconds is None:
            continue
        series = f"{row.series}, {row.case.rpartition(', ')[2]}" if row.suite == "compile" else row.series
        per_token = 1e3 / row.tokens
        found[series][OURS][row.size] = row.seconds * per_token
        found[series][row.against][row.size] = row.other_seconds * per_token
    return {
        series: {who: sorted(points.items()) for who, points in lines.items()}
        for series, lines in found.items()
        if len(lines[OURS]) > 1
    }


def chart(title: str, lines: Mapping[str, Points]) -> str:
    """One drawing, both axes logarithmic."""
    sizes = [size for points in lines.values() for size, _ in points]
    times = [time for points in lines.values() for _, time in points]
    across, up = _Axis(sizes, _LEFT, _WIDE - _RIGHT), _Axis(times, _HIGH - _BELOW, _TOP)
    parts = [
        *(_tick_across(across.place(size), size) for size in sorted(set(sizes))),
        *(_tick_up(up.place(time), time) for time in up.ticks()),
    ]
    for who, points in lines.items():
        parts.append(_line(who, [(across.place(size), up.place(time), size, time) for size, time in points]))
    label = escape(f"{title}: milliseconds against size", quote=True)
    return (
        f'<svg viewBox="0 0 {_WIDE} {_HIGH}" width="100%" font-size="12" role="img" aria-label="{label}">'
        f"{''.join(parts)}</svg>"
    )


class _Axis:
    """Where a value lies between two ends of a logarithmic axis, with some room at both."""

    def __init__(self, values: Sequence[float], begin: float, end: float) -> None:
        self._low, self._high = math.log(min(values) / 1.15), math.log(max(values) * 1.15)
        self._begin, self._end = begin, end

    def place(self, value: float) -> float:
        share = (math.log(value) - self._low) / (self._high - self._low)
        return round(self._begin + share * (self._end - self._begin), 1)

    def ticks(self) -> list[float]:
        """The powers of ten inside, and 2 and 5 between them where there are few."""
        first, last = (math.floor(edge / math.log(10)) for edge in (self._low, self._high))
        steps = (1.0,) if last - first > 2 else (1.0, 2.0, 5.0)
        all_of = [step * 10.0**power for power in range(first, last + 1) for step in steps]
        return [tick for tick in all_of if self._low <= math.log(tick) <= self._high]


def _tick_across(x: float, size: float) -> str:
    name = f"{size / 1024:g}k" if size >= 1024 else f"{size:g}"
    return (
        f'<line x1="{x}" x2="{x}" y1="{_TOP}" y2="{_HIGH - _BELOW}" stroke="#8883"/>'
        f'<text x="{x}" y="{_HIGH - _BELOW + 16}" text-anchor="middle" fill="currentColor">{name}</text>'
    )


def _tick_up(y: float, time: float) -> str:
    return (
        f'<line x1="{_LEFT}" x2="{_WIDE - _RIGHT}" y1="{y}" y2="{y}" stroke="#8883"/>'
        f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end" fill="currentColor">{time:g} ms</text>'
    )


def _line(who: str, places: Sequence[tuple[float, float, float, float]]) -> str:
    colour = _COLOURS.get(who, _OTHER)
    path = " ".join(f"{x},{y}" for x, y, _, _ in places)
    dots = "".join(
        f'<circle cx="{x}" cy="{y}" r="3.5" fill="{colour}">'
        f"<title>{escape(who)}, {size:g}: {time:.4g} ms</title></circle>"
        for x, y, size, time in places
    )
    end = places[-1]
    return (
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>{dots}'
        f'<text x="{end[0] + 8}" y="{end[1] + 4}" fill="{colour}">{escape(who)}</text>'
    )
