"""Root mean squares in a graph, what is multiplied to them, and what opens or closes a gate."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from torch import fx

from k31compile.graph.dataflow import ATEN, Dataflow
from k31compile.graph.region import Region
from k31compile.graph.sizes import is_float, numel_of, shape_of
from k31compile.graph.views import CASTS, is_view

_ROOTS = {ATEN.rsqrt.default, ATEN.sqrt.default}
_POWERS = {ATEN.pow.Tensor_Scalar}
_MEANS = {ATEN.mean.dim, ATEN.sum.dim_IntList, ATEN.linalg_vector_norm.default}
_PRODUCTS = {ATEN.mul.Tensor, ATEN.mul.Scalar, ATEN.div.Tensor, ATEN.div.Scalar}
# What stands between a mean of squares and its root, or between a gate's sigmoid and the product it goes into.
_SINGLE = {
    *_PRODUCTS,
    *_POWERS,
    *CASTS,
    ATEN.add.Tensor,
    ATEN.add.Scalar,
    ATEN.neg.default,
    ATEN.reciprocal.default,
    ATEN.square.default,
    ATEN.clamp_min.default,
    ATEN.clamp.default,
}
_OPENERS = {ATEN.sigmoid.default, ATEN.silu.default, ATEN.exp.default}
_OTHER_OPENERS = {
    ATEN.tanh.default,
    ATEN.gelu.default,
    ATEN.hardsigmoid.default,
    ATEN.hardswish.default,
    ATEN.softplus.default,
}
_MOST_STEPS = 10
_LARGEST_EPS = 0.1


@dataclass(frozen=True)
class Norm:
    """`anchor` is the root (or the whole norm) of the mean `squares` over the last axis of `rows`.

    `chain` is what each of its values goes through alone: products, casts and views.
    """

    anchor: fx.Node
    squares: fx.Node
    rows: fx.Node
    chain: tuple[fx.Node, ...]

    @property
    def width(self) -> int:
        """The size of the axis that is normalised."""
        return shape_of(self.rows)[-1]


@dataclass(frozen=True)
class Gate:
    """`opener` makes the gate; `after` tells whether it meets the normed rows rather than the rows before."""

    opener: fx.Node
    after: bool

    @property
    def is_served(self) -> bool:
        """Whether it may be a sigmoid or SiLU."""
        return self.opener.target in _OPENERS


def norm_of(flow: Dataflow, node: fx.Node) -> Norm | None:
    """The norm that `node` is the root of, or None where it is none."""
    if node.target is ATEN.rms_norm.default:
        rows = node.args[0]
        assert isinstance(rows, fx.Node)
        is_last = node.args[1] == [shape_of(rows)[-1]]
        return Norm(node, node, rows, _chain(flow, node)) if is_last else None
    is_power = node.target in _POWERS and node.args[1] in (0.5, -0.5)
    if node.target not in _ROOTS and not is_power:
        return None
    squares = _mean_above(node)
    if squares is None:
        return None
    rows = squares.args[0]
    assert isinstance(rows, fx.Node)
    return Norm(node, squares, rows, _chain(flow, node))


def gates_of(flow: Dataflow, norm: Norm) -> list[Gate]:
    """What opens a gate on the normed rows, nearest first, then what opens one on the rows before."""
    above = [source for node in norm.chain for source in flow.inputs[node] if source not in norm.chain]
    size = numel_of(norm.rows)
    later = [node for node in _openers(flow, above, {norm.anchor, norm.squares}) if numel_of(node) == size]
    before = [node for node in _openers(flow, [norm.rows], set()) if numel_of(node) == size]
    return [Gate(node, True) for node in later] + [Gate(node, False) for node in before]


def ends_of(norm: Norm) -> list[fx.Node]:
    """The products and casts that a norm goes through alone and that have its rows' size, the nearest first."""
    size = numel_of(norm.rows)
    return [node for node in norm.chain if not is_view(node) and is_float(node) and numel_of(node) == size]


def small_constants(region: Region) -> list[float]:
    """The numbers in the region that may be eps."""
    numbers: dict[float, None] = {}
    for node in region.nodes:
        for argument in (*node.args, *node.kwargs.values()):
            if isinstance(argument, float) and 0 < argument < _LARGEST_EPS:
                numbers[argument] = None
    return list(numbers)


def before_casts(leaf: fx.Node, with_views: bool = False) -> fx.Node:
    """What a value was before it was cast, or also before it was viewed otherwise, all of it."""
    node = leaf
    while node.target in CASTS or (with_views and is_view(node)):
        source = node.args[0]
        if not isinstance(source, fx.Node) or not is_float(source) or numel_of(source) != numel_of(node):
            break
        node = source
    return node


def opening_of(opener: fx.Node) -> fx.Node:
    """Where the opener begins: a sigmoid that is written with `exp` begins at the minus before it."""
    source = opener.args[0]
    if opener.target is ATEN.exp.default and isinstance(source, fx.Node):
        is_scaled = source.target in _PRODUCTS and not isinstance(source.args[1], fx.Node)
        if source.target is ATEN.neg.default or is_scaled:
            return source
    return opener


def _mean_above(node: fx.Node) -> fx.Node | None:
    """The sum or mean over a last axis that a root is taken of, with eps or a factor between."""
    source = node
    for _ in range(_MOST_STEPS):
        tensors = [a for a in source.args[:2] if isinstance(a, fx.Node) and is_float(a)]
        if len(tensors) != 1:
            return None
        source = tensors[0]
        if source.target in _MEANS:
            rows = source.args[0]
            wide = shape_of(rows) if isinstance(rows, fx.Node) else ()
            is_last = len(wide) > 1 and wide[-1] > 1 and numel_of(source) * wide[-1] == prod(wide)
            return source if is_last and shape_of(source)[: len(wide) - 1] == wide[:-1] else None
        if source.target not in _SINGLE and not is_view(source):
            return None
    return None


def _chain(flow: Dataflow, anchor: fx.Node) -> tuple[fx.Node, ...]:
    """From the anchor on, each node that alone reads the one before, as long as it multiplies, casts or moves."""
    chain = [anchor]
    while True:
        readers = [user for user in flow.users[chain[-1]] if user in flow.live]
        if len(readers) != 1:
            return tuple(chain)
        node = readers[0]
        if not is_view(node) and node.target not in {*_PRODUCTS, *CASTS, ATEN.reciprocal.default}:
            return tuple(chain)
        chain.append(node)


def _openers(flow: Dataflow, starts: Iterable[fx.Node], stops: set[fx.Node]) -> list[fx.Node]:
    """The sigmoids and their like above some nodes, through single values and products only."""
    found: dict[fx.Node, None] = {}
    seen = set(stops)
    front = list(starts)
    for _ in range(_MOST_STEPS):
        following: list[fx.Node] = []
        for node in front:
            if node in seen or node in flow.constants:
                continue
            seen.add(node)
            if node.target in _OPENERS or node.target in _OTHER_OPENERS:
                found[node] = None
            elif node.target in _SINGLE or is_view(node):
                tensors = [source for source in flow.inputs[node] if is_float(source)]
                is_sum = node.target is ATEN.add.Tensor and len(tensors) > 1
                following.extend([] if is_sum else tensors)
        front = following
    return list(found)
