"""A schedule written into a graph for GE: nodes in the order of issue, in scopes of super kernels and of streams."""

from __future__ import annotations

import itertools

import torch
from torch import fx

from k31compile.passes.schedule.schedule import Schedule, SuperKernel
from k31compile.targets.ascend.issue import issue_in_order, read_by, tensors_of
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
    region_of = {name: region for region in schedule.super_kernels for name in region.tasks}
    stream_of = schedule.stream_of
    issued = issue_in_order(module, schedule.issue_order())
    held_back = _held_back(nodes, schedule)
    inside: tuple[Scope, ...] = ()
    for one in issued:
        task = one.task
        wanted = () if task is None else _scopes(region_of.get(task.name), stream_of[task.name])
        _change(graph, one.nodes[0], inside, wanted)
        inside = wanted
        if task is not None and held_back.get(task):
            with graph.inserting_before(task):
                graph.call_function(torch.ops.air.wait.default, (held_back[task],))
    _change(graph, graph.output_node(), inside, ())
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
        if after in nodes and before in nodes and nodes[after] not in read_by(nodes[before]):
            # What a wait can name of a result of several is one of its parts.
            found.setdefault(nodes[before], []).extend(tensors_of(nodes[after])[:1])
    return found
