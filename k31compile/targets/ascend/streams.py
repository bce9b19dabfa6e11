"""A schedule written into a graph for GE: nodes in the order of issue, in scopes of super kernels and of streams."""

from __future__ import annotations

import itertools

import torch
from torch import fx

from k31compile.graph.sizes import is_tensor
from k31compile.passes.schedule.graph_tasks import is_part_of_its_source
from k31compile.passes.schedule.schedule import Schedule, SuperKernel
from k31compile.targets.ascend.offline.convert import STREAM, SUPER_KERNEL, SUPER_KERNEL_OPTIONS

# The keys and values of one scope; a node's scopes are listed from the outermost one on.
Scope = tuple[tuple[str, ...], tuple[str, ...]]


def stream_name(stream: int) -> str:
    """The label of a stream in GE; the caller's own, 0, has none."""
    return f"k31_stream_{stream}"


def write_streams(module: fx.GraphModule, schedule: Schedule) -> None:
    """Reorder the graph as the schedule issues it, with scopes around what is merged or runs beside the caller.

    GE itself waits where a value crosses streams; what else the schedule orders becomes a record and a wait. A stream's
    scope lies inside that of a super kernel, so that a switch of streams does not end the region. Needs an open
    torchair, whose operators the scopes are.
    """
    graph = module.graph
    nodes = {node.name: node for node in graph.nodes}
    output = graph.output_node()
    region_of = {name: region for region in schedule.super_kernels for name in region.tasks}
    scopes: dict[fx.Node, tuple[Scope, ...]] = {}
    for name in schedule.issue_order():
        if name in nodes:
            _issue(nodes[name], _scopes(region_of.get(name), schedule.stream_of[name]), scopes, output)
    _issue_views(output, (), scopes, output)
    held_back = _held_back(nodes, schedule)
    inside: tuple[Scope, ...] = ()
    for node, wanted in scopes.items():
        _change(graph, node, inside, wanted)
        inside = wanted
        if node in held_back:
            with graph.inserting_before(node):
                graph.call_function(torch.ops.air.wait.default, (held_back[node],))
    _change(graph, output, inside, ())
    graph.lint()
    module.recompile()


def _scopes(region: SuperKernel | None, stream: int) -> tuple[Scope, ...]:
    found: list[Scope] = []
    if region is not None:
        options = ":".join(f"{name}={value}" for name, value in region.options)
        found.append(((SUPER_KERNEL, SUPER_KERNEL_OPTIONS), (region.name, options)))
    if stream:
        found.append(((STREAM, "_user_stream_priority"), (stream_name(stream), "0")))
    return tuple(found)


def _issue(node: fx.Node, wanted: tuple[Scope, ...], scopes: dict[fx.Node, tuple[Scope, ...]], output: fx.Node) -> None:
    _issue_views(node, wanted, scopes, output)
    scopes[node] = wanted
    output.prepend(node)
    for user in list(node.users):
        # What a wait can name of a result of several is one of its parts.
        if not is_tensor(node) and is_part_of_its_source(user):
            _issue(user, wanted, scopes, output)


def _issue_views(
    node: fx.Node, wanted: tuple[Scope, ...], scopes: dict[fx.Node, tuple[Scope, ...]], output: fx.Node
) -> None:
    """A view that is no task goes in front of its first reader, so that it is taken after what was written before."""
    for source in node.all_input_nodes:
        if source.op == "call_function" and source not in scopes:
            _issue(source, wanted, scopes, output)


def _change(graph: fx.Graph, before: fx.Node, inside: tuple[Scope, ...], wanted: tuple[Scope, ...]) -> None:
    """Leave the scopes that the next node is not in, from the innermost on, and enter those that it is in."""
    pairs = zip(inside, wanted, strict=False)
    shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    with graph.inserting_before(before):
        for _ in inside[shared:]:
            graph.call_function(torch.ops.air.scope_exit.default, ())
        for keys, values in wanted[shared:]:
            graph.call_function(torch.ops.air.scope_enter.default, ([*keys], [*values]))


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
