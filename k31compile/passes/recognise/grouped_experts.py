"""The routed experts in anyone's spelling: gathered, dense and masked, or in groups (K3.1 spec 2.18).

out[n] = sum_j weights[n, j] * down_e(act(gate_e(x_n), up_e(x_n))),    e = experts[n, j]
"""

import functools
from collections.abc import Collection, Iterable, Iterator, Sequence

from torch import fx

from k31compile.graph.confirm import Mismatch, Reading
from k31compile.graph.dataflow import ATEN, Dataflow
from k31compile.graph.region import Region
from k31compile.graph.sizes import is_float, is_integer, numel_of, shape_of
from k31compile.graph.views import CASTS, behind_views_and_casts, is_view, same_size_base
from k31compile.passes.recognise.engine import Demand, Recogniser, outside_users
from k31compile.passes.recognise.expert_matrices import (
    Matrices,
    below_comparisons,
    body_above,
    is_single_matrix,
    orders_of,
    shared_factors,
)
from k31compile.passes.recognise.experts_reading import ExpertsReading, are_projections, assignments
from k31compile.passes.recognise.operands import is_parameter

_MOST_EXITS = 4
_MOST_WEIGHTS = 3
_SELECTIONS = {ATEN.topk.default, ATEN.sort.default, ATEN.sort.stable}
_ARGSORTS = {ATEN.argsort.default, ATEN.argsort.stable}
_OPERATOR = "k31.grouped_experts.default"
_GATING = "k31.moe_gating_top_k.default"


class GroupedExpertsRecogniser(Recogniser):
    """Anchored on the experts of each token, integers [N, k], where stacks or lists of matrices are in the graph."""

    name = "grouped_experts"

    def anchors(self, flow: Dataflow) -> Iterable[fx.Node]:
        """Integers [N, k] as they were first, with some row of floats behind them that experts could have made."""
        if not _matrices(flow) and not shared_factors(flow):
            return []
        found = dict.fromkeys(_as_first_written(node) for node in flow.nodes if _is_pairs(flow, node))
        return [node for node in found if node in flow.live]

    def demands(self, flow: Dataflow, anchor: fx.Node) -> Iterator[Demand]:
        """From the experts to the nearest rows that everything goes through; the weights may depend on the experts."""
        for out in _exits(flow, anchor):
            inside = flow.between([anchor], [out]) - {anchor}
            if any(str(node.target) == _OPERATOR for node in inside):
                return  # a loop over data that was replaced already
            stacks = _stacks_above(flow, anchor, out, inside)
            if are_projections(stacks):
                yield from _demands_of_stacks(flow, anchor, out, inside, stacks)
            else:
                yield from _demands_of_lists(flow, anchor, out, inside)

    def variants(self, flow: Dataflow, leaves: tuple[fx.Node, ...]) -> Iterator[tuple[fx.Node, ...]]:
        """The leaves as they were found."""
        yield leaves

    def readings(self, flow: Dataflow, anchor: fx.Node, region: Region) -> Iterator[Reading]:
        """Told apart by shape, and by running."""
        out = region.outputs[0]
        possible = _stacks(flow, anchor)
        matrices = [leaf for leaf in region.leaves if leaf in possible]
        orders: list[tuple[Matrices, ...]] = [tuple((stack,) for stack in matrices)]
        if not matrices:
            inside = flow.between([anchor], [out]) - {anchor}
            matrices = [leaf for leaf in region.leaves if is_single_matrix(flow, anchor, leaf)]
            orders = orders_of(flow, anchor, inside, matrices)
        rows = [leaf for leaf in region.leaves if leaf is not anchor and leaf not in matrices]
        if anchor not in region.leaves or len(rows) != 2:
            return
        index = {leaf: i for i, leaf in enumerate(region.leaves)}
        named = str([[[index[node] for node in source] for source in sources] for sources in orders])
        for sources in orders:
            for operands in assignments(rows, anchor, sources, out):
                yield ExpertsReading(region, operands, _are_distinct(anchor), named)

    def guards(self, flow: Dataflow, region: Region, reading: Reading) -> None:
        """Nobody else reads what a single expert gives."""
        assert isinstance(reading, ExpertsReading)
        made = flow.descendants([reading.operands.x])
        for node, reader in outside_users(flow, region.nodes, region.outputs).items():
            if node in made and is_float(node):
                raise Mismatch(f"{node.name}, what single experts give, is also read by {reader.name}")

    def resembles(self, flow: Dataflow, anchor: fx.Node) -> bool:
        """Two or three matrices an expert are used with these integers, not with others made of them."""
        if any(_is_pairs(flow, source) for source in flow.inputs[anchor]):
            return False
        for out in _exits(flow, anchor):
            inside = flow.between([anchor], [out]) - {anchor}
            if inside & _other_choices(flow):
                return False  # what lies behind another choice is that one's: integers of an indexer end there
            if are_projections(_stacks_above(flow, anchor, out, inside)):
                return True
            _, singles = body_above(flow, anchor, out, inside, ())
            if any(are_projections(sources) for sources in orders_of(flow, anchor, inside, singles)):
                return True
        return False

    def hint(self, reason: str) -> str:
        """What to change."""
        return "the recognised form is sum_j w_j down_e(act(gate_e(x), up_e(x))) with SiTU or SwiGLU"


