"""What is almost a sparse attention and has no output to look for: worth a sentence, and nothing to confirm."""

from collections.abc import Iterator

from torch import fx

from k31compile.graph.dataflow import ATEN, Dataflow
from k31compile.graph.sizes import numel_of
from k31compile.passes.recognise.attention_anchor import (
    SOFTMAXES,
    attentions_of,
    indices_above,
    selects,
)
from k31compile.passes.recognise.contractions import is_contraction, nearest_contractions, operands
from k31compile.passes.recognise.operands import weight_operands

_NEAR = 16


def almost_attentions(flow: Dataflow) -> dict[fx.Node, str]:
    """Nodes between products of activations and an index tensor's values that are no softmax to be fused, and why."""
    return flow.remember("almost attentions", lambda: dict(_almost(flow)))


def _almost(flow: Dataflow) -> Iterator[tuple[fx.Node, str]]:
    known = {found.softmax for found in attentions_of(flow)}
    for node in flow.nodes:
        is_sigmoid = node.target is ATEN.sigmoid.default
        if not (is_sigmoid or node.target in SOFTMAXES) or node in known or node in flow.constants:
            continue
        indices = indices_above(flow, node)
        if indices is None or not selects(indices) or not _weighs_products(flow, node):
            continue
        mixed = _mixed_values(flow, node)
        if mixed is None:
            continue
        reader = _other_reader(flow, node, mixed)
        if is_sigmoid:
            yield node, "its weights are a sigmoid of the scores, where a fused attention has a softmax over the keys"
        elif reader is not None:
            yield node, f"the attention weights are also read by {reader.name}: a fused attention has none"


def _weighs_products(flow: Dataflow, node: fx.Node) -> bool:
    """Whether the scores above are products of activations, none with a weight."""
    near = nearest_contractions(flow, flow.inputs[node])
    weights = weight_operands(flow)
    return bool(near) and not any(weights.intersection(operands(one)) for one in near)


def _mixed_values(flow: Dataflow, node: fx.Node) -> fx.Node | None:
    """The sum of values that the weights are made for, close below."""
    front, seen = [node], {node}
    while front and len(seen) < _NEAR:
        users = [user for one in front for user in flow.users[one] if user not in seen]
        for user in users:
            if is_contraction(user) and not _sums_itself(flow, user, seen):
                return user
        seen.update(users)
        front = users
    return None


def _sums_itself(flow: Dataflow, node: fx.Node, weights: set[fx.Node]) -> bool:
    """Whether a sum has no other factor than the weights, as a softmax by hand has one."""
    return all(factor in weights or factor in flow.constants for factor in operands(node))


def _other_reader(flow: Dataflow, node: fx.Node, mixed: fx.Node) -> fx.Node | None:
    """Who reads the weights beside the sum of values."""
    way = flow.between([node], [mixed])
    for weights in flow.in_order(way - {mixed}):
        if numel_of(weights) >= numel_of(node):
            for user in flow.users[weights]:
                if user not in way and user in flow.live:
                    return user
    return None
