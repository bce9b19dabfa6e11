"""Weights of the indexer that were widened on the way to it, taken back to what they were before.

The 950's indexer takes no float32 weights. A cast from bfloat16 to float32 adds nothing, and a positive factor on all
weights changes no choice, so a graph that widens or scales them may hand over what stood before.
"""

from __future__ import annotations

import torch
from torch import fx

from k31compile.graph.dataflow import ATEN
from k31compile.graph.sizes import is_tensor, value_of
from k31compile.graph.views import CASTS, COPIES, is_view
from k31compile.targets.ascend.constraints import takes_indexer_weights
from k31compile.targets.ascend.profiles import Profile

_HALF = (torch.bfloat16, torch.float16)
_SCALES = (ATEN.mul.Tensor, ATEN.mul.Scalar, ATEN.div.Tensor, ATEN.div.Scalar)


def narrow_indexer_weights(module: fx.GraphModule, profile: Profile) -> int:
    """Let each indexer read its weights as they were before they were widened; return how many do.

    Nothing changes where the product takes float32 weights. A factor is left out only where no mask is added to the
    scores, for a mask has a size of its own.
    """
    if takes_indexer_weights(profile, torch.float32):
        return 0
    changed = 0
    for call in module.graph.find_nodes(op="call_function", target=torch.ops.k31.lightning_indexer.default):
        weights = call.args[2]
        chain = _chain_to_half(weights, _adds_a_mask(call))
        if chain is not None:
            call.replace_input_with(weights, _views_again(module.graph, call, chain))
            changed += 1
    if changed:
        module.graph.eliminate_dead_code()
        module.recompile()
    return changed


def _adds_a_mask(call: fx.Node) -> bool:
    mask = call.kwargs.get("mask")
    return isinstance(mask, fx.Node) and value_of(mask).dtype != torch.bool


def _chain_to_half(node: fx.Node, keep_size: bool) -> list[fx.Node] | None:
    """From a bfloat16 or float16 value to `node`, over views, widening casts and positive factors; else None."""
    chain = [node]
    if not is_tensor(node) or value_of(node).dtype != torch.float32:
        return None
    while value_of(chain[0]).dtype not in _HALF:
        node = chain[0]
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node) or not is_tensor(source):
            return None
        known = is_view(node) or node.target in CASTS or (node.target in _SCALES and not keep_size and _is_scaled(node))
        if not known or value_of(source).dtype not in (*_HALF, torch.float32):
            return None
        chain.insert(0, source)
    return chain


def _is_scaled(node: fx.Node) -> bool:
    """Whether the second operand is a number above 0."""
    factor = node.args[1]
    return isinstance(factor, int | float) and 0 < factor < float("inf")


def _views_again(graph: fx.Graph, before: fx.Node, chain: list[fx.Node]) -> fx.Node:
    """The views of a chain, on its first node."""
    made, *rest = chain
    for node in rest:
        if is_view(node) and node.target not in COPIES:
            with graph.inserting_before(before):
                copied = graph.node_copy(node, lambda source, made=made: made)  # type: ignore[misc]
            copied.meta["val"] = value_of(node).to(value_of(made).dtype)
            made = copied
    return made
