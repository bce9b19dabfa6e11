"""A selection of the best along one dimension: top-k, sort or argsort with a slice, whatever marks its empty slots."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from k31compile.graph.confirm import Mismatch
from k31compile.graph.dataflow import ATEN, Dataflow
from k31compile.graph.layout import Layout
from k31compile.graph.sizes import hint, is_float, is_integer, shape_of, value_of

_SORTS = {ATEN.sort.default, ATEN.sort.stable, ATEN.argsort.default, ATEN.argsort.stable}
_ARGSORTS = {ATEN.argsort.default, ATEN.argsort.stable}
_MARKERS = {ATEN.masked_fill.Scalar, ATEN.where.self, ATEN.where.ScalarSelf, ATEN.where.ScalarOther}


@dataclass(frozen=True)
class Selection:
    """`anchor` selects the `count` best of `scores` along `dim`; `final` is the index tensor that leaves it.

    `largest` tells which end is best, `sorted` whether the author was promised the best first.
    """

    anchor: fx.Node
    scores: fx.Node
    dim: int
    count: Any
    largest: bool
    sorted: bool
    final: fx.Node

    def _layout(self, scores: Layout) -> Layout:
        # The result has the scores' dimensions with k in place of s.
        return Layout("btk", scores.dims)

    def canonical_indices(self, indices: torch.Tensor, scores: Layout) -> torch.Tensor:
        """[B, T, K] from the author's layout."""
        return self._layout(scores).canonical(indices)

    def restore_indices(self, indices: torch.Tensor, scores: Layout, rank: int) -> torch.Tensor:
        """The author's layout from [B, T, K]."""
        return self._layout(scores).restore(indices, rank)


def is_selection(node: fx.Node) -> bool:
    """Whether the node may be a selection: cheap, for what is asked of every node."""
    return node.target is ATEN.topk.default or node.target in _SORTS


def selection_of(flow: Dataflow, node: fx.Node) -> Selection | None:
    """The selection anchored at `node`, or None where it is none.

    Whether somebody reads the selected values too is for `require_indices_only` to say.
    """
    if node.target is ATEN.topk.default:
        return _topk(flow, node)
    if node.target in _SORTS:
        return _sort(flow, node)
    return None


def _topk(flow: Dataflow, node: fx.Node) -> Selection | None:
    scores, count = node.args[0], node.args[1]
    if not isinstance(scores, fx.Node) or not is_float(scores):
        return None
    dim = _argument(node, 2, "dim", -1) % max(1, len(shape_of(scores)))
    picked = [user for user in flow.users[node] if user.args[1] == 1]
    if not picked:
        return None
    largest, in_order = bool(_argument(node, 3, "largest", True)), bool(_argument(node, 4, "sorted", True))
    return Selection(node, scores, dim, count, largest, in_order, _final(flow, node, picked[0]))


def _sort(flow: Dataflow, node: fx.Node) -> Selection | None:
    scores = node.args[0]
    if not isinstance(scores, fx.Node) or not is_float(scores):
        return None
    dim = _named(node, "dim", -1) % max(1, len(shape_of(scores)))
    indices = node
    if node.target not in _ARGSORTS:
        picked = [user for user in flow.users[node] if user.args[1] == 1]
        if not picked:
            return None
        indices = picked[0]
    cuts = flow.users[indices]
    if len(cuts) != 1 or cuts[0].target is not ATEN.slice.Tensor:
        return None
    cut = cuts[0]
    rank = len(shape_of(scores))
    start, step = _argument(cut, 2, "start", 0), _argument(cut, 4, "step", 1)
    if _argument(cut, 1, "dim", 0) % rank != dim or start not in (0, None) or step != 1:
        return None
    count = cut.args[3] if len(cut.args) > 3 else None
    if not isinstance(count, fx.Node) and not (isinstance(count, int) and 0 < count <= shape_of(scores)[dim]):
        return None
    largest = bool(_named(node, "descending", False))
    return Selection(node, scores, dim, count, largest, True, _final(flow, node, cut))


def _final(flow: Dataflow, anchor: fx.Node, indices: fx.Node) -> fx.Node:
    """The index tensor that everything else reads: behind the marks of empty slots where the author sets any."""
    final = indices
    shape = shape_of(indices)
    for node in flow.post_dominators(anchor):
        if node is indices:
            continue
        if is_integer(node) and shape_of(node) == shape and node.target in _MARKERS:
            if final is not indices and _is_made_of(flow, node, final):
                break  # marks that were set are moved, to a column of their own for one
            final = node
        elif node.target is not ATEN._to_copy.default or not is_integer(node):
            break
    return final


def _is_made_of(flow: Dataflow, node: fx.Node, only: fx.Node) -> bool:
    """Whether nothing that varies is in the node but one other."""
    above = flow.ancestors([node], stop=lambda one: one is only or one in flow.constants)
    return not any(one.op == "placeholder" and one not in flow.constants for one in above)


def require_indices_only(flow: Dataflow, selection: Selection) -> None:
    """Raise Mismatch where the selected values are read by something else than the marks of empty slots."""
    inner = flow.ancestors([selection.final]) if selection.final is not None else set()
    values = [user for user in flow.users[selection.anchor] if user.args[1:2] == (0,)]
    for value in values:
        if flow.users[value] and not all(u in inner for u in _readers(flow, value, selection.final)):
            raise Mismatch("the values of the top-k are also read: a fused indexer gives indices only")


def _readers(flow: Dataflow, value: fx.Node, final: fx.Node) -> Iterator[fx.Node]:
    for node in flow.descendants([value], stop=lambda n: n is final):
        if node is not value:
            yield node


def _argument(node: fx.Node, index: int, name: str, default: Any) -> Any:
    value = node.args[index] if len(node.args) > index else node.kwargs.get(name, default)
    return hint(value_of(value)) if isinstance(value, fx.Node) else value


def _named(node: fx.Node, name: str, default: Any) -> Any:
    """An argument of sort or argsort by name: their overloads order them differently."""
    if name in node.kwargs:
        return node.kwargs[name]
    target: Any = node.target
    for i, argument in enumerate(target._schema.arguments):
        if argument.name == name and i < len(node.args):
            return node.args[i]
    return default
