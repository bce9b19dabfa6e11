"""Linear layers on the CPU that `k31::skinny_linear` does faster: of a few rows, and bfloat16 on machines without it.

Of a few rows, as in a decode step, time is that of reading the weight, of which torch's own products reach a half to a
third; where the processor has no products of bfloat16, torch's take seven to nine times as long as those of float32
(docs/performance.md). The weight is read where it lies: there is no copy, and nothing that could grow old.
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
from k31compile.targets.packed_weights import packed_dtype

SKINNY_LINEAR = torch.ops.k31.skinny_linear.default

# Below these a product of a few rows is a matter of microseconds, and adding up the lanes of each sum counts: from here
# on it was measured faster at all of one to eight rows (docs/performance.md).
_LEAST_DEPTH = 128
_LEAST_NUMBERS = 1 << 15
# Of the weight, where bfloat16 is missing: below it a call costs more than the product.
_LEAST_EMULATED = 1 << 10

_WHICH = f"of at most {MOST_ROWS} rows, or of bfloat16 where this machine has none, read their weights by it"


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
        if _is_faster(product, value_of(weight))
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
        "why": f"{len(found)} products {_WHICH}; {choice.why}",
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
    """Products that see the weight as [N, K] with the numbers of a row side by side."""
    if value_of(weight).stride(1) != 1:
        return []
    found = (as_linear(node, weight) for node in readers_of(weight).products)
    return [product for product in found if product is not None and not product.transposed]


def _is_faster(product: LinearProduct, weight: torch.Tensor) -> bool:
    # Not shape_of, which has a hint where a size is a symbol.
    rows = value_of(product.x).shape[:-1]
    if value_of(product.x).dtype != weight.dtype or value_of(product.node).dtype != weight.dtype:
        return False
    if packed_dtype(weight.dtype) != weight.dtype and weight.numel() >= _LEAST_EMULATED:
        return not any(size == 0 for size in rows if isinstance(size, int))
    if not _are_numbers(*rows) or not 0 < torch.Size(rows).numel() <= MOST_ROWS:
        return False
    return weight.shape[1] >= _LEAST_DEPTH and weight.numel() >= _LEAST_NUMBERS
