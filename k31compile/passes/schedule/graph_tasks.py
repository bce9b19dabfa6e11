"""A graph as tasks of a schedule: what each node costs by a target's figures, and what memory it touches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import fx
from torch.utils import _pytree as pytree

from k31compile.graph.dataflow import ATEN
from k31compile.graph.sizes import value_of
from k31compile.graph.views import CASTS, COPIES, is_view, may_alias
from k31compile.passes.schedule.cost_model import CostModel
from k31compile.passes.schedule.tasks import Task, enclose
from k31compile.passes.schedule.work import work_of

RANDOM_NUMBERS = "random numbers"
"""The generator as memory, by a name that no node has: who draws from it changes what the next one draws."""

_CASTS = {*CASTS, ATEN.to.device, ATEN.to.dtype_layout}


def tasks_of(
    module: fx.GraphModule, costs: CostModel, is_marker: Callable[[fx.Node], bool] = lambda _: False
) -> list[Task]:
    """Every call of the graph that launches something, under its node's name, between an entry and a return.

    `is_marker` says which calls only tell a target what to do with others; they are no tasks.

    A view launches nothing: who reads it reads the value, or the input, that it is a view of. Memory has the name of
    the input that it belongs to, or of the value whose result it is.
    """
    owners: dict[fx.Node, str] = {}
    made: dict[str, None] = {}
    tasks: list[Task] = []
    for node in module.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            owners[node] = node.name
        elif node.op != "call_function" or is_marker(node):
            continue
        elif is_part_of_its_source(node):
            owners[node] = owners[node.all_input_nodes[0]]
        else:
            tasks.append(_task(node, owners, made, costs))
            # What is written in place is handed back under another name and is the same memory.
            first = next(written_by(node), None)
            owners[node] = node.name if first is None else owners[first]
            made[node.name] = None
    return enclose(tasks)


def is_part_of_its_source(node: fx.Node) -> bool:
    """Whether a node launches nothing: a view, a cast to what a value is already, or a part of a result of several."""
    if node.target in COPIES or not node.all_input_nodes:
        return False
    if node.target in _CASTS:
        # `to` hands back what has the dtype already, `_to_copy` copies it.
        source = node.all_input_nodes[0]
        return node.target is not ATEN._to_copy.default and bool(value_of(node).dtype == value_of(source).dtype)
    return is_view(node) or may_alias(node)


def written_by(node: fx.Node) -> Iterator[fx.Node]:
    """The arguments that a node writes in place."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return
    for i, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
            yield from (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, fx.Node))


def draws(node: fx.Node) -> bool:
    """Whether an operator takes random numbers, so that its place among others that do decides what it computes."""
    if not isinstance(node.target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    for i, argument in enumerate(node.target._schema.arguments):
        if argument.name == "dropout_p":
            given = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name, argument.default_value)
            return bool(given)
    return True


def _task(node: fx.Node, owners: dict[fx.Node, str], made: Iterable[str], costs: CostModel) -> Task:
    work = work_of(node)
    touched = dict.fromkeys(owners[source] for source in node.all_input_nodes)
    drawn = (RANDOM_NUMBERS,) if draws(node) else ()
    return Task(
        node.name,
        costs.seconds_of(work.flops, work.bytes_moved, work.engine),
        work.engine,
        reads=tuple(name for name in touched if name not in made),
        writes=tuple(dict.fromkeys((*(owners[source] for source in written_by(node)), *drawn))),
        inputs=tuple(name for name in touched if name in made),
    )
