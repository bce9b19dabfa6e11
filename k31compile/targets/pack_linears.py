"""layout="nz" on the CPU: products of a parameter read a packed copy of it, decided per parameter with a reason.

The parameter stays as it is and where it is; other readers of it are not concerned, since the copy stands beside it.
"""

from typing import Any, NamedTuple

import torch
from torch import fx

from k31compile.graph.sizes import shape_of, value_of
from k31compile.graph.views import ATEN
from k31compile.passes.layout.weight_readers import readers_of, swaps_last_two
from k31compile.report import Report
from k31compile.targets.packed_linear import PACKED_LINEAR
from k31compile.targets.packed_weights import packed_dtype

_DTYPES = (torch.bfloat16, torch.float32, torch.float16)
_SAME = {ATEN.alias.default, ATEN.detach.default}


class _Product(NamedTuple):
    """A linear layer as it is written: its operands, and whether the weight stands as [K, N]."""

    node: fx.Node
    x: fx.Node
    bias: Any
    transposed: bool


def pack_linears(module: fx.GraphModule, report: Report) -> int:
    """Let linear layers of a graph and of its nested bodies read packed weights; returns how many do.

    The report gets a row for each parameter that a product reads, and a note of the memory that copies will take.
    """
    changed = 0
    for child in module.modules():
        if isinstance(child, fx.GraphModule):
            changed += _pack_graph(child, report)
    packed = [row for row in report.weights if row["layout"] == "nz"]
    megabytes = sum(row["bytes"] for row in packed) / 1e6
    report.notes.append(
        f"layout='nz': {len(packed)} of {len(report.weights)} weights get a copy packed for oneDNN at their first use, "
        f"at least {megabytes:.1f} MB beside the weights themselves"
    )
    return changed


def _pack_graph(module: fx.GraphModule, report: Report) -> int:
    changed = 0
    for weight in module.graph.find_nodes(op="placeholder"):
        if not weight.meta.get("is_parameter", False):
            continue
        readers = readers_of(weight)
        if not readers.products and not readers.behind:
            continue
        products = [found for node in readers.products if (found := _as_linear(node, weight)) is not None]
        reason, remedy = _objection(weight, len(products))
        report.weights.append(_row(weight, reason, remedy))
        for product in () if reason else products:
            _replace(product, weight)
            changed += 1
    module.graph.eliminate_dead_code()
    module.recompile()
    return changed


def _row(weight: fx.Node, reason: str, remedy: str) -> dict[str, Any]:
    value = value_of(weight)
    size = value.numel() * packed_dtype(value.dtype).itemsize
    return {
        "name": weight.meta.get("parameter_path", weight.name), "layout": "nd" if reason else "nz",
        "dtype": str(value.dtype).removeprefix("torch."), "shape": list(shape_of(weight)),
        "reason": reason, "remedy": remedy, "bytes": 0 if reason else size,
    }  # fmt: skip


def _objection(weight: fx.Node, linears: int) -> tuple[str, str]:
    value, shape = value_of(weight), shape_of(weight)
    if torch.is_autocast_enabled("cpu"):
        return (
            "autocast decides on each call in which dtype it is multiplied",
            "give the model weights of the lower precision and call it without autocast",
        )
    if value.dtype not in _DTYPES:
        return (
            f"it is {str(value.dtype).removeprefix('torch.')}: packed copies are for bfloat16, float16 and float32",
            "",
        )
    if not linears:
        return "only a part, a cast, a copy or a batch of it is multiplied, and packed are whole matrices", ""
    if 1 in shape:
        return f"a side of {list(shape)} is 1: there is nothing to pack", ""
    return "", ""


def _as_linear(node: fx.Node, weight: fx.Node) -> _Product | None:
    """A product of the whole weight, a matrix, as a linear layer; None where it is none."""
    if node.kwargs or len(shape_of(weight)) != 2:
        return None
    arguments: Any = node.args
    if node.target is ATEN.linear.default:
        x, right, bias, transposed = arguments[0], arguments[1], (*arguments, None)[2], False
    elif node.target in (ATEN.mm.default, ATEN.matmul.default):
        x, right, bias, transposed = arguments[0], arguments[1], None, True
    elif node.target is ATEN.addmm.default:
        bias, x, right, transposed = arguments[0], arguments[1], arguments[2], True
        if len(shape_of(bias)) != 1 or shape_of(bias)[0] != shape_of(right)[1]:
            return None
    else:
        return None
    while right is not weight:
        if swaps_last_two(right):
            transposed = not transposed
        elif right.target not in _SAME:
            return None
        right = right.args[0]
    return _Product(node, x, bias, transposed)


def _replace(product: _Product, weight: fx.Node) -> None:
    node = product.node
    graph = node.graph
    with graph.inserting_before(node):
        packed = graph.call_function(PACKED_LINEAR, (product.x, weight, product.bias, product.transposed))
    packed.meta.update(node.meta)
    node.replace_all_uses_with(packed)
    graph.erase_node(node)
