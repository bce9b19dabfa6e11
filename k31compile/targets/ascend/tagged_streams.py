"""A schedule written into a graph for npugraph_ex: scopes of streams, tagged events, and what is kept for whom."""

from __future__ import annotations

import torch
from torch import fx

from k31compile.passes.schedule.schedule import Schedule
from k31compile.targets.ascend.issue import Issued, issue_in_order, tensors_of
from k31compile.targets.ascend.streams import stream_name

# npugraph_ex reads a scope's first value as the stream's label, whatever the keys are.
_KEYS = ("_user_stream_label", "_user_stream_priority")


def main_label(graph_name: str) -> str:
    """What the caller's stream is called where a tensor is kept for it; the scopes of a graph never name it."""
    return f"{graph_name}.main"


def write_tagged_streams(module: fx.GraphModule, schedule: Schedule, graph_name: str) -> None:
    """Reorder the graph as the schedule issues it, each stream but the caller's in scopes of its label.

    Capture waits for nothing by itself: each event of the schedule is recorded behind the task that it is of and waited
    for in front of each task that needs it, and a result that another stream uses is recorded for that stream, or its
    memory could be given away while it is still read. The caller's entry and return have no nodes: npugraph_ex itself
    records an event at the start that each stream waits for, and one at the end of each stream. Tags begin with the
    graph's name, since they are known to the whole process. Needs an open npugraph_ex, whose operators these are.
    """
    operators = torch.ops.npugraph_ex
    graph = module.graph
    names = {node.name for node in graph.nodes}
    awaited: dict[str, list[str]] = {}
    for after, before in schedule.events:
        if after in names and before in names:
            awaited.setdefault(before, []).append(after)
    recorded = {after for events in awaited.values() for after in events}
    kept: dict[str, list[int]] = {}
    for result, stream in schedule.keeps:
        kept.setdefault(result, []).append(stream)
    stream_of = schedule.stream_of
    inside = 0
    for issued in issue_in_order(module, schedule.issue_order()):
        name = "" if issued.task is None else issued.task.name
        stream = stream_of.get(name, 0)
        with graph.inserting_before(issued.nodes[0]):
            _switch(graph, inside, stream)
            for after in awaited.get(name, ()):
                graph.call_function(operators.tagged_event_wait.default, (f"{graph_name}.{after}", True))
        inside = stream
        with graph.inserting_after(issued.nodes[-1]):
            marks = _keep(graph, issued, kept.get(name, []), graph_name)
            if name in recorded:
                _create_event(f"{graph_name}.{name}")
                record = graph.call_function(operators.tagged_event_record.default, (f"{graph_name}.{name}", True))
                marks.append(record)
        _behind(issued.nodes[-1], marks)
    with graph.inserting_before(graph.output_node()):
        _switch(graph, inside, 0)
    graph.lint()
    module.recompile()


def _switch(graph: fx.Graph, inside: int, stream: int) -> None:
    operators = torch.ops.npugraph_ex
    if inside and inside != stream:
        graph.call_function(operators.scope_exit.default, ())
    if stream and inside != stream:
        graph.call_function(operators.scope_enter.default, ([*_KEYS], [stream_name(stream), "0"]))


def _keep(graph: fx.Graph, issued: Issued, streams: list[int], graph_name: str) -> list[fx.Node]:
    """Every tensor of the result recorded for each other stream that uses it."""
    assert issued.task is not None or not streams
    record = torch.ops.npugraph_ex.record_tagged_stream.default
    labels = [stream_name(stream) if stream else main_label(graph_name) for stream in streams]
    tensors = tensors_of(issued.task) if issued.task is not None else []
    return [graph.call_function(record, (tensor, label)) for tensor in tensors for label in labels]


def _behind(node: fx.Node, marks: list[fx.Node]) -> None:
    for mark in marks:
        node.append(mark)
        node = mark


def _create_event(tag: str) -> None:
    """What a node records must be known by its tag before npugraph_ex sees the graph; generated code makes it anew."""
    from npugraph_ex._acl_concrete_graph.graph_pass import _create_event_by_name

    _create_event_by_name(tag)
