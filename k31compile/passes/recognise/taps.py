"""Where a graph multiplies neighbouring inputs by the taps of their channel, and what surrounds such a sum."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from torch import fx

from k31compile.graph.dataflow import ATEN, Dataflow
from k31compile.graph.sizes import is_float, is_tensor, numel_of, shape_of
from k31compile.graph.views import CASTS, behind_views_and_casts, is_view
from k31compile.passes.recognise.contractions import contracted_sizes, is_contraction, operands
from k31compile.passes.recognise.operands import is_parameter

MOST_TAPS = 16
_CONVOLUTIONS = {ATEN.conv1d.default, ATEN.conv1d.padding, ATEN.conv2d.default, ATEN.convolution.default}
_JOINS = {ATEN.cat.default, ATEN.pad.default, ATEN.constant_pad_nd.default}
_WRITES = {ATEN.select_scatter.default, ATEN.slice_scatter.default}
_MOVES = {ATEN.unfold.default, ATEN.index.Tensor, ATEN.masked_fill.Scalar, ATEN.roll.default}
_SHIFTS = {*_JOINS, *_WRITES, *_MOVES, ATEN.slice.Tensor, ATEN.select.int}
_KEEPS = {ATEN.gather.default, *CASTS}
_SIGMOIDS = {ATEN.sigmoid.default, ATEN.exp.default, ATEN.neg.default, ATEN.add.Tensor, ATEN.reciprocal.default}
_MOST_STEPS = 12


@dataclass(frozen=True)
class Taps:
    """`anchor` adds the products up; `rows` is what meets the taps, `picked` what lies between the weight and them."""

    anchor: fx.Node
    weight: fx.Node
    rows: tuple[fx.Node, ...]
    picked: frozenset[fx.Node]

    @property
    def count(self) -> int:
        """The number of taps, W."""
        return min(wide(self.weight))

    @property
    def channels(self) -> int:
        """The number of channels, C."""
        return max(wide(self.weight))


def wide(node: fx.Node) -> list[int]:
    """The sizes of the node but for ones, ascending."""
    return sorted(size for size in shape_of(node) if size != 1)


def find_taps(flow: Dataflow) -> list[Taps]:
    """Every sum over the taps of a channel: convolutions with a group for each, contractions, sums of products."""
    found = [taps for node in flow.nodes if (taps := _convolution(node) or _contraction(node))]
    return [taps for taps in (*found, *_sums_of_products(flow)) if not _depends_on_its_rows(flow, taps)]


def shifted(flow: Dataflow, taps: Taps) -> tuple[set[fx.Node], list[fx.Node]]:
    """What moves the inputs into place above the products, and the windows among it: inputs joined to what was."""
    inside: set[fx.Node] = set()
    windows: dict[fx.Node, None] = {}
    for row in taps.rows:
        way: list[fx.Node] = []
        node = row
        for _ in range(_MOST_STEPS):
            is_copy = node.target is ATEN.copy.default
            stacked = _stacked_slices(node)
            moves = node.target in _SHIFTS or is_view(node) or node.target in CASTS or is_copy or stacked
            if not moves:
                break
            way += [node, *stacked]
            if node.target in _JOINS:
                windows[node] = None
                break
            if node.target in _WRITES:
                windows[node] = None
            # A cache written in place is first copied from what it was made of: rolled, or shifted by one.
            source = stacked[0].args[0] if stacked else node.args[1 if is_copy else 0]
            if not isinstance(source, fx.Node):
                break
            node = source
        while way and way[-1].target not in _SHIFTS:
            way.pop()
        inside.update(way)
    return inside, list(windows)


def _stacked_slices(node: fx.Node) -> list[fx.Node]:
    """The slices of one window that are stacked beside each other, one for each tap."""
    parts = node.args[0] if node.target is ATEN.stack.default else None
    if not isinstance(parts, list | tuple):
        return []
    slices = [part for part in parts if isinstance(part, fx.Node) and part.target is ATEN.slice.Tensor]
    has_one_window = len({part.args[0] for part in slices}) == 1
    return slices if has_one_window and len(slices) == len(parts) else []


def moves_inputs(node: fx.Node) -> bool:
    """Whether the node moves a window on: joins, rolls, cuts or overwrites a part of it."""
    return node.target in _SHIFTS


def is_padded_in_front(taps: Taps) -> bool:
    """Whether the convolution itself pads by all taps but one, so that its first results see no later input."""
    padding = taps.anchor.args[4] if len(taps.anchor.args) > 4 else taps.anchor.kwargs.get("padding", 0)
    first = padding[0] if isinstance(padding, list | tuple) and padding else padding
    return taps.anchor.target in _CONVOLUTIONS and bool(first == taps.count - 1)


def ends_of(flow: Dataflow, taps: Taps) -> list[fx.Node]:
    """Where the operator may end: behind SiLU and what only moves or casts there, farthest first; then before it."""
    before, after = [taps.anchor], list[fx.Node]()
    for node in flow.post_dominators(taps.anchor):
        last = (after or before)[-1]
        if is_tensor(node) and (is_view(node) or node.target in CASTS or _adds_bias(node, taps, last)):
            (after or before).append(node)
        elif not after and _is_silu(flow, last, node):
            after.append(node)
        else:
            break
        if len(after) + len(before) > _MOST_STEPS:
            break
    return [*after[::-1][:4], *before[::-1][:4]]


def kept_from(
    flow: Dataflow, window: fx.Node, inside: Iterable[fx.Node], sizes: Callable[[fx.Node], bool]
) -> list[fx.Node]:
    """What somebody takes from the end of the window to keep it: slices and gathers of the sizes of a state."""
    taken = set(inside)
    found: list[fx.Node] = []
    front = [window]
    for _ in range(4):
        readers = [user for node in front for user in flow.users[node] if user not in taken]
        front = []
        for node in readers:
            if is_float(node) and (is_view(node) or node.target in _KEEPS):
                (found if sizes(node) else front).append(node)
    return found


def _is_weight(node: fx.Node) -> bool:
    sizes = wide(node)
    return is_float(node) and len(sizes) == 2 and 1 < sizes[0] <= MOST_TAPS and len(shape_of(node)) <= 4


def _weight_above(node: fx.Node) -> tuple[fx.Node, frozenset[fx.Node]] | None:
    """The weight that a node is a view or one tap of, as it was first written, and what lies between."""
    way: list[fx.Node] = []
    while is_view(node) or node.target in CASTS:
        source = node.args[0]
        is_done = _is_weight(node) and not (isinstance(source, fx.Node) and _is_weight(source))
        if is_done or not isinstance(source, fx.Node) or len(way) > _MOST_STEPS:
            break
        way.append(node)
        node = source
    return (node, frozenset(way)) if _is_weight(node) else None


def _depends_on_its_rows(flow: Dataflow, taps: Taps) -> bool:
    """Whether the weight is made of what the rows are made of: a mixture by scores is no convolution."""
    if behind_views_and_casts(taps.weight).op == "placeholder":
        return False
    inputs = {n for n in flow.ancestors([taps.weight]) if n.op == "placeholder" and not is_parameter(n)}
    return not inputs.isdisjoint(flow.ancestors(taps.rows))


def _convolution(node: fx.Node) -> Taps | None:
    if node.target not in _CONVOLUTIONS:
        return None
    rows, weight = node.args[0], node.args[1]
    assert isinstance(rows, fx.Node)
    assert isinstance(weight, fx.Node)
    groups = node.kwargs.get("groups", node.args[-1])
    if not isinstance(groups, int) or groups < 2 or shape_of(weight)[:2] != (groups, 1) or not _is_weight(weight):
        return None
    return Taps(node, weight, (rows,), frozenset())


def _contraction(node: fx.Node) -> Taps | None:
    if not is_contraction(node):
        return None
    factors = operands(node)
    if len(factors) != 2 or not all(is_float(factor) for factor in factors):
        return None
    for rows, other in (factors, factors[::-1]):
        if not 1 < len(wide(other)) < 3 or numel_of(rows) <= numel_of(node):
            continue
        found = _weight_above(other)
        if found is None:
            continue
        taps = Taps(node, found[0], (rows,), found[1])
        if numel_of(rows) == numel_of(node) * taps.count and taps.count in contracted_sizes(node):
            return taps
    return None


def _sums_of_products(flow: Dataflow) -> Iterator[Taps]:
    """Sums of as many products as a weight has taps, each with another tap."""
    groups: dict[fx.Node, list[tuple[fx.Node, fx.Node, frozenset[fx.Node]]]] = {}
    weights: dict[fx.Node, fx.Node] = {}
    for node in flow.nodes:
        if node.target is not ATEN.mul.Tensor:
            continue
        tensors = [a for a in node.args if isinstance(a, fx.Node) and is_float(a)]
        for rows, tap in (tensors, tensors[::-1]) if len(tensors) == 2 else ():
            found = _weight_above(tap) if len(wide(tap)) == 1 else None
            sums = _sums_below(flow, node) if found else []
            if found and sums:
                weights[node] = found[0]
                groups.setdefault(sums[-1], []).append((node, rows, found[1]))
                break
    for products in groups.values():
        weight = weights[products[0][0]]
        nodes = [product for product, _, _ in products]
        if len(nodes) != min(wide(weight)) or any(weights[node] is not weight for node in nodes):
            continue
        ways = [_sums_below(flow, node) for node in nodes]
        anchor = next((node for node in ways[0] if all(node in way for way in ways)), None)
        if anchor is not None:
            picked = frozenset().union(*(between for _, _, between in products))
            yield Taps(anchor, weight, tuple(rows for _, rows, _ in products), picked)


def _sums_below(flow: Dataflow, node: fx.Node) -> list[fx.Node]:
    """The additions that a value goes through alone."""
    sums: list[fx.Node] = []
    while len(flow.users[node]) == 1 and len(sums) <= MOST_TAPS + 2:
        node = flow.users[node][0]
        if node.target is not ATEN.add.Tensor:
            break
        sums.append(node)
    return sums


def _adds_bias(node: fx.Node, taps: Taps, last: fx.Node) -> bool:
    others = [a for a in node.args if isinstance(a, fx.Node) and a is not last]
    return node.target is ATEN.add.Tensor and len(others) == 1 and wide(others[0]) == [taps.channels]


def _is_silu(flow: Dataflow, source: fx.Node, node: fx.Node) -> bool:
    """SiLU by name, or a product of the source with what its sigmoid is written as."""
    if node.target is ATEN.silu.default:
        return node.args[0] is source
    if node.target not in (ATEN.mul.Tensor, ATEN.div.Tensor):
        return False
    between = flow.between([source], [node]) - {source, node}
    return 0 < len(between) <= 5 and all(step.target in _SIGMOIDS for step in between)
