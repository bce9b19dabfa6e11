"""A short convolution written token by token: one sum over the taps for each, from a window that moves on."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

from torch import fx

from k31compile.graph.dataflow import ATEN, Dataflow
from k31compile.graph.sizes import numel_of
from k31compile.graph.views import CASTS, is_view
from k31compile.passes.recognise.taps import Taps, ends_of, moves_inputs

_JOINTS = {ATEN.stack.default, ATEN.cat.default}
_MOST_STEPS = 12


@dataclass(frozen=True)
class Unrolled:
    """The sums of all tokens, what moves their window on, and where the operator may end."""

    taps: tuple[Taps, ...]
    moving: frozenset[fx.Node]
    ends: tuple[fx.Node, ...]

    @property
    def starts(self) -> tuple[fx.Node, ...]:
        """The sums."""
        return tuple(one.anchor for one in self.taps)

    @property
    def picked(self) -> frozenset[fx.Node]:
        """What lies between the weight and the products."""
        return frozenset(node for one in self.taps for node in one.picked)


def unrolled_from(flow: Dataflow, found: Sequence[Taps], first: Taps) -> Unrolled | None:
    """The sums with one weight that are put side by side, where `first` is the first of them."""
    joint = _joint_below(flow, first.anchor)
    if joint is None:
        return None
    alike = [one for one in found if one.weight is first.weight and _joint_below(flow, one.anchor) is joint]
    alike.sort(key=lambda one: flow.position[one.anchor])
    parts = joint.args[0]
    if alike[0] is not first or len(alike) < 2 or not isinstance(parts, list | tuple) or len(parts) != len(alike):
        return None
    ends = ends_of(flow, replace(first, anchor=joint))
    return Unrolled(tuple(alike), frozenset(node for one in alike for node in _moving(flow, one)), tuple(ends))


def _joint_below(flow: Dataflow, anchor: fx.Node) -> fx.Node | None:
    """Where a sum, behind its activation, is put beside others."""
    for node in islice(flow.post_dominators(anchor), _MOST_STEPS):
        if node.target in _JOINTS:
            return node
        if numel_of(node) != numel_of(anchor):
            return None
    return None


def _moving(flow: Dataflow, taps: Taps) -> set[fx.Node]:
    """What makes a window of the one before: moves and writes, without what cuts one token's input."""
    inside: set[fx.Node] = set()
    todo = list(taps.rows)
    while todo:
        node = todo.pop()
        moves = moves_inputs(node) or is_view(node) or node.target in CASTS or node.target is ATEN.copy.default
        if node in inside or not moves or node in flow.constants:
            continue
        inside.add(node)
        # All but the newest inputs come from the window before.
        todo.extend(source for source in flow.inputs[node] if 2 * numel_of(source) > numel_of(node))
    return inside
