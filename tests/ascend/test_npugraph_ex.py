"""A decode step through npugraph_ex's own compiler: streams, events, keeps, what is noticed, and its numbers."""

import ast
import copy
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "examples")]

from ascend_decode import decode  # noqa: E402
from emulated import Emulated  # noqa: E402

from k31compile.errors import OptionError, ScheduleError  # noqa: E402
from k31compile.offline import compile_offline  # noqa: E402
from k31compile.passes.schedule.cost_model import load_costs  # noqa: E402
from k31compile.passes.schedule.graph_tasks import tasks_of  # noqa: E402
from k31compile.passes.schedule.tasks import TaskGraph  # noqa: E402
from k31compile.targets.ascend.offline.capture import KEEP, RECORD, WAIT  # noqa: E402
from k31compile.targets.ascend.verify_lowered import tasks_after, verify_calls  # noqa: E402

TARGETS = ["ascend-a3", "ascend-950"]


@pytest.fixture(scope="module", params=TARGETS)
def compiled(request):
    """The example's decode step, compiled once for each product."""
    return compile_offline(decode(), request.param, mode="npugraph_ex")


def inner(schedule):
    """The events between tasks that have nodes: entry and return are npugraph_ex's own."""
    return [event for event in schedule.events if not {"enter", "return"} & {*event}]


def test_every_task_is_issued_on_its_stream_in_the_order_of_the_schedule(compiled):
    stream_of = compiled.schedule.stream_of
    labels = {stream: f"k31_stream_{stream}" if stream else "" for stream in range(len(compiled.schedule.streams))}
    issued = [call for call in compiled.acl.operators() if call.name in stream_of]
    assert len(labels) >= 2
    for stream, names in enumerate(compiled.schedule.streams):
        found = [call.name for call in issued if call.stream == labels[stream]]
        assert found == [name for name in names if name not in ("enter", "return")]


def test_every_event_of_the_schedule_is_recorded_behind_one_task_and_waited_for_in_front_of_the_other(compiled):
    calls = compiled.acl.calls()
    tasks = compiled.schedule.stream_of
    last, waiting, recorded, found = {}, {}, {}, set()
    for call in calls:
        if call.operator == RECORD:
            recorded[call.arguments[0]] = last.get(call.stream)
        elif call.operator == WAIT:
            waiting.setdefault(call.stream, []).append(recorded[call.arguments[0]])
        elif call.name in tasks:
            found.update((after, call.name) for after in waiting.pop(call.stream, ()))
            last[call.stream] = call.name
    assert found >= {*inner(compiled.schedule)}
    assert len(inner(compiled.schedule)) > 20
    # Each stream starts behind npugraph_ex's event at the start, and the end waits for each stream.
    assert len(waiting[""]) == len(compiled.schedule.streams) - 1


def test_what_crosses_streams_is_recorded_for_the_other_one(compiled):
    kept = {name for name, _ in compiled.acl.kept()}
    labels = {label for _, label in compiled.acl.kept()}
    nodes = {node.name: node for node in compiled.acl.module.graph.nodes}
    for result, _ in compiled.schedule.keeps:
        if result != "enter":
            assert {result, *(user.name for user in nodes[result].users)} & kept
    assert "ascend_decode.main" in labels  # both directions (row E3)
    assert "k31_stream_1" in labels


