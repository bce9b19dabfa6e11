"""Products of bfloat16 weights on a CPU without products of bfloat16: in float32, with one rounding at the end.

That is how they are summed anyway, and there torch takes seven to nine times as long as for float32. For those that no
kernel of ours takes: of heads, of matrices the other way round.
"""

from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from k31compile.graph.sizes import value_of
from k31compile.graph.views import ATEN
from k31compile.passes.layout.weight_readers import readers_of
from k31compile.report import Report
from k31compile.targets.packed_weights import packed_dtype

_PRODUCTS = {
    ATEN.linear.default, ATEN.mm.default, ATEN.bmm.default, ATEN.matmul.default, ATEN.addmm.default,
    ATEN.baddbmm.default, ATEN.einsum.default,
}  # fmt: skip
_LEAST_ROWS = 32  # and columns, of each matrix: with fewer, widening it on every call takes as long as is gained


def widen_products(module: fx.GraphModule, report: Report) -> int:
    """Let products in a graph and in its nested bodies run in float32; returns how many do, and notes it.

    Nothing is changed under autocast, which decides on each call in which dtype a product runs.
    """
    if torch.is_autocast_enabled("cpu") or packed_dtype(torch.bfloat16) == torch.bfloat16:
        return 0
    count = 0
    for child in module.modules():
        if isinstance(child, fx.GraphModule):
            count += _widen_graph(child)
    if count:
        report.notes.append(
            f"{count} products of bfloat16 weights run in float32, rounded once at their end: this processor has no "
            "products of bfloat16"
        )
    return count


def _widen_graph(module: fx.GraphModule) -> int:
    found: dict[fx.Node, None] = {}
    for weight in module.graph.find_nodes(op="placeholder"):
        if _is_bfloat16(weight.meta.get("val")):
            readers = readers_of(weight)
            found |= dict.fromkeys(node for node in (*readers.products, *readers.behind) if _is_worth_it(node))
    for node in found:
        _widen(node)
    if found:
        module.recompile()
    return len(found)


def _is_worth_it(node: fx.Node) -> bool:
    if node.target not in _PRODUCTS:
        return False
    operands = [value_of(source) for source in node.all_input_nodes]
    if not all(map(_is_bfloat16, (*operands, node.meta.get("val")))):
        return False
    matrices = [value for value in operands if value.dim() > 1]
    sizes = [value.numel() for value in (*matrices, value_of(node))]
    if len(matrices) != 2 or not all(isinstance(size, int) for size in sizes):
        return False
    # [M, K] by [K, N] into [M, N]: the product of two of these sizes over the third is the square of a side.
    left, right, result = sizes
    return bool(min(left, right) * result >= _LEAST_ROWS**2 * max(left, right))


def _widen(node: fx.Node) -> None:
    graph = node.graph

    def wide(source: fx.Node) -> fx.Node:
        return _cast(graph, source, torch.float32)

    with graph.inserting_before(node):
        node.args = pytree.tree_map_only(fx.Node, wide, node.args)
    with graph.inserting_after(node):
        users = list(node.users)
        back = _cast(graph, node, torch.bfloat16)
    for user in users:
        user.replace_input_with(node, back)
    node.meta["val"] = value_of(node).to(torch.float32)


def _cast(graph: fx.Graph, source: fx.Node, dtype: torch.dtype) -> fx.Node:
    made = graph.call_function(ATEN._to_copy.default, (source,), {"dtype": dtype})
    made.meta["val"] = value_of(source).to(dtype)
    return made


def _is_bfloat16(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16 and value.device.type == "cpu"
