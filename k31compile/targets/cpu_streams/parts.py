"""Some nodes of a graph as a function of their own: what it reads from outside, and what others read from it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from k31compile.errors import ScheduleError


@dataclass(frozen=True)
class Part:
    """A piece of a graph.

    Attributes:
        module: the piece as a graph of its own; it returns a tuple.
        inputs: the nodes of the whole graph whose values it takes.
        outputs: those whose values it returns.
        written: which of its inputs it changes in place.
        run: what is called; a compiled form may stand here in the place of the module.
    """

    module: fx.GraphModule
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    written: tuple[int, ...]
    run: Callable[..., Any]


def cut_part(nodes: Iterable[fx.Node], tasks: Collection[fx.Node], read_outside: Callable[[fx.Node], bool]) -> Part:
    """The nodes as a part, in their order.

    Nodes that are no tasks, views and parts of results, are taken along where one of the nodes reads them, so that a
    part is given what views are taken of, and no two inputs are the same memory by a view. What a node writes in place
    is handed back under its name, and is read under the name of what was written.

    Args:
        nodes: tasks of one graph.
        tasks: all tasks of it.
        read_outside: whether a node's value is needed by others.
    """
    wanted = list(nodes)
    cut = _Cut(tasks)
    for node in wanted:
        cut.take(node)
    outputs = tuple(node for node in wanted if owner_of(node, tasks) is node and read_outside(node))
    cut.graph.output(tuple(cut.copies[node] for node in outputs))
    module = fx.GraphModule({}, cut.graph)
    places = {node: place for place, node in enumerate(cut.inputs)}
    owners = (owner_of(source, tasks) for node in wanted for source in written_by(node))
    written = tuple(sorted({places[owner] for owner in owners if owner in places}))
    return Part(module, tuple(cut.inputs), outputs, written, module.forward)


def cut_returned(output: fx.Node, tasks: Collection[fx.Node]) -> Part:
    """What the graph returns, with the views in it, as a function of the tasks' results and of the inputs."""
    cut = _Cut(tasks)
    for source in output.all_input_nodes:
        cut.bring(source)
    cut.graph.output(fx.map_arg(output.args[0], cut.copy_of))
    module = fx.GraphModule({}, cut.graph)
    return Part(module, tuple(cut.inputs), (), (), module.forward)


class _Cut:
    """A graph that grows by nodes of another and by what they need."""

    def __init__(self, tasks: Collection[fx.Node]) -> None:
        self.graph = fx.Graph()
        self.copies: dict[fx.Node, fx.Node] = {}
        self.inputs: list[fx.Node] = []
        self._tasks = tasks
        self._last: fx.Node | None = None

    def take(self, node: fx.Node) -> None:
        for source in node.all_input_nodes:
            self.bring(source)
        self.copies[node] = self.graph.node_copy(node, self.copy_of)

    def copy_of(self, source: fx.Node) -> fx.Node:
        return self.copies[_read_as(source)]

    def bring(self, source: fx.Node) -> None:
        source = _read_as(source)
        if source in self.copies:
            return
        if source.op == "call_function" and source not in self._tasks:
            self.take(source)
            return
        with self.graph.inserting_after(self._last) if self._last else self._at_the_front():
            made = self.graph.placeholder(source.name)
        made.meta = dict(source.meta)
        self._last = self.copies[source] = made
        self.inputs.append(source)

    def _at_the_front(self) -> AbstractContextManager[Any]:
        first = next(iter(self.graph.nodes), None)
        return self.graph.inserting_before(first) if first else nullcontext()


def _read_as(node: fx.Node) -> fx.Node:
    """The node to read in the place of what an operator hands back of what it wrote in place."""
    while (written := handed_back(node)) is not None:
        node = written
    return node


def owner_of(node: fx.Node, tasks: Collection[fx.Node]) -> fx.Node:
    """The input, constant or task whose memory a node's value lies in."""
    while True:
        written = handed_back(node)
        if written is not None:
            node = written
        elif node.op == "call_function" and node not in tasks and node.all_input_nodes:
            node = node.all_input_nodes[0]
        else:
            return node


def handed_back(node: fx.Node) -> fx.Node | None:
    """The argument that an operator writes in place and returns as its one result."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return None
    returned = node.target._schema.returns
    if len(returned) != 1 or returned[0].alias_info is None or not returned[0].alias_info.is_write:
        return None
    return next(iter(written_by(node)), None)


def written_by(node: fx.Node) -> list[fx.Node]:
    """The arguments that a node writes in place."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return []
    found: list[fx.Node] = []
    for place, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
            found += [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, fx.Node)]
    return found


def refuse_hidden_views(graph: fx.Graph) -> None:
    """Raise where an operator may return a view or a copy, as it happens: who reads what would be unknown.

    Raises:
        ScheduleError: with the first such node.
    """
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    for node in graph.nodes:
        target = node.target
        if not isinstance(target, torch._ops.OpOverload) or not torch._C._dispatch_has_kernel_for_dispatch_key(
            target.name(), key
        ):
            continue
        if any(one.alias_info is not None and not one.alias_info.is_write for one in target._schema.returns):
            raise ScheduleError(f"{node.name!r} may be a view or a copy", where=str(target), hint="prepare_graph first")
