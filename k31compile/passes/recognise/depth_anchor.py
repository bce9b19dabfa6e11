"""Where an attention over depth may be: weights from logits that root mean squares of a few rows divide.

The rows whose root mean squares are taken are the sources; what else the weights depend on must be learned vectors.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import fx

from k31compile.graph.dataflow import ATEN, Dataflow
from k31compile.graph.sizes import is_float, numel_of, shape_of
from k31compile.graph.views import CASTS, same_size_base

SOFTMAXES = {ATEN.softmax.int, ATEN._softmax.default}
SDPA = ATEN.scaled_dot_product_attention.default
_JOINS = {ATEN.cat.default, ATEN.stack.default}
_ROOTS = {ATEN.rsqrt.default, ATEN.sqrt.default, ATEN.pow.Tensor_Scalar}
_MEANS = {ATEN.mean.dim, ATEN.sum.dim_IntList}
_ON_THE_WAY_TO_A_MEAN = {ATEN.add.Tensor, ATEN.div.Tensor, ATEN.mul.Tensor, ATEN.clamp_min.default, *CASTS}

# How far above the weights a root may stand, and how much of the graph may be looked at.
_NEAR, _MOST_NODES, _MOST_EXITS = 14, 500, 40


@dataclass(frozen=True)
class Depth:
    """Weights `starts` over `sources` of `width` numbers a row, mixed into `out`."""

    starts: tuple[fx.Node, ...]
    roots: tuple[fx.Node, ...]
    sources: tuple[fx.Node, ...]
    width: int
    out: fx.Node

    @property
    def rows(self) -> int:
        """How many tokens there are, by hints."""
        return numel_of(self.out) // self.width


@dataclass(frozen=True)
class _Root:
    """A root mean square: of which value, and how wide its rows are."""

    of: fx.Node
    width: int


def depth_anchors(flow: Dataflow) -> list[fx.Node]:
    """Softmaxes, attentions and exponentials of as many numbers as some root mean squares were taken."""
    roots = _roots(flow)
    if not roots:
        return []
    counts = {numel_of(root.of) // root.width for root in roots.values()}
    fitting = [node for node in flow.nodes if node not in flow.constants and _fits(node, counts)]
    return [node for node in fitting if _weighs_all(flow, node)]


def _weighs_all(flow: Dataflow, anchor: fx.Node) -> bool:
    """Whether root mean squares are near, and for a softmax of as many rows as it has weights."""
    roots, sources = _roots_above(flow, (anchor,))
    widths = {_roots(flow)[root].width for root in roots}
    if len(widths) != 1:
        return False
    total = sum(numel_of(source) for source in sources)
    if anchor.target is SDPA:
        return total == numel_of(anchor.args[1])  # type: ignore[arg-type]
    return anchor.target not in SOFTMAXES or total == numel_of(anchor) * widths.pop()


def _fits(node: fx.Node, counts: set[int]) -> bool:
    if node.target in SOFTMAXES:
        along = shape_of(node)[_dim(node)] if shape_of(node) else 1
        return along > 1 and bool({numel_of(node), numel_of(node) // along} & counts)
    if node.target is SDPA:
        key = node.args[1]
        return isinstance(key, fx.Node) and numel_of(key) // shape_of(key)[-1] in counts
    return node.target is ATEN.exp.default and numel_of(node) in counts


def depths(flow: Dataflow, anchor: fx.Node) -> Iterator[Depth]:
    """What the anchor may be part of, the nearest output first."""
    for count, out in enumerate(flow.post_dominators(anchor)):
        if count == _MOST_EXITS:
            return
        if not is_float(out):
            continue
        starts = _weights_until(flow, anchor, out)
        roots, sources = _roots_above(flow, starts)
        widths = {_roots(flow)[root].width for root in roots}
        if len(widths) != 1:
            return
        depth = Depth(starts, tuple(roots), tuple(sources), widths.pop(), out)
        if _is_mixture(depth):
            yield depth


def _is_mixture(depth: Depth) -> bool:
    """Whether `out` has a row for each token, and each weight a source."""
    if shape_of(depth.out)[-1:] != (depth.width,):
        return False
    total = sum(numel_of(source) for source in depth.sources)
    count, rest = divmod(total, numel_of(depth.out))
    if rest or count < 2:
        return False
    anchor = depth.starts[0]
    if anchor.target in SOFTMAXES:
        return shape_of(anchor)[_dim(anchor)] == count
    return anchor.target is not SDPA or shape_of(anchor.args[1])[-2] == count  # type: ignore[arg-type]


def _weights_until(flow: Dataflow, anchor: fx.Node, out: fx.Node) -> tuple[fx.Node, ...]:
    """The anchor, and where it is an exponential the later ones that end in `out` too."""
    if anchor.target is not ATEN.exp.default:
        return (anchor,)
    between = flow.nodes[flow.position[anchor] : flow.position[out]]
    others = [node for node in between if node.target is ATEN.exp.default and numel_of(node) == numel_of(anchor)]
    below = flow.ancestors([out], stop=lambda node: flow.position[node] <= flow.position[anchor])
    return tuple(node for node in others if node in below)


def _roots_above(flow: Dataflow, starts: Iterable[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
    """The root mean squares nearest above the weights, and their sources, behind which the search does not look.

    The nearest first: its sources then bar the way to the norms of earlier layers.
    """
    known = _roots(flow)
    found: list[fx.Node] = []
    sources: dict[fx.Node, None] = {}
    while True:
        nearest = _nearest(flow, starts, known, {*found, *sources})
        if not nearest:
            ordered = flow.in_order(found)
            return ordered, list(dict.fromkeys(s for root in ordered for s in joined(known[root].of)))
        found += nearest
        sources.update((source, None) for root in nearest for source in joined(known[root].of))


def _nearest(
    flow: Dataflow, starts: Iterable[fx.Node], known: dict[fx.Node, _Root], barred: set[fx.Node]
) -> list[fx.Node]:
    front, seen = list(starts), set[fx.Node]()
    for _ in range(_NEAR):
        following: dict[fx.Node, None] = {}
        for node in front:
            sources = [s for s in flow.inputs[node] if s not in seen and s not in barred and s not in flow.constants]
            following.update(dict.fromkeys(sources))
        nearest = [node for node in following if node in known]
        seen.update(following)
        if nearest or not following or len(seen) > _MOST_NODES:
            return nearest
        front = list(following)
    return []


def joined(value: fx.Node) -> list[fx.Node]:
    """What was stacked or put side by side to make a value, before views and casts."""
    node = plain(value)
    if node.target not in _JOINS or not isinstance(node.args[0], list | tuple):
        return [node]
    return [source for part in node.args[0] if isinstance(part, fx.Node) for source in joined(part)]


def plain(node: fx.Node) -> fx.Node:
    """What a value was before views of the same size and casts between floating types."""
    while True:
        base = same_size_base(node)
        source = base.args[0] if base.target in CASTS else None
        if not isinstance(source, fx.Node) or not is_float(source):
            return base
        node = source


def _roots(flow: Dataflow) -> dict[fx.Node, _Root]:
    return flow.remember("root mean squares", lambda: dict(_find_roots(flow)))


def _find_roots(flow: Dataflow) -> Iterator[tuple[fx.Node, _Root]]:
    for node in flow.nodes:
        if node in flow.constants or node.op != "call_function":
            continue
        if node.target is ATEN.rms_norm.default and len(node.args[1]) == 1:
            yield node, _Root(node.args[0], shape_of(node)[-1])
        elif node.target in _ROOTS:
            squared = _mean_square(flow, node)
            if squared is not None:
                yield node, _Root(squared, shape_of(squared)[-1])


def _mean_square(flow: Dataflow, root: fx.Node) -> fx.Node | None:
    """The value whose rows' mean square the root is taken of."""
    node = root
    for _ in range(6):
        varying = [source for source in flow.inputs[node] if source not in flow.constants]
        if len(varying) != 1:
            return None
        node = varying[0]
        if node.target in _MEANS:
            return _squared(flow, node) if _is_over_rows(node) else None
        if node.target not in _ON_THE_WAY_TO_A_MEAN and same_size_base(node) is node:
            return None
    return None


def _is_over_rows(mean: fx.Node) -> bool:
    source, dims = mean.args[0], mean.args[1]
    assert isinstance(source, fx.Node)
    rank = len(shape_of(source))
    return isinstance(dims, list | tuple) and len(dims) == 1 and dims[0] in (-1, rank - 1) and shape_of(source)[-1] > 1


def _squared(flow: Dataflow, mean: fx.Node) -> fx.Node | None:
    square = mean.args[0]
    assert isinstance(square, fx.Node)
    varying = set(flow.inputs[square])
    is_power = square.target is ATEN.pow.Tensor_Scalar and square.args[1] == 2
    if len(varying) == 1 and (is_power or square.target in (ATEN.square.default, ATEN.mul.Tensor)):
        return varying.pop()
    return None


def _dim(softmax: fx.Node) -> int:
    dim = softmax.args[1]
    assert isinstance(dim, int)
    return dim