def _demands_of_stacks(
    flow: Dataflow, anchor: fx.Node, out: fx.Node, inside: set[fx.Node], stacks: Sequence[Matrices]
) -> Iterator[Demand]:
    nodes = [stack for (stack,) in stacks]
    # Tokens are mostly as wide as the result; what is as wide as some projection may be an expert's inside.
    for widths in ({shape_of(out)[1]}, {size for stack in nodes for size in shape_of(stack)[1:]}):
        eligible = functools.cache(functools.partial(_may_be_leaf, shape_of(anchor), frozenset(widths)))
        for weights in _weights_inside(flow, anchor, inside):
            above = flow.ancestors(weights, stop=lambda node: node is anchor)
            yield Demand((out,), frozenset(inside - above), eligible, (anchor, *nodes, *weights))


def _demands_of_lists(flow: Dataflow, anchor: fx.Node, out: fx.Node, inside: set[fx.Node]) -> Iterator[Demand]:
    """All experts are written out, so that what lies between the leaves is known, and is all of it the core."""
    masked = below_comparisons(flow, anchor, inside)
    for weights in _weights_inside(flow, anchor, inside - masked.keys()):
        body, matrices = body_above(flow, anchor, out, inside, weights)
        if not any(are_projections(sources) for sources in orders_of(flow, anchor, inside, matrices)):
            continue
        widths = frozenset(size for matrix in matrices for size in shape_of(matrix))
        eligible = functools.cache(functools.partial(_may_be_leaf, shape_of(anchor), widths))
        yield Demand((out,), frozenset(body), eligible, (anchor, *matrices, *weights))


def _other_choices(flow: Dataflow) -> set[fx.Node]:
    """Softmaxes, and choices of the best: no expert's product holds one."""
    targets = {ATEN.softmax.int, ATEN._softmax.default, ATEN.topk.default, ATEN.scaled_dot_product_attention.default}
    return flow.remember("other choices", lambda: {node for node in flow.nodes if node.target in targets})


def _matrices(flow: Dataflow) -> set[fx.Node]:
    """Tensors of the caller that may hold one matrix for each expert."""

    def find() -> set[fx.Node]:
        return {node for node in flow.nodes if node.op == "placeholder" and is_float(node) and len(shape_of(node)) == 3}

    return flow.remember("matrices", find)


def _stacks(flow: Dataflow, anchor: fx.Node) -> set[fx.Node]:
    """Those that are not the tokens [B, T, L] themselves."""
    rows = shape_of(anchor)[0]
    return {node for node in _matrices(flow) if is_parameter(node) or shape_of(node)[0] * shape_of(node)[1] != rows}


def _is_pairs(flow: Dataflow, node: fx.Node) -> bool:
    return is_integer(node) and len(shape_of(node)) == 2 and node not in flow.constants


def _source(node: fx.Node) -> fx.Node | None:
    """The integers that a view or a cast was made from, where they are the same and all of them."""
    if not (is_view(node) or node.target in CASTS) or not node.args:
        return None
    source = node.args[0]
    same = isinstance(source, fx.Node) and is_integer(source) and numel_of(source) == numel_of(node)
    return source if same and isinstance(source, fx.Node) else None


def _as_first_written(node: fx.Node) -> fx.Node:
    """The first integers [N, k] of a chain of views and casts."""
    first, current = node, _source(node)
    while current is not None:
        if shape_of(current) == shape_of(node):
            first = current
        current = _source(current)
    return first


def _exits(flow: Dataflow, anchor: fx.Node) -> list[fx.Node]:
    """Rows of floats, one for each token, that everything made from the experts goes through, the nearest first."""
    rows = shape_of(anchor)[0]
    found = []
    for node in flow.post_dominators(anchor):
        if is_float(node) and len(shape_of(node)) == 2 and shape_of(node)[0] == rows:
            found.append(node)
        if len(found) == _MOST_EXITS:
            break
    return found


def _weights_inside(flow: Dataflow, anchor: fx.Node, inside: Collection[fx.Node]) -> Iterator[tuple[fx.Node, ...]]:
    """None where the experts did not make the weights; or weights that were made from the experts, the last first."""
    yield ()
    made = [node for node in flow.in_order(inside) if is_float(node) and shape_of(node) == shape_of(anchor)]
    for node in made[::-1][:_MOST_WEIGHTS]:
        yield (node,)


def _stacks_above(flow: Dataflow, anchor: fx.Node, out: fx.Node, inside: Collection[fx.Node]) -> list[Matrices]:
    """The stacks that `out` is made with, without those behind the tokens and the weights."""
    stacks, (rows, width) = _stacks(flow, anchor), shape_of(out)

    def is_row(node: fx.Node) -> bool:
        if node is anchor:
            return True
        plain = is_float(node) and shape_of(node) in (shape_of(anchor), (rows, width)) and node not in inside
        return plain and not made_with_a_stack(behind_views_and_casts(node))

    def made_with_a_stack(product: fx.Node) -> bool:
        return any(behind_views_and_casts(source) in stacks for source in flow.inputs[product])

    return [(stack,) for stack in flow.in_order(flow.ancestors([out], stop=is_row) & stacks)]


def _may_be_leaf(pairs: tuple[int, ...], widths: Collection[int], node: fx.Node) -> bool:
    """Whether the shape is that of weights or of tokens."""
    shape = shape_of(node)
    if not is_float(node) or len(shape) != 2 or shape[0] != pairs[0]:
        return False
    return shape == pairs or shape[1] in widths


def _are_distinct(experts: fx.Node) -> bool:
    """Whether no row can name an expert twice: places that a top-k or a sort gave."""
    node = same_size_base(experts)
    while node.target in (*CASTS, ATEN.slice.Tensor) and isinstance(node.args[0], fx.Node):
        node = same_size_base(node.args[0])
    if node.target in _ARGSORTS:
        return True
    maker = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
    if maker is None or getattr(node.target, "__name__", "") != "getitem" or node.args[1] != 1:
        return False
    return maker.target in _SELECTIONS or str(maker.target) == _GATING
