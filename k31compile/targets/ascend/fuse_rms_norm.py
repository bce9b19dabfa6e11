"""x * rsqrt(mean(x^2) + eps) * weight becomes torch_npu's RmsNorm: one launch where the written chain has eight.

    Before:  xf = x.float(); y = (xf * rsqrt(mean(xf * xf, -1) + eps) * weight.float()).to(x.dtype)
    After:   y = npu_rms_norm(x, weight, eps)[0]
    Refuses: another dimension, a step that somebody else reads, a result that stays wider than x, no weight,
             an x or a weight in memory that the graph writes (what the chain has read by then, the call would not),
             squares in less than float32, which round, or overflow where the operator does not.

Between is float32 arithmetic in both. Whether the device rounds once, or twice as models that cast before they weigh,
is not documented: results may differ in the last bit of x's dtype.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from k31compile.graph.dataflow import ATEN
from k31compile.graph.sizes import shape_of, value_of
from k31compile.graph.views import same_size_base
from k31compile.targets.ascend.constraints import violations
from k31compile.targets.ascend.profiles import Profile
from k31compile.targets.ascend.share_equal import written_memory


@dataclass(frozen=True)
class _Norm:
    """A chain that was found: what is normalised by what, and the node whose value the chain gives."""

    source: fx.Node
    weight: fx.Node
    eps: float
    result: fx.Node


def fuse_rms_norms(graph: fx.Graph, profile: Profile) -> int:
    """Replace the chains that torch_npu's operator computes, and return how many; needs an open torch_npu."""
    # A cast keeps what was there when it was made, and the operator reads where the chain ends.
    written = written_memory(graph)
    fused = 0
    for root in list(graph.find_nodes(op="call_function", target=ATEN.rsqrt.default)):
        norm = _read(root)
        if norm is None or written.intersection((norm.source, norm.weight)) or _objections(norm, profile):
            continue
        with graph.inserting_before(norm.result):
            weight = _flat(graph, norm.weight)
            call = graph.call_function(torch.ops.npu.npu_rms_norm.default, (norm.source, weight, norm.eps))
            call.meta["val"] = torch.ops.npu.npu_rms_norm(value_of(norm.source), value_of(weight), norm.eps)
            value = graph.call_function(operator.getitem, (call, 0))
            value.meta["val"] = call.meta["val"][0]
        norm.result.replace_all_uses_with(value)
        fused += 1
    graph.eliminate_dead_code()
    return fused


def _read(root: fx.Node) -> _Norm | None:
    """The norm around a reciprocal square root, where every step of it has no other reader."""
    added = _only(root.args[0], ATEN.add.Tensor)
    mean = _only(added.args[0], ATEN.mean.dim) if added is not None else None
    if added is None or mean is None or added.kwargs or mean.kwargs or not isinstance(added.args[1], float | int):
        return None
    wide = _squared(mean.args[0])
    if wide is None or value_of(wide).dtype != torch.float32:
        return None
    if not _is_over_the_last(mean, wide) or len(root.users) != 1:
        return None
    scaled = next(iter(root.users))
    if scaled.target is not ATEN.mul.Tensor or set(scaled.args) != {wide, root}:
        return None
    return _weighed(scaled, wide, float(added.args[1]))


def _only(node: Any, target: Any) -> fx.Node | None:
    """The node, where it is a call of the target that one node reads."""
    fits = isinstance(node, fx.Node) and node.target is target and len(node.users) == 1
    return node if fits else None


def _squared(node: Any) -> fx.Node | None:
    """What is squared: by its power, or by a product with itself."""
    power = _only(node, ATEN.pow.Tensor_Scalar)
    if power is not None and power.args[1] == 2 and isinstance(power.args[0], fx.Node):
        return power.args[0]
    product = _only(node, ATEN.mul.Tensor)
    if product is not None and product.args[0] is product.args[1] and isinstance(product.args[0], fx.Node):
        return product.args[0]
    return None


def _is_over_the_last(mean: fx.Node, wide: fx.Node) -> bool:
    dims: Any = mean.args[1]
    keeps = len(mean.args) > 2 and mean.args[2] is True
    return keeps and [dim % len(shape_of(wide)) for dim in dims] == [len(shape_of(wide)) - 1]


def _weighed(scaled: fx.Node, wide: fx.Node, eps: float) -> _Norm | None:
    """The chain behind the division: times the weight, and cast to what came in, in either order."""
    source = _uncast(wide)
    dtype = value_of(source).dtype
    node, weight = scaled, None
    while len(node.users) == 1 and (weight is None or value_of(node).dtype != dtype):
        reader = next(iter(node.users))
        if reader.target is ATEN.mul.Tensor and weight is None:
            (other,) = [argument for argument in reader.args if argument is not node] or [None]
            if not isinstance(other, fx.Node) or not _is_weight(other, wide):
                return None
            weight = _uncast(other)
        elif reader.target is not ATEN._to_copy.default or value_of(reader).dtype != dtype:
            return None
        node = reader
    if weight is None or value_of(node).dtype != dtype or shape_of(node) != shape_of(source):
        return None
    return _Norm(source, weight, eps, node)


def _is_weight(node: fx.Node, wide: fx.Node) -> bool:
    """One factor for each channel: a vector of the last dimension's length, with ones in front of it or without."""
    *front, width = shape_of(node) or (0,)
    return width == shape_of(wide)[-1] and all(size == 1 for size in front)


def _uncast(node: fx.Node) -> fx.Node:
    """What a cast to float32 started from; the cast is exact, so the value is the same."""
    source = node.args[0] if node.target is ATEN._to_copy.default else None
    if isinstance(source, fx.Node) and value_of(node).dtype == torch.float32 and value_of(source).dtype.itemsize == 2:
        return source
    return node


def _objections(norm: _Norm, profile: Profile) -> list[str]:
    source, weight = value_of(norm.source), value_of(norm.weight)
    values = {"input dtype": source.dtype, "rank": source.dim()}
    found = violations("npu_rms_norm", profile, values)
    if weight.dtype != source.dtype:
        found.append(f"the weight is {weight.dtype}, the input {source.dtype}")
    return found


def _flat(graph: fx.Graph, weight: fx.Node) -> fx.Node:
    """The weight as a vector."""
    if len(shape_of(weight)) == 1:
        return weight
    base = same_size_base(weight)
    if len(shape_of(base)) == 1:
        return base
    flat = graph.call_function(ATEN.view.default, (weight, [-1]))
    flat.meta["val"] = value_of(weight).view(-1)
    return flat
