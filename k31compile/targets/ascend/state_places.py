"""Which recurrent states are rows of a cache, read before a call and put back after it: such are stepped in place."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from k31compile.graph.dataflow import ATEN
from k31compile.graph.sizes import value_of
from k31compile.graph.views import CASTS, is_view

STATE_ARGUMENT = {"kda_recurrent": (5, 1), "gated_delta_recurrent": (5, 1), "mega_kda": (7, 2)}
"""Operator -> position of its state among the arguments, and of its last state among the results."""


@dataclass(frozen=True)
class StatePlace:
    """A call's states: the cache, the rows, and the write of the last states that becomes needless."""

    cache: fx.Node
    rows: fx.Node
    write: fx.Node


def find_state_places(graph: fx.Graph) -> dict[fx.Node, StatePlace]:
    """By call of a recurrence: where its states lie, if it reads rows of an input and puts them back unmoved."""
    found: dict[fx.Node, StatePlace] = {}
    for call in graph.nodes:
        operator = getattr(call.target, "_opname", "")
        if call.op == "call_function" and operator in STATE_ARGUMENT:
            place = _place_of(call, *STATE_ARGUMENT[operator])
            if place is not None:
                found[call] = place
    return found


def _place_of(call: fx.Node, argument: int, result: int) -> StatePlace | None:
    read = call.args[argument]
    if not isinstance(read, fx.Node) or read.target is not ATEN.index.Tensor:
        return None
    cache, indices = read.args[0], read.args[1]
    rows = _row_index(indices)
    if not isinstance(cache, fx.Node) or cache.op != "placeholder" or rows is None:
        return None
    last = next((user for user in call.users if user.args[1] == result), None)
    write = _written(last) if last is not None else None
    if write is None or last is None or write.args[0] is not cache or write.args[1] != [rows]:
        return None
    if set(cache.users) != {read, write} or len(read.users) != 1:
        return None
    return StatePlace(cache, rows, write) if _comes_back_unmoved(last, write) else None


def _row_index(indices: object) -> fx.Node | None:
    """The one list of integers that rows are read by, else None."""
    if not isinstance(indices, list) or len(indices) != 1 or not isinstance(indices[0], fx.Node):
        return None
    index = value_of(indices[0])
    return indices[0] if index.dim() == 1 and index.dtype in (torch.int32, torch.int64) else None


def _written(node: fx.Node) -> fx.Node | None:
    """The write in place at the end of a chain of views of which nobody else reads anything."""
    while len(node.users) == 1:
        (user,) = node.users
        if user.target is ATEN.index_put_.default:
            return user if user.args[2] is node and not any(user.args[3:]) and not user.users else None
        if not is_view(user) and user.target not in CASTS:
            return None
        node = user
    return None


def _comes_back_unmoved(last: fx.Node, write: fx.Node) -> bool:
    """Whether the views between a result and its write leave every element at its place."""
    small = torch.arange(24.0).view(1, 2, 3, 4)
    moved, node = small, last
    while node is not write:
        (node,) = node.users
        if node is not write and node.target in (ATEN.permute.default, ATEN.transpose.int, ATEN.mT.default):
            moved = node.target(moved, *node.args[1:])
        elif node is not write and node.target not in (*CASTS, ATEN.clone.default, ATEN.contiguous.default):
            return False
    return moved.shape == small.shape and bool(torch.equal(moved, small))
