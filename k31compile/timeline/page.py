"""A schedule as a part of an HTML page, and as a page of its own."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from html import escape

from k31compile.passes.schedule.cost_model import CostModel
from k31compile.passes.schedule.schedule import Schedule
from k31compile.passes.schedule.tasks import TaskGraph
from k31compile.timeline.lanes import after, before
from k31compile.timeline.perfetto import trace
from k31compile.timeline.svg import draw, legend, sources


@dataclass(frozen=True)
class Planned:
    """What an entry's timeline is drawn from: its tasks, where they run, and the figures behind the times."""

    name: str
    graph: TaskGraph
    schedule: Schedule
    costs: CostModel

    def told(self) -> str:
        """One sentence on what the times are."""
        return f"predictions of a cost model for {self.costs.target} ({self.costs.device}); nothing was measured"

    def summary(self) -> str:
        """What is predicted, in one line."""
        counts = self.schedule.counts()
        return (
            f"schedule: {_us(counts['predicted'])} in {counts['streams']} streams with {counts['events']} events, "
            f"{_us(counts['serial'])} on one, at least {_us(self.graph.bound)}; {self.told()}"
        )


def section(planned: Planned) -> str:
    """Numbers, both drawings to one scale, and what the times are, as HTML."""
    graph, schedule = planned.graph, planned.schedule
    lanes = (before(graph), after(graph, schedule))
    longest = max(lane.end for lane in lanes)
    drawn = "".join(f"<p>{escape(lane.title)}</p>{draw(lane, longest)}" for lane in lanes)
    head = f"<h3>Schedule for {escape(planned.costs.target)}</h3>{_table(planned)}"
    return f"{head}{legend()}{drawn}{sources(planned.costs)}"


def page(planned: Planned) -> str:
    """A page that holds one schedule and needs nothing else."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(planned.name)}</title>'
        "<style>:root{color-scheme:light dark} body{font:15px/1.5 system-ui,sans-serif;margin:2rem}"
        f"td,th{{text-align:left;padding:.2rem .8rem}}</style></head><body><h1>{escape(planned.name)}</h1>"
        f"{section(planned)}</body></html>\n"
    )


def trace_text(planned: list[Planned]) -> str:
    """Trace events over all schedules, before and after each, as JSON text."""
    lanes = [
        replace(lane, title=f"{one.name} {lane.title}")
        for one in planned
        for lane in (before(one.graph), after(one.graph, one.schedule))
    ]
    told = "; ".join(dict.fromkeys(one.told() for one in planned))
    return json.dumps(trace(lanes, told)) + "\n"


def _table(planned: Planned) -> str:
    numbers = planned.schedule.counts()
    rows = (
        ("on one stream, one launch a task", _us(numbers["serial"])),
        ("as scheduled, likewise", _us(numbers["predicted"])),
        ("no schedule of single launches is shorter than", _us(planned.graph.bound)),
        ("critical path", _us(numbers["critical_path"])),
        ("streams", numbers["streams"]),
        ("events", numbers["events"]),
        ("super kernels", numbers["super_kernels"]),
    )
    body = "".join(f"<tr><td>{name}</td><td>{value}</td></tr>" for name, value in rows)
    return f'<table class="schedule"><tr><th>predicted</th><th></th></tr>{body}</table>'


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us"
