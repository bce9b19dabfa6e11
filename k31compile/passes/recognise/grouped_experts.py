"""The routed experts in anyone's spelling: gathered, dense and masked, or in groups (K3.1 spec 2.18).

out[n] = sum_j weights[n, j] * down_e(act(gate_e(x_n), up_e(x_n))),    e = experts[n, j]
"""

import functools
import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence

from torch import fx

from k31compile.graph.confirm import Mismatch, Reading
from k31compile.graph.dataflow import ATEN, Dataflow
from k31compile.graph.region import Region
from k31compile.graph.sizes import is_float, numel_of, shape_of
from k31compile.graph.views import CASTS, behind_views_and_casts, same_size_base
from k31compile.passes.recognise.engine import Demand, Recogniser, outside_users
from k31compile.passes.recognise.expert_ends import (
    integers_behind,
    is_addition,
    is_far_above,
    is_pairs,
    nearest_exits,
    other_choices,
    refuse_biases,
    rows_below,
    starts_of,
)
from k31compile.passes.recognise.expert_matrices import (
    Matrices,
    below_comparisons,
    body_above,
    comparisons_with,
    has_arithmetic,
    is_elementwise,
    is_single_matrix,
    orders_of,
    shared_factors,
)
from k31compile.passes.recognise.experts_reading import ExpertsReading, are_projections, assignments
from k31compile.passes.recognise.operands import is_parameter

_MOST_SETS = 4
_MOST_WEIGHTS = 3
_SELECTIONS = {ATEN.topk.default, ATEN.sort.default, ATEN.sort.stable}
_ARGSORTS = {ATEN.argsort.default, ATEN.argsort.stable}
_GATING = "k31.moe_gating_top_k.default"
_EXPERTS = "k31.grouped_experts.default"


class GroupedExpertsRecogniser(Recogniser):
    """Anchored on the experts of each token, integers [N, k], where stacks or lists of matrices are in the graph."""

    name = "grouped_experts"
    anchors_stay = True

    def anchors(self, flow: Dataflow) -> Iterable[fx.Node]:
        """The experts as they were first, flat ones before others, that something else than experts of ours reads."""
        if not _matrices(flow) and not shared_factors(flow):
            return []
        found = dict.fromkeys(_as_first_written(node) for node in flow.nodes if is_pairs(flow, node))
        open_ones = [node for node in found if node in flow.live and not _is_served(flow, node)]
        return sorted(open_ones, key=lambda node: len(shape_of(node)))

    def demands(self, flow: Dataflow, anchor: fx.Node) -> Iterator[Demand]:
        """From the experts to the nearest rows that everything goes through; the weights may depend on the experts."""
        for out in itertools.chain(nearest_exits(flow, anchor), _exits_of_sets(flow, anchor)):
            inside = between(flow, anchor, out)
            if _is_served_before(flow, anchor, out):
                continue
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
        inside = between(flow, anchor, out)
        starts = [node for node in starts_of(flow, out, inside) if node in region.leaves]
        possible = _stacks(flow, anchor)
        matrices = [leaf for leaf in region.leaves if leaf in possible]
        orders: list[tuple[Matrices, ...]] = [tuple((stack,) for stack in matrices)]
        if not matrices:
            single = [leaf for leaf in region.leaves if is_single_matrix(flow, anchor, leaf)]
            matrices = [leaf for leaf in single if leaf not in starts]
            orders = orders_of(flow, anchor, inside, set(region.nodes), matrices)
        rows = [leaf for leaf in region.leaves if leaf is not anchor and leaf not in matrices]
        if anchor not in region.leaves or len(rows) > 3 or len(starts) > 1:
            return
        if is_elementwise(behind_views_and_casts(anchor)) and has_arithmetic(anchor, region.nodes):
            return  # numbers half-way to the experts' may be any; the last of them are an anchor too
        for sources in orders:
            for operands in assignments(rows, anchor, sources, out, starts[0] if starts else None):
                yield ExpertsReading(region, operands, _are_distinct(anchor))

    def guards(self, flow: Dataflow, region: Region, reading: Reading) -> None:
        """Nobody else reads what a single expert gives."""
        assert isinstance(reading, ExpertsReading)
        made = flow.descendants([reading.operands.x])
        for node, reader in outside_users(flow, region.nodes, region.outputs).items():
            if node in made and is_float(node):
                raise Mismatch(f"{node.name}, what single experts give, is also read by {reader.name}")

    def resembles(self, flow: Dataflow, anchor: fx.Node) -> bool:
        """Two or three matrices an expert are used with these integers, not with others made of them."""
        if any(is_pairs(flow, source) for source in flow.inputs[anchor]) and integers_behind(anchor) is None:
            return False
        if any(len(shape_of(anchor)) > len(shape_of(user)) > 1 for user in flow.users[anchor] if is_pairs(flow, user)):
            return False
        for out in nearest_exits(flow, anchor):
            inside = between(flow, anchor, out)
            if inside & other_choices(flow):
                return False  # what lies behind another choice is that one's: integers of an indexer end there
            if are_projections(_stacks_above(flow, anchor, out, inside)):
                return True
            body, singles = body_above(flow, anchor, out, inside, ())
            if any(are_projections(sources) for sources in orders_of(flow, anchor, inside, body, singles)):
                return True
        return False

    def hint(self, reason: str) -> str:
        """What to change."""
        return "the recognised form is sum_j w_j down_e(act(gate_e(x), up_e(x))) with SiTU or SwiGLU"


