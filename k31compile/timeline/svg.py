"""A timeline as a drawing: a lane for each stream, bars by engine, events as thin lines, merged launches as frames."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from k31compile.passes.schedule.cost_model import CostModel
from k31compile.timeline.lanes import Bar, Timeline

COLOURS = {"cube": "#4477aa", "vector": "#ccbb44", "memory": "#aa3377", "communication": "#228833"}
_CRITICAL = "#dd2222"
_LEFT, _WIDE, _HIGH, _GAP, _TOP = 64, 1200, 26, 12, 8


def draw(timeline: Timeline, seconds: float) -> str:
    """An SVG of a timeline, to the scale at which so many seconds fill the width."""
    scale = _WIDE / seconds if seconds > 0 else 0.0
    height = _TOP + timeline.streams * (_HIGH + _GAP)
    label = escape(f"{timeline.title}, {len(timeline.bars)} tasks, {_us(timeline.end)} predicted", quote=True)
    parts = [
        *(_lane(stream) for stream in range(timeline.streams)),
        *(_bar(bar, scale) for bar in timeline.bars),
        *_regions(timeline, scale),
        *_events(timeline, scale),
    ]
    return (
        f'<svg viewBox="0 0 {_LEFT + _WIDE + 8} {height}" width="100%" font-size="12" role="img" '
        f'aria-label="{label}">{"".join(parts)}</svg>'
    )


def legend() -> str:
    """What the colours mean, as HTML."""
    marks = "".join(
        f'<span style="border-left:1em solid {colour};padding:0 1em 0 .3em">{engine}</span>'
        for engine, colour in COLOURS.items()
    )
    return f'<p>{marks}<span style="border-bottom:3px solid {_CRITICAL}">critical path</span></p>'


def sources(costs: CostModel) -> str:
    """The sentence that all times are predictions, and where each figure behind them comes from, as HTML."""
    figures = ("cube_flops", "vector_flops", "memory_bytes", "link_bytes", "launch", "event")
    rows = "".join(
        f"<li>{name}: {getattr(costs, name).value:g} {escape(getattr(costs, name).unit)} "
        f"({escape(getattr(costs, name).source)})</li>"
        for name in figures
    )
    return (
        f"<p>All times are predictions of a cost model for {escape(costs.device)}; nothing was measured.</p>"
        f"<details><summary>its figures and their sources</summary><ul>{rows}</ul></details>"
    )


def _lane(stream: int) -> str:
    y = _y(stream)
    name = "main" if stream == 0 else f"stream {stream}"
    return (
        f'<text x="0" y="{y + 17}" fill="currentColor">{name}</text>'
        f'<line x1="{_LEFT}" x2="{_LEFT + _WIDE}" y1="{y + _HIGH}" y2="{y + _HIGH}" stroke="#8886"/>'
    )


def _bar(bar: Bar, scale: float) -> str:
    x, width = _LEFT + bar.start * scale, (bar.end - bar.start) * scale
    mark = f'<rect x="{x:.3f}" y="{_y(bar.stream) + _HIGH - 4}" width="{width:.3f}" height="4" fill="{_CRITICAL}"/>'
    hover = f"{bar.name}: {_us(bar.end - bar.start)} on the {bar.engine}, from {_us(bar.start)} to {_us(bar.end)}"
    return (
        f'<g class="{"task critical" if bar.is_critical else "task"}" data-task="{escape(bar.name, quote=True)}">'
        f"<title>{escape(hover)}, predicted</title>"
        f'<rect x="{x:.3f}" y="{_y(bar.stream)}" width="{width:.3f}" height="{_HIGH}" fill="{COLOURS[bar.engine]}" '
        f'stroke="#fff8" stroke-width=".4"/>{mark if bar.is_critical else ""}</g>'
    )


def _events(timeline: Timeline, scale: float) -> Iterable[str]:
    bars = timeline.by_name()
    for first, second in timeline.events:
        one, other = bars[first], bars[second]
        yield (
            f'<line class="event" x1="{_LEFT + one.end * scale:.3f}" y1="{_y(one.stream) + _HIGH // 2}" '
            f'x2="{_LEFT + other.start * scale:.3f}" y2="{_y(other.stream) + _HIGH // 2}" stroke="currentColor" '
            f'stroke-width=".6"><title>{escape(second)} waits for {escape(first)}</title></line>'
        )


def _regions(timeline: Timeline, scale: float) -> Iterable[str]:
    bars = timeline.by_name()
    for region in timeline.super_kernels:
        for stream in sorted({bars[name].stream for name in region.tasks}):
            inside = [bars[name] for name in region.tasks if bars[name].stream == stream]
            start, end = min(bar.start for bar in inside), max(bar.end for bar in inside)
            yield (
                f'<rect class="super-kernel" x="{_LEFT + start * scale:.3f}" y="{_y(stream) - 2}" '
                f'width="{(end - start) * scale:.3f}" height="{_HIGH + 4}" fill="none" stroke="#e67700" '
                f'stroke-width="1.2"><title>{escape(region.name)}: {len(region.tasks)} tasks, one launch</title></rect>'
            )


def _y(stream: int) -> int:
    return _TOP + stream * (_HIGH + _GAP)


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.2f} us"