def test_caches_are_written_in_place_and_nothing_else_is(compiled):
    calls = [node for node in compiled.acl.module.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    written = {str(node.target) for node in calls if node.target._schema.is_mutable}
    assert written == {"npu.npu_scatter_nd_update_.default"}
    assert compiled.acl.counts()["npu.npu_scatter_nd_update_.default"] == 12


def test_every_event_and_every_keep_that_is_dropped_is_noticed(compiled):
    graph, schedule = compiled.acl, compiled.schedule
    costs = load_costs(compiled.profile.name)
    after = tasks_after(graph, costs)
    program = TaskGraph(tasks_of(compiled.lowered.module, costs, lambda node: "npugraph_ex" in str(node.target)))
    calls = graph.calls()
    verify_calls(calls, graph, schedule, program, after)
    own = {f"ascend_decode.{name}" for name, _ in inner(schedule)}
    ends = {call.arguments[0] for call in calls if call.operator == WAIT and call.stream == ""} - own
    needed = {schedule.streams[stream][-1] for stream in range(1, len(schedule.streams))} & {
        one for one, other in schedule.events if other == "return"
    }
    noticed = 0
    for at, call in enumerate(calls):
        is_event = call.operator in (RECORD, WAIT) and call.arguments[0] in own
        if is_event or call.operator == KEEP:
            with pytest.raises(ScheduleError):
                verify_calls([*calls[:at], *calls[at + 1 :]], graph, schedule, program, after)
            noticed += 1
    assert noticed == len({*own}) + sum(c.operator == WAIT and c.arguments[0] in own for c in calls) + len(graph.kept())
    unnoticed = [tag for tag in ends if _is_legal(
        [call for call in calls if call.operator != WAIT or call.arguments[0] != tag], graph, schedule, program, after
    )]  # fmt: skip
    assert len(ends) - len(unnoticed) == len(needed)  # the others are waited for by somebody on the way


def _is_legal(calls, graph, schedule, program, after):
    try:
        verify_calls(calls, graph, schedule, program, after)
    except ScheduleError:
        return False
    return True


def test_a_task_on_another_stream_and_a_swapped_pair_are_noticed(compiled):
    graph, schedule = compiled.acl, compiled.schedule
    costs = load_costs(compiled.profile.name)
    after = tasks_after(graph, costs)
    calls = graph.calls()
    at = next(i for i, call in enumerate(calls) if call.stream and call.name in after.places)
    moved = [*calls[:at], replace(calls[at], stream=""), *calls[at + 1 :]]
    with pytest.raises(ScheduleError):
        verify_calls(moved, graph, schedule, after, after)
    waits = next(i for i, call in enumerate(calls) if call.operator == WAIT and call.arguments[0].startswith("ascend_"))
    early = [calls[waits], *calls[:waits], *calls[waits + 1 :]]
    with pytest.raises(ScheduleError, match="which is not recorded"):
        verify_calls(early, graph, schedule, after, after)


def test_the_files_are_what_was_made(compiled, tmp_path):
    paths = {path.name: path for path in compiled.write(tmp_path / "out")}
    assert sorted(paths) == ["fx.txt", "graph.py", "report.json", "schedule.json", "timeline.html", "trace.json"]
    code = paths["graph.py"].read_text()
    names = {node.name for node in ast.walk(ast.parse(code)) if isinstance(node, ast.FunctionDef)}
    assert {"forward", "kernel"} <= names
    report = json.loads(paths["report.json"].read_text())
    assert report["mode"] == "npugraph_ex"
    assert report["record_streams"] == len(compiled.acl.kept()) > 0
    assert report["events"] == len(compiled.acl.events()) > len({after for after, _ in inner(compiled.schedule)})
    assert "nothing was captured or run on an NPU" in report["verified"]
    assert report["schedule"]["super_kernels"]["why_none"].startswith("npugraph_ex merges launches")


@pytest.mark.parametrize("target", TARGETS)
def test_the_graph_that_is_captured_computes_what_eager_does(target):
    entry = decode()
    eager = copy.deepcopy(entry)
    compiled = compile_offline(entry, target, mode="npugraph_ex")
    with torch.no_grad():
        expected = eager.call()
        (got,) = Emulated(compiled.acl.module, has_views=True).run(*compiled.inputs)
    torch.testing.assert_close(got, expected, rtol=3e-2, atol=3e-2)
    for ours, theirs in zip(entry.args[1].layers, eager.args[1].layers, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            if other is not None:
                torch.testing.assert_close(one, other, rtol=3e-2, atol=3e-2)


def test_what_is_no_mode_is_told():
    with pytest.raises(OptionError, match="there is no mode 'aclgraph'"):
        compile_offline(decode(), "ascend-a3", mode="aclgraph")