def between(flow: Dataflow, anchor: fx.Node, out: fx.Node) -> set[fx.Node]:
    """What lies between the experts and a row made with them, the row among it; asked for time and again."""
    name = f"between {anchor.name} and {out.name}"
    return flow.remember(name, lambda: flow.between([anchor], [out]) - {anchor})


def _demands_of_stacks(
    flow: Dataflow, anchor: fx.Node, out: fx.Node, inside: set[fx.Node], stacks: Sequence[Matrices]
) -> Iterator[Demand]:
    nodes, starts = [stack for (stack,) in stacks], starts_of(flow, out, inside)
    # Tokens are mostly as wide as the result; what is as wide as some projection may be an expert's inside.
    for widths in ({shape_of(out)[-1]}, {size for stack in nodes for size in shape_of(stack)[1:]}):
        eligible = functools.cache(functools.partial(_may_be_leaf, shape_of(anchor), frozenset(widths)))
        for weights in _weights_inside(flow, anchor, inside):
            above = flow.ancestors(weights, stop=lambda node: node is anchor)
            yield Demand((out,), frozenset(inside - above), eligible, (anchor, *nodes, *weights), given=starts)
    refuse_biases(flow, _body_of_stacks(flow, anchor, out, inside), nodes, shape_of(nodes[0])[0])


def _demands_of_lists(flow: Dataflow, anchor: fx.Node, out: fx.Node, inside: set[fx.Node]) -> Iterator[Demand]:
    """All experts are written out, so that what lies between the leaves is known, and is all of it the core."""
    masked, starts = below_comparisons(flow, anchor, inside), starts_of(flow, out, inside)
    for weights in _weights_inside(flow, anchor, inside - masked.keys()):
        body, matrices = body_above(flow, anchor, out, inside, (*weights, *starts))
        orders = orders_of(flow, anchor, inside, body, matrices)
        if not any(are_projections(sources) for sources in orders):
            continue
        refuse_biases(flow, body, matrices, len(orders[0][0]))
        widths = frozenset(size for matrix in matrices for size in shape_of(matrix))
        eligible = functools.cache(functools.partial(_may_be_leaf, shape_of(anchor), widths))
        yield Demand((out,), frozenset(body), eligible, (anchor, *matrices, *weights), given=starts)


def _matrices(flow: Dataflow) -> set[fx.Node]:
    """Tensors of the caller that may hold one matrix for each expert."""

    def find() -> set[fx.Node]:
        return {node for node in flow.nodes if node.op == "placeholder" and is_float(node) and len(shape_of(node)) == 3}

    return flow.remember("matrices", find)


def _stacks(flow: Dataflow, anchor: fx.Node) -> set[fx.Node]:
    """Those that are not the tokens [B, T, L] themselves."""
    rows = numel_of(anchor) // shape_of(anchor)[-1]

    def find() -> set[fx.Node]:
        return {node for node in _matrices(flow) if is_parameter(node) or shape_of(node)[0] * shape_of(node)[1] != rows}

    return flow.remember(f"stacks that are not {rows} tokens", find)


def _is_served(flow: Dataflow, anchor: fx.Node) -> bool:
    """Whether all that reads the integers are experts of ours."""
    readers = list(flow.users[anchor])
    for node in readers:
        if integers_behind(node) is not None:
            readers.extend(flow.users[node])
    ends = [node for node in readers if integers_behind(node) is None]
    return bool(ends) and all(str(node.target) == _EXPERTS for node in ends)


def _as_first_written(node: fx.Node) -> fx.Node:
    """The first integers of a shape in a chain of views and casts."""
    first, current = node, integers_behind(node)
    while current is not None:
        if shape_of(current) == shape_of(node):
            first = current
        current = integers_behind(current)
    return first


