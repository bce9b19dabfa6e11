"""What a loop over tokens computes of each token's gate alone, computed of all tokens at once.

An elementwise function of `gate[:, t]` is token t of the function of `gate`, but for the last bit where a machine takes
the end of a row by another instruction. Written so, a gate that is made inside of the loop is one leaf of the
recurrence, as one that is made before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from k31compile.graph.dataflow import ATEN
from k31compile.graph.sizes import is_float, shape_of, value_of
from k31compile.graph.views import CASTS

_GATES = {ATEN.exp.default, ATEN.exp2.default, ATEN.pow.Scalar, ATEN.sigmoid.default}
_MOST_STEPS = 12
_EVERY_TOKEN = "every token"

Signature = tuple[Any, ...]
Tokens = dict[int, list[fx.Node]]


def gather_token_functions(graph: fx.Graph) -> int:
    """Rewrite the graph in place, and return how many functions of a token became one of all tokens."""
    gathered = 0
    todo = list(_token_groups(graph))
    while todo:
        base, dim, tokens = todo.pop()
        for users in _shared_functions(tokens):
            whole = _apply_to_all(graph, base, dim, tokens, users)
            gathered += 1
            todo.append((whole, dim, _replace(graph, whole, dim, users)))
    return gathered


def _token_groups(graph: fx.Graph) -> Iterator[tuple[fx.Node, int, Tokens]]:
    """Tensors of which every token is taken on its own: the tensor, the dimension, and the nodes of each token."""
    found: dict[tuple[fx.Node, int], Tokens] = {}
    for node in graph.nodes:
        taken = _token_of(node)
        if taken is not None:
            base, dim, token = taken
            found.setdefault((base, dim), {}).setdefault(token, []).append(node)
    for (base, dim), tokens in found.items():
        if is_float(base) and len(tokens) > 1 and sorted(tokens) == list(range(shape_of(base)[dim])):
            yield base, dim, tokens


def _token_of(node: fx.Node) -> tuple[fx.Node, int, int] | None:
    """What `node` takes a token of, along which dimension, and which."""
    if node.target is ATEN.select.int:
        base, dim, token = node.args
    elif getattr(node.target, "__name__", "") == "getitem" and getattr(node.args[0], "target", None) is ATEN.unbind.int:
        unbound, token = node.args
        assert isinstance(unbound, fx.Node)
        base, dim = unbound.args[0], unbound.args[1] if len(unbound.args) > 1 else 0
    else:
        return None
    if not isinstance(base, fx.Node) or not isinstance(dim, int) or not isinstance(token, int):
        return None
    shape = shape_of(base)
    return base, dim % len(shape), token % shape[dim]


def _shared_functions(tokens: Tokens) -> list[Tokens]:
    """Elementwise functions that lead to a gate and that every token has: the nodes of each token."""
    by_token = {token: _functions(nodes) for token, nodes in tokens.items()}
    first, *rest = by_token.values()
    shared = [signature for signature in first if all(signature in other for other in rest)]
    return [{token: found[signature] for token, found in by_token.items()} for signature in shared]


def _functions(nodes: Sequence[fx.Node]) -> dict[Signature, list[fx.Node]]:
    found: dict[Signature, list[fx.Node]] = {}
    for node in nodes:
        for user in node.users:
            if _is_elementwise(user) and shape_of(user) == shape_of(node) and _leads_to_gate(user):
                found.setdefault(_signature(user, node), []).append(user)
    return found


def _signature(user: fx.Node, token: fx.Node) -> Signature:
    """The function without its token; what else it reads is the same node for every token, or the function is not."""
    arguments = tuple(_EVERY_TOKEN if argument is token else argument for argument in user.args)
    return (user.target, arguments, tuple(sorted(user.kwargs.items(), key=lambda item: item[0])))


def _is_elementwise(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload) or not is_float(node):
        return False
    plain = all(isinstance(argument, fx.Node | int | float | torch.dtype | None) for argument in node.args)
    return plain and (torch.Tag.pointwise in node.target.tags or node.target in CASTS)


def _leads_to_gate(node: fx.Node) -> bool:
    """Whether elementwise steps from the node, itself included, reach an exponential or a sigmoid."""
    front = {node}
    for _ in range(_MOST_STEPS):
        if any(one.target in _GATES for one in front):
            return True
        front = {user for one in front for user in one.users if _is_elementwise(user)}
    return False


def _apply_to_all(graph: fx.Graph, base: fx.Node, dim: int, tokens: Tokens, users: Tokens) -> fx.Node:
    """The function of the whole tensor, in front of its first use."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    example = min((user for found in users.values() for user in found), key=order.__getitem__)
    own = {node for nodes in tokens.values() for node in nodes}
    behind = len(shape_of(base)) - 1 - dim
    with graph.inserting_before(example):
        arguments = tuple(
            base if argument in own else _spread(graph, argument, behind) if isinstance(argument, fx.Node) else argument
            for argument in example.args
        )
        return _call(graph, example.target, arguments, dict(example.kwargs), example)


def _spread(graph: fx.Graph, other: fx.Node, behind: int) -> fx.Node:
    """What the tokens share, with a dimension of size 1 for them where it reaches across theirs."""
    across = len(shape_of(other)) - behind
    return other if across <= 0 else _call(graph, ATEN.unsqueeze.default, (other, across), {}, other)


def _replace(graph: fx.Graph, whole: fx.Node, dim: int, users: Tokens) -> Tokens:
    """Each token of the whole in the place of what was computed of it."""
    tokens: Tokens = {}
    for token, found in users.items():
        for user in found:
            with graph.inserting_before(user):
                part = _call(graph, ATEN.select.int, (whole, dim, token), {}, user)
            user.replace_all_uses_with(part)
            graph.erase_node(user)
            tokens.setdefault(token, []).append(part)
    return tokens


def _call(graph: fx.Graph, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], like: fx.Node) -> fx.Node:
    node = graph.call_function(target, args, kwargs)
    node.meta = {key: value for key, value in like.meta.items() if key != "val"}
    values = fx.map_arg((args, kwargs), value_of)
    node.meta["val"] = target(*values[0], **values[1])
    return node
