"""The gated delta rule in anyone's spelling, token by token or in chunks (K3.1 spec 2.4, 2.5, 3.2).

S = Diag(exp g) S;  u = beta (v - S^T k);  S = S + k u^T;  o = scale S^T q
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

from torch import fx

from k31compile.graph.confirm import Mismatch, Reading
from k31compile.graph.dataflow import ATEN, Dataflow
from k31compile.graph.region import Region
from k31compile.graph.sizes import is_float, numel_of, shape_of
from k31compile.graph.views import CASTS, is_narrowing, is_view
from k31compile.passes.recognise.contractions import is_contraction
from k31compile.passes.recognise.contractions import operands as operands_of
from k31compile.passes.recognise.decay_exits import common_exits, final_states
from k31compile.passes.recognise.decays import (
    Decays,
    find_decays,
    serves_all_channels,
    state_products,
    sums_with,
)
from k31compile.passes.recognise.delta_reading import (
    LN2,
    DeltaOperands,
    DeltaReading,
    Memo,
    assignments,
    assignments_to_state,
)
from k31compile.passes.recognise.engine import Demand, Recogniser, outside_users
from k31compile.passes.recognise.gates import GateForm, is_flat_gate
from k31compile.passes.recognise.operands import matrix_operands, with_plain_integers

_MOST_EXITS = 8
_MOST_READINGS = 288


class DeltaRuleRecogniser(Recogniser):
    """Anchored on the exponentials of a gate; what they decay must be the state of a delta rule.

    `name` is kda_recurrent or kda_chunk, or gated_delta_recurrent or gated_delta_chunk where one gate serves all
    channels of a head: that is another operator.
    """

    def __init__(self, name: str) -> None:
        """Look for one of the four operators."""
        self.name = name
        self.in_chunks = name.endswith("chunk")
        self.is_scalar = name.startswith("gated_delta")

    def anchors(self, flow: Dataflow) -> Iterable[fx.Node]:
        """The first exponential of each gate that is summed over a chunk, or of each that is not."""
        groups = flow.remember("decays", lambda: find_decays(flow))
        return [group.anchor for group in groups if bool(group.cumulative) == self.in_chunks]

    def demands(self, flow: Dataflow, anchor: fx.Node) -> Iterator[Demand]:
        """From the gate to the output, and to the state where it is kept."""
        decays = _decays_of(flow, anchor)
        products = _products_of(flow, decays)
        if products and serves_all_channels(products[-1]) != self.is_scalar:
            return
        states = final_states(flow, decays, products[-1]) if products else {}
        last = [products[-1], *sums_with(flow, products[-1])] if products else []
        final = flow.in_order(state for state in states if state in last)[-1:]
        passing = {node for state in final for node in states[state]}
        before = flow.ancestors([*products, *final])
        exits: list[fx.Node] = []
        # A decay may be read for its own sake, or decay another state: then what it decays here tells the way.
        for starts in (() if decays.is_shared else decays.exponentials, products):
            ways = common_exits(flow, decays, starts, final, passing) if starts and not exits else []
            exits += [node for node in ways if is_float(node) and node not in before]
        for out in _last_of_each_value(exits)[:_MOST_EXITS]:
            eligible = functools.partial(_may_be_leaf, flow, decays, out, products[-1] if products else None)
            yield _demand(flow, decays, (out, *final), eligible)
        if final:
            eligible = functools.partial(_may_make_state, flow, decays, final[0], products[-1])
            yield _demand(flow, decays, tuple(final), eligible)
        if not exits and products:
            raise Mismatch(
                "what leaves the recurrence is not one output and the state after the last token: "
                "states or outputs between two tokens are kept or read"
            )

    def variants(self, flow: Dataflow, leaves: tuple[fx.Node, ...]) -> Iterator[tuple[fx.Node, ...]]:
        """The leaves before they were turned about and cast: the operator reads them as they are."""
        found = with_plain_integers(leaves)
        before = tuple(dict.fromkeys(_as_first_written(leaf) for leaf in found))
        if before != found and len(before) == len(found):
            yield before
        yield found

    def readings(self, flow: Dataflow, anchor: fx.Node, region: Region) -> Iterator[Reading]:
        """The gate is what the exponentials depend on; the others are told apart by shape, and by running."""
        decays = _decays_of(flow, anchor)
        above = flow.ancestors(decays.gate_ends, stop=set(region.leaves).__contains__)
        floats = [leaf for leaf in region.leaves if is_float(leaf)]
        gates = [leaf for leaf in floats if leaf in above]
        rest = [leaf for leaf in floats if leaf not in gates]
        if len(gates) != 1 or len(rest) not in (3, 4, 5) or len(floats) != len(region.leaves):
            return
        memo: Memo = {}
        unit = 1.0 if all(node.target is ATEN.exp.default for node in decays.exponentials) else LN2
        form = GateForm(is_decay=True) if decays.products else GateForm(unit)
        found = self._operands(flow, decays, region, gates[0], rest)
        for operands in itertools.islice(found, _MOST_READINGS):
            yield DeltaReading(self.name, region, operands, form, memo)

    def _operands(
        self, flow: Dataflow, decays: Decays, region: Region, gate: fx.Node, rest: list[fx.Node]
    ) -> Iterator[DeltaOperands]:
        """The leaves told apart by shape: as those of an output, with the state or without, or of the state alone."""
        final = region.outputs[1] if len(region.outputs) > 1 else None
        if final is None and len(rest) < 5 and _is_state(flow, decays, region.outputs[0]):
            yield from assignments_to_state(region, gate, rest, self.is_scalar)
        elif len(rest) > 3:
            yield from assignments(region, gate, rest, region.outputs[0], final, self.is_scalar)

    def guards(self, flow: Dataflow, region: Region, reading: Reading) -> None:
        """Nobody else reads what the operator does not give, a state between two tokens for one."""
        gate = next(leaf for leaf in region.leaves if leaf is reading.operands.gate.leaf)  # type: ignore[attr-defined]
        # The decays themselves anybody may read: they are made of the gate alone.
        decayed = flow.descendants([gate]) & flow.descendants(leaf for leaf in region.leaves if leaf is not gate)
        for node, reader in outside_users(flow, region.nodes, region.outputs).items():
            if node in decayed and is_float(node) and not is_view(node):
                raise Mismatch(
                    f"{node.name} {list(shape_of(node))}, a value inside the recurrence, is also read by {reader.name}"
                    f"{' (returned)' if reader.op == 'output' else ''}"
                )

    def resembles(self, flow: Dataflow, anchor: fx.Node) -> bool:
        """A decay that is spread over a state."""
        return bool(_products_of(flow, _decays_of(flow, anchor)))

    def hint(self, reason: str) -> str:
        """What to change."""
        if "also read" in reason or "between two tokens" in reason:
            return "read the state after the last token only"
        return "the recognised rule is S = exp(g) S; u = beta (v - S^T k); S = S + k u^T; o = S^T q"


def _decays_of(flow: Dataflow, anchor: fx.Node) -> Decays:
    groups = flow.remember("decays", lambda: find_decays(flow))
    return next(group for group in groups if group.anchor is anchor)


def _products_of(flow: Dataflow, decays: Decays) -> list[fx.Node]:
    """What the decays make of a state, of the one that is meant where they decay several."""
    return list(decays.products) if decays.is_shared else state_products(flow, decays)


def _demand(
    flow: Dataflow, decays: Decays, outputs: tuple[fx.Node, ...], eligible: Callable[[fx.Node], bool]
) -> Demand:
    core = flow.between(decays.starts, outputs) | set(outputs)
    return Demand(outputs, frozenset(core), functools.cache(eligible), capacity=numel_of)


def _is_state(flow: Dataflow, decays: Decays, node: fx.Node) -> bool:
    """Whether a node is what the last state product became, rather than what is read of it."""
    products = _products_of(flow, decays)
    return bool(products) and node in (products[-1], *sums_with(flow, products[-1]))


def _last_of_each_value(exits: Sequence[fx.Node]) -> list[fx.Node]:
    """The exits without those that are only turned about or cast by the next; what a slice shortens comes after it.

    Where an author rounds to fewer bits the value stays: what widens it again is not part of the rule.
    """
    kept: list[fx.Node] = []
    shortened: fx.Node | None = None
    for node, after in zip(exits, [*exits[1:], None][: len(exits)], strict=True):
        moves = after is not None and (_only_moves(after) or after.target is ATEN.stack.default)
        if after is not None and moves and _wide(after) == _wide(node) and not is_narrowing(node):
            continue
        if after is not None and after.target is ATEN.slice.Tensor:
            # Padding was cut off, most likely: the operator then need not see it.
            shortened = node
            continue
        kept.append(node)
        if shortened is not None:
            kept.append(shortened)
            shortened = None
    return kept


def _as_first_written(leaf: fx.Node) -> fx.Node:
    """What a leaf was before views, casts and paddings of nothing that left its sizes and bits as they are."""
    node = leaf
    while _only_moves(node) and not is_narrowing(node):
        source = node.args[0]
        if not isinstance(source, fx.Node) or not is_float(source) or _wide(source) != _wide(node):
            break
        node = source
    return node


def _only_moves(node: fx.Node) -> bool:
    return is_view(node) or node.target in {*CASTS, ATEN.pad.default}


def _is_pairwise(flow: Dataflow, node: fx.Node) -> bool:
    """Whether the node holds products of two activations: q . k belongs inside, though no decay may be above it."""
    while True:
        varying = [source for source in flow.inputs[node] if source not in flow.constants]
        if is_contraction(node):
            return len(varying) > 1 and not matrix_operands(flow).intersection(operands_of(node))
        if len(varying) != 1:
            return False
        node = varying[0]


def _wide(node: fx.Node) -> list[int]:
    return sorted(size for size in shape_of(node) if size != 1)


def _may_be_leaf(flow: Dataflow, decays: Decays, out: fx.Node, state: fx.Node | None, node: fx.Node) -> bool:
    """Whether the shape is that of a vector or a number for each token and head of `out`, or that of the state."""
    if not is_float(node) or _is_pairwise(flow, node):
        return False
    if is_flat_gate(node, decays.exponentials, state):
        return True
    sizes = _wide(node)
    matrix = _wide(state) if state is not None else []
    if matrix and sizes == matrix:
        return True
    for width in {*_wide(out), 1}:
        tokens = list(_wide(out))
        if width != 1:
            tokens.remove(width)
        rest = list(sizes)
        for size in tokens:
            if size in rest:
                rest.remove(size)
            else:
                break
        else:
            # A width is a side of the state, where there is one to compare with.
            fits = not matrix or {width, *rest} <= {*matrix, 1}
            if len(rest) <= 1 and fits:
                return True
    return False


def _may_make_state(flow: Dataflow, decays: Decays, state: fx.Node, product: fx.Node, node: fx.Node) -> bool:
    """Whether the shape is that of the state, or that of a vector or a number for each token and head of it."""
    if not is_float(node) or _is_pairwise(flow, node):
        return False
    rest = _wide(node)
    if rest == _wide(state) or is_flat_gate(node, decays.exponentials, product):
        return True
    for size in shape_of(product)[:-2]:
        if size in rest:
            rest.remove(size)
        elif size != 1:
            return False
    widths = set(shape_of(product)[-2:])
    return len(rest) < 2 or (len(rest) == 2 and bool(widths.intersection(rest)))
