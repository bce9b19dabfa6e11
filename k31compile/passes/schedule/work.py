"""What a node has to do: operations, bytes, and the engine that it keeps busy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from k31compile.graph.dataflow import ATEN
from k31compile.graph.sizes import hint, nbytes_of, numel_of, shape_of
from k31compile.passes.schedule.tasks import Engine


@dataclass(frozen=True)
class Work:
    """Operations and bytes of one call; a count, so nothing of a target is in it."""

    flops: float
    bytes_moved: float
    engine: Engine


def work_of(node: fx.Node) -> Work:
    """The work of a call by its operator, else one operation for each element that it makes.

    An operator that looks up rows moves those rows and not the whole of what they lie in.
    """
    count = _BY_TARGET.get(node.target) or _BY_NAME.get(getattr(node.target, "_opname", ""))
    if count is not None:
        return count(node)
    return Work(float(_numel(_results(node))), _all_bytes(node), "vector")


def _results(node: fx.Node) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(node.meta.get("val")) if isinstance(leaf, torch.Tensor)]


def _numel(values: list[torch.Tensor]) -> int:
    return sum(hint(value.numel()) for value in values)


def _made_bytes(node: fx.Node) -> float:
    return float(sum(hint(value.numel()) * value.element_size() for value in _results(node)))


def _all_bytes(node: fx.Node) -> float:
    return _made_bytes(node) + sum(nbytes_of(source) for source in node.all_input_nodes)


def _product(node: fx.Node) -> Work:
    left: Any = node.args[1 if node.target is ATEN.addmm.default else 0]
    return Work(2.0 * numel_of(node) * shape_of(left)[-1], _all_bytes(node), "cube")


def _linear(node: fx.Node) -> Work:
    left: Any = node.args[0]
    return Work(2.0 * numel_of(node) * shape_of(left)[-1], _all_bytes(node), "cube")


def _looked_up(node: fx.Node) -> Work:
    return Work(float(_numel(_results(node))), 2.0 * _made_bytes(node), "vector")


def _written_rows(position: int) -> Callable[[fx.Node], Work]:
    """Writes rows into a cache: the rows are read and written, the cache is not moved."""

    def count(node: fx.Node) -> Work:
        rows: Any = node.args[position]
        return Work(0.0, 2.0 * nbytes_of(rows), "memory")

    return count


def _indexer(node: fx.Node) -> Work:
    """Scores of every query head against each position that a request can hold."""
    query: Any = node.args[0]
    key: Any = node.args[1]
    *rows, heads, width = shape_of(query)
    table = node.kwargs.get("block_table")
    positions = shape_of(key)[1] * (shape_of(table)[-1] if isinstance(table, fx.Node) else 1)
    count = 1.0
    for size in rows:
        count *= size
    read = rows[0] * positions * width * _itemsize(key)
    return Work(2.0 * count * heads * width * positions, read + nbytes_of(query) + _made_bytes(node), "cube")


def _sparse_attention(node: fx.Node) -> Work:
    """Products of every head with the rows that the indices name: latent and rope for scores, latent for values."""
    query: Any = node.args[0]
    key: Any = node.args[1]
    indices: Any = node.args[3]
    heads, latent = shape_of(query)[-2:]
    rope = node.kwargs.get("query_rope")
    width = latent + (shape_of(rope)[-1] if isinstance(rope, fx.Node) else 0)
    named = numel_of(indices)
    flops = 2.0 * named * heads * (width + latent)
    return Work(flops, named * width * _itemsize(key) + nbytes_of(query) + _made_bytes(node), "cube")


def _grouped_matmul(node: fx.Node) -> Work:
    """Of the stacks of experts those are read that a token can have named: as many as there are rows."""
    rows: Any = node.args[0]
    stacks: Any = node.args[1]
    tokens, width = shape_of(rows[0])
    read = sum(nbytes_of(stack) * min(1.0, tokens / shape_of(stack)[0]) for stack in stacks)
    flops = sum(2.0 * hint(value.numel()) * width for value in _results(node))
    return Work(flops, read + nbytes_of(rows[0]) + _made_bytes(node), "cube")


def _grouped_experts(node: fx.Node) -> Work:
    """Three products for each pair of token and expert; of the experts those that a pair can name are read."""
    chosen: Any = node.args[1]
    pairs = numel_of(chosen)
    matrices = [leaf for stack in node.args[3:6] for leaf in pytree.tree_leaves(stack) if isinstance(leaf, fx.Node)]
    experts = sum(shape_of(one)[0] if len(shape_of(one)) == 3 else 1 for one in matrices) / 3
    share = min(1.0, pairs / max(experts, 1.0))
    flops = 2.0 * pairs * sum(map(numel_of, matrices)) / max(experts, 1.0)
    return Work(flops, share * sum(map(nbytes_of, matrices)) + _made_bytes(node), "cube")


def _delta_rule(node: fx.Node) -> Work:
    """Every token decays, reads and updates the whole state; a step moves it in and out."""
    tokens = max((shape_of(source)[1] for source in node.all_input_nodes if len(shape_of(source)) == 4), default=1)
    state = max((hint(value.numel()) for value in _results(node)), default=0)
    return Work(8.0 * tokens * state, _all_bytes(node), "vector")


def _itemsize(node: fx.Node) -> int:
    return int(node.meta["val"].element_size())


_BY_TARGET: dict[object, Callable[[fx.Node], Work]] = {
    ATEN.mm.default: _product,
    ATEN.bmm.default: _product,
    ATEN.addmm.default: _product,
    ATEN.linear.default: _linear,
    ATEN.matmul.default: _linear,
    ATEN.index_select.default: _looked_up,
    ATEN.gather.default: _looked_up,
    ATEN.index.Tensor: _looked_up,
    ATEN.embedding.default: _looked_up,
    ATEN.index_put_.default: _written_rows(2),
    ATEN.index_put.default: _written_rows(2),
    ATEN.scatter_.src: _written_rows(3),
}

_BY_NAME: dict[str, Callable[[fx.Node], Work]] = {
    "npu_scatter_nd_update_": _written_rows(2),
    "npu_lightning_indexer": _indexer,
    "lightning_indexer": _indexer,
    "npu_sparse_flash_attention": _sparse_attention,
    "sparse_flash_attention": _sparse_attention,
    "npu_grouped_matmul": _grouped_matmul,
    "grouped_experts": _grouped_experts,
    "mega_kda": _delta_rule,
    "kda_recurrent": _delta_rule,
    "kda_chunk": _delta_rule,
    "gated_delta_recurrent": _delta_rule,
    "gated_delta_chunk": _delta_rule,
    "kda_recurrent_": _delta_rule,
    "npu_recurrent_gated_delta_rule": _delta_rule,
    "npu_recurrent_gated_delta_rule_functional": _delta_rule,
}
