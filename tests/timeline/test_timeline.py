"""Timelines of drawn graphs, read back from the drawing and from the trace: every task once, where its times say."""

import dataclasses
import itertools
import json
import math
import re
from xml.etree import ElementTree

import pytest
from drawn_tasks import graphs
from hypothesis import HealthCheck, given, settings

from k31compile.passes.schedule.cost_model import load_costs
from k31compile.passes.schedule.schedule import SuperKernel
from k31compile.passes.schedule.schedule_tasks import schedule_tasks
from k31compile.passes.schedule.tasks import Task, TaskGraph
from k31compile.timeline.lanes import after, before, critical_tasks
from k31compile.timeline.page import Planned, page, trace_text
from k31compile.timeline.svg import COLOURS, draw

EVENT = 1.5e-6
quick = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def planned(graph):
    return Planned("drawn", graph, schedule_tasks(graph, EVENT, search=2000), load_costs("ascend-a3"))


def bars_of(svg):
    """Task -> (x, y, width, colour) of each bar of a drawing, with the scale left in."""
    found = {}
    for group in ElementTree.fromstring(svg).iter("g"):
        rect = group.find("rect")
        name = group.get("data-task")
        assert name not in found, "each task once"
        found[name] = (float(rect.get("x")), float(rect.get("y")), float(rect.get("width")), rect.get("fill"))
    return found


@quick
@given(graphs)
def test_bars_stand_where_the_times_say(graph):
    one = planned(graph)
    for lane in (before(graph), after(graph, one.schedule)):
        drawn = bars_of(draw(lane, lane.end))
        assert set(drawn) == {task.name for task in graph.tasks}
        scale = 1200 / lane.end if lane.end else 0.0
        rows = sorted({y for _, y, _, _ in drawn.values()})
        for task in graph.tasks:
            bar = lane.by_name()[task.name]
            x, y, width, colour = drawn[task.name]
            assert x == pytest.approx(64 + bar.start * scale, abs=1e-3)
            assert width == pytest.approx((bar.end - bar.start) * scale, abs=1e-3)
            assert rows.index(y) == bar.stream
            assert colour == COLOURS[task.engine]
    times = {bar.name: (bar.start, bar.end) for bar in after(graph, one.schedule).bars}
    assert times == dict(one.schedule.times)
    assert before(graph).end == pytest.approx(one.schedule.serial)


@quick
@given(graphs)
@pytest.mark.slow
def test_the_marked_tasks_are_a_chain_as_long_as_the_critical_path(graph):
    chain = critical_tasks(graph)
    edges = set(graph.edges())
    assert all(pair in edges for pair in itertools.pairwise(chain))
    seconds = {task.name: task.seconds for task in graph.tasks}
    schedule = planned(graph).schedule
    assert math.fsum(seconds[name] for name in chain) == pytest.approx(schedule.critical_path, abs=1e-15)
    marked = ElementTree.fromstring(draw(after(graph, schedule), schedule.predicted)).findall(
        "g[@class='task critical']"
    )
    assert {group.get("data-task") for group in marked} == set(chain)


@quick
@given(graphs)
def test_a_trace_holds_every_task_and_event(graph):
    one = planned(graph)
    document = json.loads(trace_text([one]))
    assert "nothing was measured" in document["otherData"]["times"]
    events = document["traceEvents"]
    for event in events:
        check_trace_event(event)
    spans = {
        process: [event for event in events if event["ph"] == "X" and event["pid"] == process] for process in (1, 2)
    }
    for process in (1, 2):
        assert sorted(span["name"] for span in spans[process]) == sorted(task.name for task in graph.tasks)
    for span in spans[2]:
        start, end = one.schedule.times[span["name"]]
        assert (span["ts"], span["dur"]) == (start * 1e6, (end - start) * 1e6)
        assert span["tid"] == one.schedule.stream_of[span["name"]]
    flows = {kind: {event["id"]: event for event in events if event["ph"] == kind} for kind in "sf"}
    assert flows["s"].keys() == flows["f"].keys()
    assert len(flows["s"]) == len(one.schedule.events)
    assert all(flows["s"][number]["tid"] != flows["f"][number]["tid"] for number in flows["s"])


def check_trace_event(event):
    """What the trace event format asks of the four kinds that are written."""
    assert event["ph"] in "MXsf"
    assert isinstance(event["pid"], int)
    assert isinstance(event["tid"], int)
    assert isinstance(event["name"], str)
    if event["ph"] == "M":
        assert event["name"] in ("process_name", "thread_name")
        assert event["args"]["name"]
        return
    assert event["ts"] >= 0
    if event["ph"] == "X":
        assert event["dur"] >= 0
        assert event["args"]["predicted_us"] == event["dur"]
    else:
        assert isinstance(event["id"], int)
        assert event["ph"] == "s" or event["bp"] == "e"


def side_by_side():
    """Two chains that meet: streams pay."""
    left = [Task(f"a{i}", 9e-6, "vector", inputs=(f"a{i - 1}",) if i else ()) for i in range(4)]
    right = [Task(f"b<{i}>", 8e-6, "memory", inputs=(f"b<{i - 1}>",) if i else ()) for i in range(4)]
    return TaskGraph([*left, *right, Task("end", 1e-6, "cube", inputs=("a3", "b<3>"))])


def test_events_and_regions_are_drawn_and_the_page_says_what_the_times_are():
    one = planned(side_by_side())
    assert len(one.schedule.streams) == 2
    assert one.schedule.events
    region = SuperKernel("sk0", one.schedule.streams[0][:2])
    one = dataclasses.replace(one, schedule=dataclasses.replace(one.schedule, super_kernels=(region,)))
    text = page(one)
    svgs = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text)]
    assert [len(svg.findall("line[@class='event']")) for svg in svgs] == [0, len(one.schedule.events)]
    assert [len(svg.findall("rect[@class='super-kernel']")) for svg in svgs] == [0, 1]
    titles = [group.find("title").text for group in svgs[1].findall("g")]
    assert any(
        title.startswith("b<2>: 8.00 us on the memory, from ") and title.endswith("predicted") for title in titles
    )
    assert "All times are predictions of a cost model" in text
    assert "assumed: no published figure is known to us" in text, "the source of a figure"
    numbers = one.schedule.counts()
    assert one.graph.bound == pytest.approx(numbers["predicted"])
    assert numbers["predicted"] < 0.6 * numbers["serial"]
    assert f"<td>as scheduled, likewise</td><td>{numbers['predicted'] * 1e6:.1f} us</td>" in text
    spans = [event for event in json.loads(trace_text([one]))["traceEvents"] if event["ph"] == "X"]
    assert sum(span["args"].get("super_kernel") == "sk0" for span in spans) == 2
