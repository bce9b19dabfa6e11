"""Equal calls become one: lowerings each make their own coordinates, lengths and constants, layer after layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from k31compile.graph.sizes import value_of
from k31compile.graph.views import is_view, may_alias
from k31compile.passes.schedule.graph_tasks import written_by


def share_equal_calls(graph: fx.Graph) -> int:
    """Let the readers of a call read its first equal, and return how many calls went away.

    Two calls are equal where operator and arguments are, and nothing that either could read is ever written: neither a
    cache that the graph writes nor a view of one. What leaves the graph stays, and so does what is drawn at random.
    """
    written = written_memory(graph)
    known: dict[Any, fx.Node] = {}
    gone = 0
    for node in list(graph.nodes):
        if node.op != "call_function" or not _is_pure(node) or written.intersection((node, *node.all_input_nodes)):
            continue
        if _leaves(node):
            continue
        first = known.setdefault(_key(node), node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)
            gone += 1
    return gone


def _leaves(node: fx.Node) -> bool:
    """Whether the caller gets the node, a view or a part of it: two results must not be one memory."""
    return any(user.op == "output" or (_base(user) is not user and _leaves(user)) for user in node.users)


def drop_dead_copies(graph: fx.Graph) -> int:
    """Read a new value where it was copied over one that nobody reads any more, and return how many copies went away.

    Torch's own functions write into what they have just made; as a copy that would be a launch, and a write in place.
    """
    places = {node: place for place, node in enumerate(graph.nodes)}
    gone = 0
    for copy in list(graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)):
        target, source = copy.args[0], copy.args[1]
        if not (isinstance(target, fx.Node) and isinstance(source, fx.Node)) or not _is_made_here(target):
            continue
        others = [user for user in target.users if user is not copy]
        is_read_later = any(places[user] > places[copy] or _base(user) is not user for user in others)
        if is_read_later or not _look_alike(target, source) or not _is_made_here(source):
            continue
        copy.replace_all_uses_with(source)
        graph.erase_node(copy)
        gone += 1
    return gone


def _is_made_here(node: fx.Node) -> bool:
    """Whether the node is a call whose result is memory of its own."""
    return node.op == "call_function" and _base(node) is node and not list(written_by(node))


def _look_alike(one: fx.Node, other: fx.Node) -> bool:
    left, right = value_of(one), value_of(other)
    return bool((left.dtype, left.shape, left.stride()) == (right.dtype, right.shape, right.stride()))


def written_memory(graph: fx.Graph) -> set[fx.Node]:
    """Every node whose memory the graph writes: what is written, what it is a view of, and all other views of that."""
    written = {_base(node) for call in graph.nodes for node in written_by(call)}
    changed = True
    while changed:
        more = {node for node in graph.nodes if _base(node) in written or written.intersection(written_by(node))}
        changed = not more <= written
        written |= more
    return written


def _base(node: fx.Node) -> fx.Node:
    while (is_view(node) or may_alias(node)) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _is_pure(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return getattr(target, "__name__", "") == "getitem"
    is_made_anew = target.namespace == "aten" and target._opname.startswith(("empty", "new_empty"))
    is_random = torch.Tag.nondeterministic_seeded in target.tags
    return not (target._schema.is_mutable or is_random or is_made_anew or target.namespace == "air")


def _key(node: fx.Node) -> Any:
    # By repr: arguments hold lists, and 1, 1.0 and True are equal but give tensors of other dtypes.
    return node.target, repr(node.args), repr(sorted(node.kwargs.items()))
