"""Which weights an Ascend product keeps in blocks (FRACTAL_NZ), decided per parameter, with a reason for each refusal.

Decided from who reads a parameter in the lowered graph. The parameter, its name and its place in the state dict stay as
they are: the blocks are made once, after loading.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from k31compile.graph.dataflow import ATEN
from k31compile.graph.sizes import shape_of, value_of
from k31compile.graph.views import is_view
from k31compile.passes.layout.fractal_nz import BLOCK_ROWS, block_columns

_TRANSPOSES = {ATEN.t.default, ATEN.transpose.int, ATEN.permute.default}
_PRODUCTS = {ATEN.mm.default: (1,), ATEN.bmm.default: (1,), ATEN.addmm.default: (2,), ATEN.matmul.default: (1,)}
_GROUPED = "npu.npu_grouped_matmul.default"
_DTYPES = (torch.bfloat16, torch.float16, torch.int8)


@dataclass(frozen=True)
class NzDecision:
    """Whether one graph input is kept in blocks, and why.

    Attributes:
        position: which input of the graph.
        name: its name in the graph.
        shape: as a caller has it.
        is_nz: whether it is stored as FRACTAL_NZ.
        reason: what speaks against it; empty where it is.

    """

    position: int
    name: str
    shape: tuple[int, ...]
    is_nz: bool
    reason: str


def decide_nz_weights(graph: fx.Graph, parameters: Iterable[int]) -> list[NzDecision]:
    """A decision for each parameter that a product reads; `parameters` are positions among the graph's inputs."""
    inputs = graph.find_nodes(op="placeholder")
    found = []
    for position in sorted(parameters):
        node = inputs[position]
        products, others = _readers(node)
        if products:
            reason = _objection(node, others)
            found.append(NzDecision(position, node.name, shape_of(node), not reason, reason))
    return found


def _readers(weight: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """Products that read a parameter as their weight, also through transposes; and whoever else reads it."""
    products: list[fx.Node] = []
    others: list[fx.Node] = []
    todo = [weight]
    while todo:
        node = todo.pop()
        for user in node.users:
            if user.target in _TRANSPOSES:
                todo.append(user)
            elif _reads_as_weight(user, node):
                products.append(user)
            elif user.op != "output":
                others.append(user)
    return products, others


def _reads_as_weight(user: fx.Node, node: fx.Node) -> bool:
    if str(user.target) == _GROUPED:
        weights: Any = user.args[1] if len(user.args) > 1 else user.kwargs.get("weight", ())
        return node in weights
    places = next((at for product, at in _PRODUCTS.items() if user.target is product), ())
    return any(user.args[at] is node for at in places)


def _objection(weight: fx.Node, others: list[fx.Node]) -> str:
    value, shape = value_of(weight), shape_of(weight)
    if value.dtype not in _DTYPES:
        return f"it is {str(value.dtype).removeprefix('torch.')}: blocks are for bfloat16, float16 and int8"
    if others:
        what = "a view or a slice" if is_view(others[0]) else str(others[0].target)
        return f"it is also read by {what} ({others[0].name}), which would see blocks"
    rows, columns = shape[-2:]
    if 1 in (rows, columns):
        return f"a side of {list(shape)} is 1, which blocks do not support"
    width = max(BLOCK_ROWS, block_columns(value.dtype))
    if rows % width or columns % width:
        return f"its sides {rows} and {columns} are no multiples of {width}"
    return ""
