"""Timelines as trace events, the JSON that ui.perfetto.dev and chrome://tracing open.

A process is a timeline, a thread is a stream, an event between streams is a flow. Times are microseconds, predicted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from k31compile.timeline.lanes import Bar, Timeline


def trace(timelines: Sequence[Timeline], told: str) -> dict[str, Any]:
    """The document over some timelines; `told` says what the times are and stands among its data."""
    events = [event for process, timeline in enumerate(timelines, start=1) for event in _events(process, timeline)]
    return {"displayTimeUnit": "ns", "traceEvents": events, "otherData": {"times": told}}


def _events(process: int, timeline: Timeline) -> Iterator[dict[str, Any]]:
    yield _named("process_name", process, 0, timeline.title)
    for stream in range(timeline.streams):
        yield _named("thread_name", process, stream, "main" if stream == 0 else f"stream {stream}")
    region_of = {name: region.name for region in timeline.super_kernels for name in region.tasks}
    for bar in timeline.bars:
        yield _task(process, bar, region_of.get(bar.name))
    bars = timeline.by_name()
    for number, (first, second) in enumerate(timeline.events, start=process * 1_000_000):
        flow = {"name": "event", "cat": "event", "id": number, "pid": process}
        one, other = bars[first], bars[second]
        yield {**flow, "ph": "s", "tid": one.stream, "ts": one.end * 1e6}
        yield {**flow, "ph": "f", "bp": "e", "tid": other.stream, "ts": other.start * 1e6}


def _named(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


def _task(process: int, bar: Bar, region: str | None) -> dict[str, Any]:
    told = {"predicted_us": (bar.end - bar.start) * 1e6, "engine": bar.engine, "critical_path": bar.is_critical}
    return {
        "ph": "X", "name": bar.name, "cat": bar.engine, "pid": process, "tid": bar.stream, "ts": bar.start * 1e6,
        "dur": (bar.end - bar.start) * 1e6, "args": told if region is None else {**told, "super_kernel": region},
    }  # fmt: skip
