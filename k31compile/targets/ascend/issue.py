"""A lowered graph in the order in which its schedule issues it: what every way of writing streams starts from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import fx

from k31compile.graph.sizes import is_tensor
from k31compile.passes.schedule.graph_tasks import is_part_of_its_source


@dataclass(frozen=True)
class Issued:
    """One task with the nodes that stand with it.

    Attributes:
        task: its node; None for the views that nobody but the output reads.
        nodes: the views that it is the first to read, itself, and the parts of its result.
    """

    task: fx.Node | None
    nodes: tuple[fx.Node, ...]


def issue_in_order(module: fx.GraphModule, tasks: Iterable[str]) -> list[Issued]:
    """Move the nodes into an order of the tasks, such as that of issue, and return them by task.

    A view that is no task goes in front of its first reader, so that it is taken after what was written before.
    """
    nodes = {node.name: node for node in module.graph.nodes}
    output = module.graph.output_node()
    placed: set[fx.Node] = set()
    found: list[Issued] = []
    for name in tasks:
        if name in nodes:
            group: list[fx.Node] = []
            _issue(nodes[name], placed, group)
            found.append(Issued(nodes[name], tuple(group)))
    left: list[fx.Node] = []
    _issue_views(output, placed, left)
    if left:
        found.append(Issued(None, tuple(left)))
    for issued in found:
        for node in issued.nodes:
            output.prepend(node)
    return found


def read_by(node: fx.Node) -> set[fx.Node]:
    """What a node reads, and what its views are taken of."""
    found: set[fx.Node] = set()
    for source in node.all_input_nodes:
        found.add(source)
        if is_part_of_its_source(source):
            found |= read_by(source)
    return found


def tensors_of(node: fx.Node) -> list[fx.Node]:
    """The node, or the parts of a result of several: what a wait or a record can name."""
    return [node] if is_tensor(node) else [user for user in node.users if is_tensor(user)]


def _issue(node: fx.Node, placed: set[fx.Node], group: list[fx.Node]) -> None:
    _issue_views(node, placed, group)
    placed.add(node)
    group.append(node)
    for user in list(node.users):
        if not is_tensor(node) and is_part_of_its_source(user):
            _issue(user, placed, group)


def _issue_views(node: fx.Node, placed: set[fx.Node], group: list[fx.Node]) -> None:
    for source in node.all_input_nodes:
        if source.op == "call_function" and source not in placed:
            _issue(source, placed, group)
