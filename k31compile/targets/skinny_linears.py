"""Decode steps on the CPU: products of a few rows with a large weight become `k31::skinny_linear`.

Time is that of reading the weight, of which torch's own products reach a half to a third (docs/performance.md). The
weight is read where it lies: there is no copy, and nothing that could grow old.
"""

from typing import Any

import torch
from torch import fx

import k31compile.kernels  # noqa: F401  (registers the operator)
from k31compile.graph.sizes import value_of
from k31compile.kernels.cpu.calls import DTYPES
from k31compile.kernels.cpu.skinny_linear import MOST_ROWS
from k31compile.kernels.registry import provider_for
from k31compile.passes.layout.weight_readers import readers_of
from k31compile.report import Report
from k31compile.targets.linear_products import LinearProduct, as_linear, drop_unused, replace_product

SKINNY_LINEAR = torch.ops.k31.skinny_linear.default

# Below these a product is a matter of microseconds, and adding up the lanes of each sum counts: from here on it was
# measured faster at all of one to eight rows (docs/performance.md).
_LEAST_DEPTH = 128
_LEAST_NUMBERS = 1 << 15


def use_skinny_linears(module: fx.GraphModule, report: Report) -> int:
    """Replace what the kernel does faster in a graph and in its nested bodies; returns how many.

    The report names them beside the providers of fused operators.

    Nothing is replaced under autocast, which decides on each call in which dtype a product runs, nor where the kernel
    does not serve.
    """
    if torch.is_autocast_enabled("cpu"):
        return 0
    found = [
        (product, weight)
        for child in module.modules()
        if isinstance(child, fx.GraphModule)
        for weight in child.graph.find_nodes(op="placeholder")
        if _is_large(weight)
        for product in _products(weight)
        if _is_skinny(product, value_of(weight).dtype)
    ]
    # The kernels are asked for last: the first to ask builds them.
    choice = provider_for("skinny_linear") if found else None
    if choice is None or not choice.provider.startswith("cpu-"):
        return 0
    made: dict[fx.Node, fx.Node] = {}  # what stands for a product that another one reads
    for product, weight in found:
        x, bias = (made.get(operand, operand) for operand in (product.x, product.bias))
        made[product.node] = replace_product(product, SKINNY_LINEAR, (x, weight, bias))
    drop_unused(module)
    report.providers["skinny_linear"] = {
        "provider": choice.provider,
        "why": f"{len(found)} products of at most {MOST_ROWS} rows read their weights by it; {choice.why}",
    }
    return len(found)


def _is_large(weight: fx.Node) -> bool:
    value = weight.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dtype not in DTYPES or value.device.type != "cpu":
        return False
    return value.layout == torch.strided and value.dim() == 2 and _are_numbers(*value.shape, *value.stride())


def _are_numbers(*sizes: Any) -> bool:
    return all(isinstance(size, int) for size in sizes)


def _products(weight: fx.Node) -> list[LinearProduct]:
    """Products that see the weight as [N, K] with the numbers of a row side by side, large enough."""
    (outputs, depth), stride = value_of(weight).shape, value_of(weight).stride()
    if stride[1] != 1 or depth < _LEAST_DEPTH or outputs * depth < _LEAST_NUMBERS:
        return []
    found = (as_linear(node, weight) for node in readers_of(weight).products)
    return [product for product in found if product is not None and not product.transposed]


def _is_skinny(product: LinearProduct, dtype: torch.dtype) -> bool:
    # Not shape_of, which has a hint where a size is a symbol.
    rows = value_of(product.x).shape[:-1]
    if value_of(product.x).dtype != dtype or value_of(product.node).dtype != dtype:
        return False
    return _are_numbers(*rows) and 0 < torch.Size(rows).numel() <= MOST_ROWS
