"""layout="nz" on the CPU: products of a parameter read a packed copy of it, decided per parameter with a reason.

The parameter stays as it is and where it is; other readers of it are not concerned, since the copy stands beside it.
"""

from typing import Any

import torch
from torch import fx

from k31compile.graph.sizes import shape_of, value_of
from k31compile.passes.layout.weight_readers import readers_of
from k31compile.report import Report
from k31compile.targets.linear_products import as_linear, drop_unused, replace_product
from k31compile.targets.packed_linear import PACKED_LINEAR
from k31compile.targets.packed_weights import packed_dtype
from k31compile.targets.skinny_linears import SKINNY_LINEAR

_DTYPES = (torch.bfloat16, torch.float32, torch.float16)


def pack_linears(module: fx.GraphModule, report: Report) -> int:
    """Let linear layers of a graph and of its nested bodies read packed weights; returns how many do.

    The report gets a row for each parameter that a product reads, and a note of the memory that copies will take.
    """
    changed = 0
    for child in module.modules():
        if isinstance(child, fx.GraphModule):
            changed += _pack_graph(child, report)
    drop_unused(module)
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
        products = [found for node in readers.products if (found := as_linear(node, weight)) is not None]
        skinny = sum(node.target is SKINNY_LINEAR for node in readers.products)
        reason, remedy = _objection(weight, len(products), skinny)
        report.weights.append(_row(weight, reason, remedy))
        for product in () if reason else products:
            replace_product(product, PACKED_LINEAR, (product.x, weight, product.bias, product.transposed))
            changed += 1
    return changed


def _row(weight: fx.Node, reason: str, remedy: str) -> dict[str, Any]:
    value = value_of(weight)
    size = value.numel() * packed_dtype(value.dtype).itemsize
    return {
        "name": weight.meta.get("parameter_path", weight.name), "layout": "nd" if reason else "nz",
        "dtype": str(value.dtype).removeprefix("torch."), "shape": list(shape_of(weight)),
        "reason": reason, "remedy": remedy, "bytes": 0 if reason else size,
    }  # fmt: skip


def _objection(weight: fx.Node, linears: int, skinny: int) -> tuple[str, str]:
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
    if skinny and not linears:
        return "it is multiplied with a few rows only, which is as fast or faster where it lies", ""
    if not linears:
        return "only a part, a cast, a copy or a batch of it is multiplied, and packed are whole matrices", ""
    if 1 in shape:
        return f"a side of {list(shape)} is 1: there is nothing to pack", ""
    return "", ""
