"""Which weights an Ascend product keeps in blocks (FRACTAL_NZ), decided per parameter, with a reason for each refusal.

Decided from who reads a parameter in a graph, lowered or not. The parameter, its name and its place in the state dict
stay as they are: the blocks are made once, after loading.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from k31compile.graph.sizes import shape_of, value_of
from k31compile.passes.layout.fractal_nz import BLOCK_ROWS, block_columns
from k31compile.passes.layout.weight_readers import Readers, readers_of

ARCH35 = "ascend-950"
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_TWO_BYTES_OR_INT8 = (torch.bfloat16, torch.float16, torch.int8)
_DTYPES: dict[str, tuple[torch.dtype, ...]] = {
    "ascend-a3": _TWO_BYTES_OR_INT8,
    ARCH35: (*_TWO_BYTES_OR_INT8, *_FP8),
}
_SPLIT_K = 2
_GROUPED = "npu.npu_grouped_matmul.default"
_E8M0 = (getattr(torch, "float8_e8m0fnu", None), 293)  # the dtype, and torch_npu's number of it
_NONE = ("", "")


@dataclass(frozen=True)
class NzDecision:
    """Whether one graph input is kept in blocks, and why.

    Attributes:
        position: which input of the graph.
        name: its name in the graph.
        shape: as a caller has it.
        is_nz: whether it is stored as FRACTAL_NZ.
        reason: what speaks against it; empty where it is.
        remedy: what would change that; empty where nothing does.
        dtype: as torch spells it.

    """

    position: int
    name: str
    shape: tuple[int, ...]
    is_nz: bool
    reason: str
    remedy: str = ""
    dtype: str = ""


def decide_nz_weights(
    graph: fx.Graph, parameters: Iterable[int], product: str = "ascend-a3", tensors: Sequence[Any] = ()
) -> list[NzDecision]:
    """A decision for each parameter that a product reads, itself or a copy or part of it.

    `parameters` are positions among the graph's inputs.
    `tensors` are what a caller gives for the inputs: where one tensor comes in twice, its readers are taken together,
    and both get the same decision.
    """
    inputs = graph.find_nodes(op="placeholder")
    readers: dict[int, Readers] = {}
    keys: dict[int, int] = {}
    for position in sorted(parameters):
        keys[position] = id(tensors[position]) if tensors else position
        readers.setdefault(keys[position], Readers()).add(readers_of(inputs[position]))
    found = []
    for position, key in keys.items():
        if readers[key].products or readers[key].behind:
            node = inputs[position]
            reason, remedy = _objection(node, readers[key], product)
            dtype = str(value_of(node).dtype).removeprefix("torch.")
            found.append(NzDecision(position, node.name, shape_of(node), not reason, reason, remedy, dtype))
    return found


def _objection(weight: fx.Node, readers: Readers, product: str) -> tuple[str, str]:
    """Reason and remedy of the first rule that a weight breaks; empty where it breaks none."""
    for objection in (_of_dtype(weight, product), _of_readers(readers, product), _of_sides(weight)):
        if objection != _NONE:
            return objection
    for node in readers.products:
        objection = _of_product(weight, node, product)
        if objection != _NONE:
            return objection
    return _NONE


def _of_dtype(weight: fx.Node, product: str) -> tuple[str, str]:
    dtype, allowed = value_of(weight).dtype, _DTYPES[product]
    if dtype in allowed:
        return _NONE
    named = [str(one).removeprefix("torch.") for one in allowed]
    remedy = "in bfloat16 it would be, where its values may be rounded" if dtype == torch.float32 else ""
    reason = f"it is {str(dtype).removeprefix('torch.')}: blocks are for {', '.join(named[:-1])} and {named[-1]}"
    return reason, remedy


def _of_readers(readers: Readers, product: str) -> tuple[str, str]:
    if readers.others:
        other = readers.others[0]
        how = "it is also read by" if readers.products else "products read it through"
        return f"{how} {other.what} ({other.node.name}), which would see blocks", other.remedy
    if product == ARCH35 and readers.views:
        view = readers.views[0]
        remedy = "store the parameter in the shape in which the product reads it"
        return f"the product reads it through a view ({view.name}), and {product} has none after the cast", remedy
    return _NONE


def _of_sides(weight: fx.Node) -> tuple[str, str]:
    shape = shape_of(weight)
    if len(shape) < 2:
        return "it has less than two dimensions, and blocks store matrices", ""
    rows, columns = shape[-2:]
    if 1 in (rows, columns):
        return f"a side of {list(shape)} is 1, which blocks do not support", "none is needed: such a product is small"
    width = max(BLOCK_ROWS, block_columns(value_of(weight).dtype))
    if rows % width or columns % width:
        return f"its sides {rows} and {columns} are no multiples of {width}", f"pad the layer to multiples of {width}"
    return _NONE


def _of_product(weight: fx.Node, node: fx.Node, product: str) -> tuple[str, str]:
    """The rules of single operators: no split along K, and MX scales in e8m0 on the 950."""
    named = _named(node)
    if str(node.target) == _GROUPED and named.get("group_type") == _SPLIT_K:
        return f"{node.name} splits along K (group_type 2), which takes no blocks", "split along M (group_type 0)"
    if product == ARCH35 and value_of(weight).dtype in _FP8:
        scale = next((one for one in map(_scale_dtype, _scales(named)) if one not in _E8M0), None)
        if scale is not None:
            given = str(scale).removeprefix("torch.")
            return (
                f"{node.name} has {given} scales, and {product} takes blocks with e8m0 only",
                "quantise with e8m0 scales",
            )
    return _NONE


def _named(node: fx.Node) -> dict[str, Any]:
    """All arguments of a call by the names of its schema."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return dict(node.kwargs)
    names = [argument.name for argument in node.target._schema.arguments]
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def _scales(named: dict[str, Any]) -> list[Any]:
    if (given := named.get("scale_dtype")) is not None:
        return [given]
    scales = named.get("scale")
    return [one for one in (scales if isinstance(scales, list | tuple) else [scales]) if one is not None]


def _scale_dtype(scale: Any) -> Any:
    return value_of(scale).dtype if isinstance(scale, fx.Node) else scale