def _exits_of_sets(flow: Dataflow, anchor: fx.Node) -> Iterator[fx.Node]:
    """Where one router serves several sets of matrices: the last row made with each, and the first."""
    nearest = nearest_exits(flow, anchor)
    if any(_is_set(flow, anchor, out) and not _is_served_before(flow, anchor, out) for out in nearest):
        return  # there is one set, and it was looked at
    below = flow.descendants([anchor])

    def is_whole(out: fx.Node) -> bool:
        added = [node for node in flow.users[out] if is_addition(node) and shape_of(node) == shape_of(out)]
        others = {other for node in added for other in flow.inputs[node] if other is not out and other in below}
        return all(_is_set(flow, anchor, other) for other in others)

    sets: dict[frozenset[fx.Node], list[fx.Node]] = {}
    for out in rows_below(flow, anchor):
        sets.setdefault(_matrices_above(flow, anchor, out), []).append(out)
    largest = sorted((found for found in sets if found), key=len, reverse=True)
    ends = dict.fromkeys(out for found in largest for out in (sets[found][0], sets[found][-1]))
    yield from itertools.islice((out for out in ends if out not in nearest and is_whole(out)), _MOST_SETS)


def _matrices_above(flow: Dataflow, anchor: fx.Node, out: fx.Node) -> frozenset[fx.Node]:
    """Stacks or single matrices that the row is made with."""
    inside = between(flow, anchor, out)
    stacks = _stacks_above(flow, anchor, out, inside)
    if stacks:
        return frozenset(stack for (stack,) in stacks)
    return frozenset(body_above(flow, anchor, out, inside, starts_of(flow, out, inside))[1])


def _is_served_before(flow: Dataflow, anchor: fx.Node, out: fx.Node) -> bool:
    """Whether experts of ours lie between."""
    return any(str(node.target) == _EXPERTS for node in between(flow, anchor, out))


def _is_set(flow: Dataflow, anchor: fx.Node, out: fx.Node) -> bool:
    """Whether the row could be what a whole set of experts gives."""
    if _is_served_before(flow, anchor, out):
        return True
    inside = between(flow, anchor, out)
    stacks = _stacks_above(flow, anchor, out, inside)
    body, singles = body_above(flow, anchor, out, inside, starts_of(flow, out, inside))
    numbers = set(comparisons_with(anchor, inside).values())
    orders = orders_of(flow, anchor, inside, body, singles)
    named = [sources for sources in orders if not numbers or len(sources[0]) == len(numbers)]
    return are_projections(stacks) or any(map(are_projections, named))


def _weights_inside(flow: Dataflow, anchor: fx.Node, inside: Collection[fx.Node]) -> Iterator[tuple[fx.Node, ...]]:
    """None where the experts did not make the weights; or weights that were made from the experts, the last first."""
    yield ()
    made = [node for node in flow.in_order(inside) if is_float(node) and shape_of(node) == shape_of(anchor)]
    for node in made[::-1][:_MOST_WEIGHTS]:
        yield (node,)


def _stacks_above(flow: Dataflow, anchor: fx.Node, out: fx.Node, inside: Collection[fx.Node]) -> list[Matrices]:
    """The stacks that `out` is made with, without those behind the tokens and the weights."""
    return [(stack,) for stack in flow.in_order(_body_of_stacks(flow, anchor, out, inside) & _stacks(flow, anchor))]


def _body_of_stacks(flow: Dataflow, anchor: fx.Node, out: fx.Node, inside: Collection[fx.Node]) -> set[fx.Node]:
    """What `out` is made of, down to stacks and to rows that are made without them."""
    stacks, shapes = _stacks(flow, anchor), (shape_of(anchor), shape_of(out))

    def made_with_a_stack(product: fx.Node) -> bool:
        return any(behind_views_and_casts(source) in stacks for source in flow.inputs[product])

    def find() -> set[fx.Node]:
        starts = starts_of(flow, out, inside)

        def is_leaf(node: fx.Node) -> bool:
            if node is anchor or node in starts or is_far_above(flow, anchor, node):
                return True
            plain = node not in inside and shape_of(node) in shapes and is_float(node)
            return plain and not made_with_a_stack(behind_views_and_casts(node))

        return flow.ancestors([out], stop=is_leaf)

    # `inside` is what lies between the two, whoever asks.
    return flow.remember(f"body of stacks from {anchor.name} to {out.name}", find)


def _may_be_leaf(pairs: tuple[int, ...], widths: Collection[int], node: fx.Node) -> bool:
    """Whether the shape is that of weights or of tokens."""
    shape = shape_of(node)
    if not is_float(node) or len(shape) != len(pairs) or shape[:-1] != pairs[:-1]:
        return False
    return shape == pairs or shape[-1] in widths


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
