"""One row times a small weight, as sums that Inductor makes loops of: calling a product takes longer than the product.

Beside Inductor's other loops the sums were faster than torch's product and than `k31::skinny_linear` at every size that
is taken here, with one thread and with two (docs/performance.md).
"""

from typing import Any

import torch
from torch import fx

from k31compile.graph.sizes import value_of
from k31compile.graph.views import ATEN
from k31compile.passes.layout.weight_readers import readers_of
from k31compile.targets.linear_products import LinearProduct, as_linear, drop_unused

MOST_NUMBERS = 1 << 15
"""From here on `k31::skinny_linear` may serve, and what a call costs no longer decides."""


def sum_small_products(module: fx.GraphModule) -> int:
    """Write products of one row with a small float32 weight as sums, in a graph and its nested bodies; how many.

    Nothing is done under autocast, which decides on each call in which dtype a product runs.
    """
    if torch.is_autocast_enabled("cpu"):
        return 0
    found = [
        (product, weight)
        for child in module.modules()
        if isinstance(child, fx.GraphModule)
        for weight in child.graph.find_nodes(op="placeholder")
        if _is_small(weight)
        for product in (as_linear(node, weight) for node in readers_of(weight).products)
        if product is not None and not product.transposed and _is_one_row(product)
    ]
    made: dict[fx.Node, fx.Node] = {}  # what stands for a product that another one reads
    for product, weight in found:
        made[product.node] = _summed(product, weight, made)
    if found:
        drop_unused(module)
    return len(found)


def _is_small(weight: fx.Node) -> bool:
    value = weight.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dtype is not torch.float32 or value.device.type != "cpu":
        return False
    numbers: tuple[Any, ...] = (*value.shape, *value.stride())
    if value.layout != torch.strided or value.dim() != 2 or not all(isinstance(number, int) for number in numbers):
        return False
    return value.stride(1) == 1 and 0 < value.numel() <= MOST_NUMBERS


def _is_one_row(product: LinearProduct) -> bool:
    x, made = value_of(product.x), value_of(product.node)
    if x.dtype is not torch.float32 or made.dtype is not torch.float32:
        return False
    return all(isinstance(size, int) and size == 1 for size in x.shape[:-1])


def _summed(product: LinearProduct, weight: fx.Node, made: dict[fx.Node, fx.Node]) -> fx.Node:
    node, graph = product.node, product.node.graph
    x, bias = (made.get(operand, operand) for operand in (product.x, product.bias))
    with graph.inserting_before(node):
        rows = graph.call_function(ATEN.unsqueeze.default, (x, -2))
        rows.meta["val"] = value_of(product.x).unsqueeze(-2)
        products = graph.call_function(ATEN.mul.Tensor, (rows, weight))
        products.meta["val"] = rows.meta["val"] * value_of(weight)
        result = graph.call_function(ATEN.sum.dim_IntList, (products, [-1]))
        result.meta.update(node.meta)
        if bias is not None:
            result = graph.call_function(ATEN.add.Tensor, (result, bias))
            result.meta.update(node.meta)
    node.replace_all_uses_with(result)
    graph.erase_node(node)
    return result
