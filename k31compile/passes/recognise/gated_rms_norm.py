"""The gated RMS norm in anyone's spelling (K3.1 spec 2.3, 3.8).

norm(x) = x rsqrt(mean(x^2) + eps) weight;    result = norm(x) act(gate)  or  norm(x act(gate))
"""

import itertools
from collections.abc import Iterable, Iterator
from functools import partial

from torch import fx

from k31compile.graph.confirm import Mismatch, Reading
from k31compile.graph.dataflow import ATEN, Dataflow
from k31compile.graph.region import Region
from k31compile.graph.sizes import is_float, numel_of, shape_of
from k31compile.passes.recognise.engine import Demand, Recogniser
from k31compile.passes.recognise.norm_reading import NormOperands, NormReading
from k31compile.passes.recognise.norms import (
    Gate,
    Norm,
    before_casts,
    ends_of,
    gates_of,
    norm_of,
    opening_of,
    small_constants,
)

_MOST_ENDS = 5


class GatedRMSNormRecogniser(Recogniser):
    """Anchored on the root of a mean of squares over the last axis; a gate must be near."""

    name = "gated_rms_norm"

    def anchors(self, flow: Dataflow) -> Iterable[fx.Node]:
        """The roots whose norm has a gate, before or after it."""
        return flow.remember("gated norms", lambda: [node for node in flow.nodes if _gates(flow, node)])

    def demands(self, flow: Dataflow, anchor: fx.Node) -> Iterator[Demand]:
        """From the rows and the gate to the last product that the norm goes into, with the cast behind it."""
        norm, gates = norm_of(flow, anchor), _gates(flow, anchor)
        assert norm is not None
        served = [gate for gate in gates if gate.is_served]
        if not served:
            raise Mismatch(f"its gate is {_name(gates[0].opener)}; the operator has sigmoid and SiLU")
        for after in (True, False):
            openers = [gate.opener for gate in served if gate.after is after]
            for end in _ends(flow, norm, openers) if openers else ():
                core = {norm.squares, *flow.between([norm.squares, *map(opening_of, openers)], [end])}
                yield Demand((end,), frozenset(core), partial(_may_be_leaf, norm), capacity=numel_of)

    def variants(self, flow: Dataflow, leaves: tuple[fx.Node, ...]) -> Iterator[tuple[fx.Node, ...]]:
        """The leaves before views and casts, before casts alone, as found: the operator casts by itself."""
        tried: set[tuple[fx.Node, ...]] = set()
        for with_views in (True, False):
            before = tuple(dict.fromkeys(before_casts(leaf, with_views) for leaf in leaves))
            if before not in tried and len(before) == len(leaves):
                tried.add(before)
                yield before
        if leaves not in tried:
            yield leaves

    def readings(self, flow: Dataflow, anchor: fx.Node, region: Region) -> Iterator[Reading]:
        """The rows are above the mean; the gate is above its opener; the weight has the size of a row or of a few."""
        norm = norm_of(flow, anchor)
        assert norm is not None
        if len(region.leaves) != 3 or not all(is_float(leaf) for leaf in region.leaves):
            return
        stop = set(region.leaves).__contains__
        normed = flow.ancestors([norm.rows], stop=stop)
        opening = flow.ancestors([gate.opener for gate in _gates(flow, anchor)], stop=stop)
        found = [
            NormOperands(x, gate, weight, norm.width, eps, activation, gate not in normed)
            for x, gate, weight in itertools.permutations(region.leaves)
            if x in normed and gate in opening and weight not in normed and _fit(norm, x, gate, weight, region)
            for eps in small_constants(region)
            for activation in ("sigmoid", "silu")
        ]
        for operands in found:
            yield NormReading(region, operands)

    def guards(self, flow: Dataflow, region: Region, reading: Reading) -> None:
        """Nothing: each value from the anchor to the end is read by the next alone."""

    def resembles(self, flow: Dataflow, anchor: fx.Node) -> bool:
        """A norm over the last axis whose rows are gated right after it."""
        return any(gate.after and gate.opener.target is not ATEN.exp.default for gate in _gates(flow, anchor))

    def hint(self, reason: str) -> str:
        """What to change."""
        if "rounds" in reason:
            return "compute norm, weight and gate in float32 and cast once at the end"
        return "the recognised form is x * rsqrt(mean(x^2) + eps) * weight * sigmoid(gate), or silu for sigmoid"


def _gates(flow: Dataflow, node: fx.Node) -> list[Gate]:
    norm = norm_of(flow, node)
    return gates_of(flow, norm) if norm is not None else []


def _name(node: fx.Node) -> str:
    return str(node.target).split(".")[1]


def _ends(flow: Dataflow, norm: Norm, openers: list[fx.Node]) -> list[fx.Node]:
    """Where the operator may end: the farthest product or cast first that has the rows' size and a gate above."""
    ends = ends_of(norm)
    while ends and not flow.ancestors([ends[0]], stop=set(openers).__contains__).intersection(openers):
        ends.pop(0)
    return ends[::-1][:_MOST_ENDS]


def _may_be_leaf(norm: Norm, node: fx.Node) -> bool:
    """Whether the node has the size of the rows, or is one row of weights, or one for each of a few groups."""
    if not is_float(node):
        return False
    return numel_of(node) == numel_of(norm.rows) or _may_be_weight(norm, node)


def _may_be_weight(norm: Norm, node: fx.Node) -> bool:
    wide = [size for size in shape_of(node) if size != 1]
    groups = shape_of(norm.rows)[-2]
    return wide in ([norm.width], [groups, norm.width], [groups * norm.width])


def _fit(norm: Norm, x: fx.Node, gate: fx.Node, weight: fx.Node, region: Region) -> bool:
    """Whether the operator takes the leaves as they are, with their last axis split into rows at most."""
    rows, groups = shape_of(norm.rows), shape_of(norm.rows)[-2]

    def in_rows(node: fx.Node) -> tuple[int, ...]:
        shape = shape_of(node)
        return shape if not shape or shape[-1] == norm.width else (*shape[:-1], shape[-1] // norm.width, norm.width)

    shapes = {in_rows(node) for node in (x, gate, region.outputs[-1])}
    if len(shapes) != 1 or numel_of(x) != numel_of(norm.rows) or shape_of(x)[-1] % norm.width:
        return False
    wide = [size for size in shape_of(weight) if size != 1]
    return wide == [norm.width] or (_may_be_weight(norm, weight) and groups == next(iter(shapes))[-2] == rows[-2])
