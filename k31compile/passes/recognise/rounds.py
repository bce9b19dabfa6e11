"""The best one after another: rounds of argmax, each without the winners before it, put side by side."""

from torch import fx

from k31compile.graph.dataflow import ATEN, Dataflow
from k31compile.graph.sizes import is_float, numel_of, shape_of
from k31compile.graph.views import CASTS, is_view
from k31compile.passes.recognise.selection import Selection

_JOINTS = {ATEN.cat.default, ATEN.stack.default}
_MOST_STEPS = 3


def is_round(node: fx.Node) -> bool:
    """Whether the node gives the place of a largest value: cheap, for what is asked of every node."""
    return node.target is ATEN.argmax.default or node.target is ATEN.max.dim


def rounds_of(flow: Dataflow, node: fx.Node) -> Selection | None:
    """The selection whose first round is `node`, or None where it is none."""
    scores = node.args[0]
    if not isinstance(scores, fx.Node) or not is_float(scores) or len(node.args) < 2 or not shape_of(scores):
        return None
    dim, rank = node.args[1], len(shape_of(scores))
    if not isinstance(dim, int) or dim % rank != rank - 1:
        return None
    for joint in _joints(flow, node):
        parts = joint.args[0]
        assert isinstance(parts, list | tuple)
        rounds = [_maker(part) for part in parts]
        lead, count = shape_of(scores)[:-1], len(parts)
        if count > 1 and rounds[0] is node and all(rounds) and shape_of(joint) == (*lead, count):
            return Selection(node, scores, rank - 1, count, True, True, joint)
    return None


def _joints(flow: Dataflow, node: fx.Node) -> list[fx.Node]:
    """Where places of this round and of others are put side by side."""
    front, found = [node], []
    for _ in range(_MOST_STEPS):
        users = [user for source in front for user in flow.users[source]]
        found += [user for user in users if user.target in _JOINTS]
        front = [user for user in users if _moves(user)]
    return found


def _maker(part: object) -> fx.Node | None:
    """The round that a column of places is from."""
    node = part
    while isinstance(node, fx.Node) and _moves(node):
        whole = node.args[1] if getattr(node.target, "__name__", "") == "getitem" else 1
        if whole != 1 or not isinstance(node.args[0], fx.Node):
            return None
        node = node.args[0]
    return node if isinstance(node, fx.Node) and is_round(node) else None


def _moves(node: fx.Node) -> bool:
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or not (is_view(node) or node.target in CASTS):
        return False
    return source.target is ATEN.max.dim or numel_of(source) == numel_of(node)
