"""A lowered graph as tasks of a schedule: what each node costs by a target's figures, and what memory it touches."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from k31compile.graph.dataflow import ATEN
from k31compile.graph.sizes import nbytes_of, numel_of, shape_of
from k31compile.graph.views import is_view
from k31compile.passes.schedule.cost_model import CostModel
from k31compile.passes.schedule.tasks import Engine, Task, enclose

_PRODUCTS = {ATEN.mm.default, ATEN.bmm.default, ATEN.addmm.default}
_ON_THE_CUBE = ("npu_lightning_indexer", "npu_sparse_flash_attention", "npu_grouped_matmul")


def tasks_of(module: fx.GraphModule, costs: CostModel) -> list[Task]:
    """Every call of the graph as a task under its node's name, in the graph's order, between an entry and a return.

    Memory has the name of the input that it belongs to; a value that is written in place, that of the value.
    """
    memory: dict[fx.Node, str] = {}
    tasks: list[Task] = []
    for node in module.graph.nodes:
        if node.op == "placeholder":
            memory[node] = node.name
        elif node.op == "call_function":
            tasks.append(_task(node, memory, costs))
    return enclose(tasks)


def _task(node: fx.Node, memory: dict[fx.Node, str], costs: CostModel) -> Task:
    inputs = [source for source in node.all_input_nodes if source.op == "call_function"]
    written = _written(node)
    shared = _shares_memory_with(node, written)
    if shared is not None and shared in memory:
        memory[node] = memory[shared]
    reads = dict.fromkeys(memory[source] for source in node.all_input_nodes if source in memory)
    return Task(
        node.name,
        0.0 if _is_free(node) else costs.seconds_of(_flops(node), _bytes(node), engine_of(node)),
        engine_of(node),
        tuple(reads),
        tuple(dict.fromkeys(memory.get(source, source.name) for source in written)),
        tuple(source.name for source in inputs),
    )


def engine_of(node: fx.Node) -> Engine:
    """What a node keeps busy: products and attention the cube, all else the vector units."""
    on_the_cube = node.target in _PRODUCTS or getattr(node.target, "_opname", "") in _ON_THE_CUBE
    return "cube" if on_the_cube else "vector"


def _is_free(node: fx.Node) -> bool:
    """Views and parts of results launch nothing."""
    return is_view(node) or getattr(node.target, "__name__", "") == "getitem"


def _written(node: fx.Node) -> list[fx.Node]:
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    found: list[fx.Node] = []
    for i, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
            found += [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, fx.Node)]
    return found


def _shares_memory_with(node: fx.Node, written: Iterable[fx.Node]) -> fx.Node | None:
    """The value whose memory the result lies in: that of a view, or of a write in place, which returns it."""
    first = next(iter(written), None)
    if first is not None:
        return first
    return node.all_input_nodes[0] if is_view(node) and node.all_input_nodes else None


def _bytes(node: fx.Node) -> float:
    """What a node moves: rows where it touches some rows of a cache, else its inputs and its results."""
    results = sum(value.numel() * value.element_size() for value in _values(node))
    name = getattr(node.target, "_opname", "")
    if name == "npu_scatter_nd_update_":
        rows = node.args[2]
        assert isinstance(rows, fx.Node)
        return 2.0 * int(nbytes_of(rows))
    if node.target in (ATEN.index_select.default, ATEN.gather.default, ATEN.index.Tensor, ATEN.embedding.default):
        return 2.0 * results
    return float(results + sum(nbytes_of(source) for source in node.all_input_nodes))


def _flops(node: fx.Node) -> float:
    """Operations of a node: two for each element that a product meets, one for each that it makes elsewhere."""
    if node.target in _PRODUCTS:
        left: Any = node.args[1 if node.target is ATEN.addmm.default else 0]
        return 2.0 * numel_of(node) * shape_of(left)[-1]
    if getattr(node.target, "_opname", "") == "npu_grouped_matmul":
        rows: Any = node.args[0]
        return sum(2.0 * value.numel() * shape_of(rows[0])[-1] for value in _values(node))
    return float(math.fsum(value.numel() for value in _values(node)))


def _values(node: fx.Node) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(node.meta.get("val")) if isinstance(leaf, torch.Tensor)]
