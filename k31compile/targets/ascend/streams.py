"""A schedule written into a graph for GE: nodes in the order of issue, and a stream's name around each of its runs."""

from __future__ import annotations

import torch
from torch import fx

from k31compile.graph.sizes import is_tensor
from k31compile.passes.schedule.graph_tasks import is_part_of_its_source
from k31compile.passes.schedule.schedule import Schedule
from k31compile.targets.ascend.offline.convert import STREAM

_KEYS = [STREAM, "_user_stream_priority"]


def stream_name(stream: int) -> str:
    """The label of a stream in GE; the caller's own, 0, has none."""
    return f"k31_stream_{stream}"


def write_streams(module: fx.GraphModule, schedule: Schedule) -> None:
    """Reorder the graph as the schedule issues it, with scopes around what runs beside the caller's stream.

    GE itself waits where a value crosses streams; what else the schedule orders becomes a record and a wait. Needs an
    open torchair, whose operators the scopes are.
    """
    graph = module.graph
    nodes = {node.name: node for node in graph.nodes}
    output = graph.output_node()
    stream_of: dict[fx.Node, int] = {}
    for name in schedule.issue_order():
        if name in nodes:
            _issue(nodes[name], schedule.stream_of[name], stream_of, output)
    _issue_views(output, 0, stream_of, output)
    held_back = _held_back(nodes, schedule)
    running = 0
    for node, stream in stream_of.items():
        if stream != running:
            _switch(graph, node, running, stream)
            running = stream
        if node in held_back:
            with graph.inserting_before(node):
                graph.call_function(torch.ops.air.wait.default, (held_back[node],))
    if running:
        with graph.inserting_before(output):
            graph.call_function(torch.ops.air.scope_exit.default, ())
    graph.lint()
    module.recompile()


def _issue(node: fx.Node, stream: int, stream_of: dict[fx.Node, int], output: fx.Node) -> None:
    _issue_views(node, stream, stream_of, output)
    stream_of[node] = stream
    output.prepend(node)
    for user in list(node.users):
        # What a wait can name of a result of several is one of its parts.
        if not is_tensor(node) and is_part_of_its_source(user):
            _issue(user, stream, stream_of, output)


def _issue_views(node: fx.Node, stream: int, stream_of: dict[fx.Node, int], output: fx.Node) -> None:
    """Views are no tasks: each goes in front of its first reader, so that it is taken after what was written before."""
    for source in node.all_input_nodes:
        if source.op == "call_function" and source not in stream_of:
            _issue(source, stream, stream_of, output)


def _switch(graph: fx.Graph, before: fx.Node, running: int, stream: int) -> None:
    with graph.inserting_before(before):
        if running:
            graph.call_function(torch.ops.air.scope_exit.default, ())
        if stream:
            values = [stream_name(stream), "0"]
            graph.call_function(torch.ops.air.scope_enter.default, (_KEYS, values))


def _held_back(nodes: dict[str, fx.Node], schedule: Schedule) -> dict[fx.Node, list[fx.Node]]:
    """Tasks that wait for another whose value they do not take: the cube left to somebody else, a cache's reader."""
    found: dict[fx.Node, list[fx.Node]] = {}
    for after, before in schedule.events:
        if after in nodes and before in nodes and nodes[after] not in _read_by(nodes[before]):
            ended = _tensor_of(nodes[after])
            if ended is not None:
                found.setdefault(nodes[before], []).append(ended)
    return found


def _read_by(node: fx.Node) -> set[fx.Node]:
    """What a node reads, and what its views are taken of."""
    found: set[fx.Node] = set()
    for source in node.all_input_nodes:
        found.add(source)
        if is_part_of_its_source(source):
            found |= _read_by(source)
    return found


def _tensor_of(node: fx.Node) -> fx.Node | None:
    """The node, or the first part of a result of several: what a wait can name."""
    if is_tensor(node):
        return node
    return next((user for user in node.users if is_tensor(user)), None)
