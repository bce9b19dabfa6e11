"""From an operand of a fused operator up to the product with a weight that it comes from, and what lies between."""

from collections.abc import Collection, Iterable, Sequence

from torch import fx

from k31compile.graph.dataflow import ATEN, Dataflow
from k31compile.graph.sizes import is_float, numel_of
from k31compile.graph.views import CASTS, behind_views_and_casts, is_view
from k31compile.graph.weights import weights_among
from k31compile.passes.recognise.contractions import is_contraction, operands
from k31compile.passes.recognise.operands import is_cache

_WRITES = {
    ATEN.index_put.default,
    ATEN.index_copy.default,
    ATEN.scatter.src,
    ATEN.slice_scatter.default,
    ATEN.select_scatter.default,
}
_READS_OF_A_CACHE = {
    ATEN.index.Tensor,
    ATEN.index_select.default,
    ATEN.embedding.default,
    ATEN.gather.default,
    ATEN.take_along_dim.default,
    ATEN.masked_fill.Scalar,
}
_NEW = {
    ATEN.zeros.default,
    ATEN.empty.memory_format,
    ATEN.full.default,
    ATEN.new_zeros.default,
    ATEN.zeros_like.default,
}
_ADDS = {ATEN.add.Tensor, ATEN.sub.Tensor}
_SUMS = {ATEN.sum.dim_IntList, ATEN.sum.default}
# Between an operand and its projection stand a norm, a rotation and a write, not half a model.
_FAR = 400


def weights_of(flow: Dataflow) -> set[fx.Node]:
    """The nodes that come from parameters alone."""
    return flow.remember("weights", lambda: weights_among(flow.nodes))


def is_product(flow: Dataflow, node: fx.Node) -> bool:
    """Whether the node is a sum of products of an activation and a weight."""
    if not is_contraction(node):
        return False
    weights, factors = weights_of(flow), operands(node)
    return any(f in weights for f in factors) and any(f not in weights and f not in flow.constants for f in factors)


def activation_of(flow: Dataflow, product: fx.Node) -> fx.Node:
    """What a product multiplies its weight with, before views and casts."""
    weights = weights_of(flow)
    factor = next(f for f in operands(product) if f not in weights and f not in flow.constants)
    return behind_views_and_casts(factor)


def nearest_products(flow: Dataflow, end: fx.Node) -> set[fx.Node]:
    """The products met first on every way up from `end`, itself among them.

    Empty where something of full size is added on the way that none of them made: a residual stream is not projected.
    """
    weights = weights_of(flow)
    found: set[fx.Node] = set()
    passed: set[fx.Node] = set()
    todo = [end]
    while todo and len(passed) < _FAR:
        node = todo.pop()
        if node in passed or node in flow.constants or node in weights:
            continue
        passed.add(node)
        if is_product(flow, node):
            found.add(node)
        else:
            todo.extend(flow.inputs[node])
    own = flow.descendants(found, stop=lambda node: node not in passed)
    strangers = (
        source
        for node in own - found
        if node in passed and node.target in _ADDS
        for source in flow.inputs[node]
        if source not in own and is_float(source) and source not in flow.constants and source not in weights
        if numel_of(source) == numel_of(node)
    )
    return set() if any(strangers) else found


def nodes_of(product: fx.Node) -> tuple[fx.Node, ...]:
    """The nodes that a product consists of: `sum(a * b)` is two."""
    if product.target in _SUMS and isinstance(product.args[0], fx.Node):
        return product.args[0], product
    return (product,)


def strictly_between(flow: Dataflow, starts: Iterable[fx.Node], ends: Iterable[fx.Node]) -> set[fx.Node]:
    """All nodes on a path from `starts` to `ends`, both included, also where only a shape is read.

    So no path leaves the set and comes back.
    """
    first = set(starts)
    if not first:
        return set()
    earliest = min(flow.position[node] for node in first)
    above: set[fx.Node] = set()
    todo = list(ends)
    while todo:
        node = todo.pop()
        if node not in above and flow.position[node] >= earliest:
            above.add(node)
            todo.extend(node.all_input_nodes)
    inside: set[fx.Node] = set()
    for node in flow.in_order(above):
        if node in first or any(source in inside for source in node.all_input_nodes):
            inside.add(node)
    return inside


def moved_from(node: fx.Node, among: Collection[fx.Node]) -> fx.Node | None:
    """The node among some whose elements `node` moves, casts or copies, or None where it computes."""
    if is_view(node) or node.target in CASTS:
        source = node.args[0]
    elif node.target is ATEN.copy.default:
        source = node.args[1]
    elif node.target is ATEN.cat.default:
        # An empty cache in front is nothing.
        wide = [part for part in node.all_input_nodes if numel_of(part)]
        source = wide[0] if len(wide) == 1 else None
    else:
        return None
    return source if isinstance(source, fx.Node) and source in among else None


def is_write(node: fx.Node) -> bool:
    """Whether the node writes to a cache: in place, by appending to it, or to a new one that the caller gets."""
    if node.target is ATEN.cat.default:
        old = [is_cache(part) for part in node.all_input_nodes]
        return any(old) and not all(old)
    destination = node.args[0] if node.target in _WRITES else None
    if not isinstance(destination, fx.Node):
        return False
    base = behind_views_and_casts(destination)
    return is_cache(base) or (base.target in _NEW and _leaves_the_graph(node)) or is_write(base)


def _leaves_the_graph(node: fx.Node) -> bool:
    return any(
        user.op == "output" or user.target is ATEN.copy_.default or (is_view(user) and _leaves_the_graph(user))
        for user in node.users
    )


def end_of_write(operand: fx.Node) -> fx.Node:
    """The written cache that an operand is read from, in pages or as it lies; the operand where none is written."""
    node = end = operand
    while True:
        if is_write(node):
            return end
        reads = node.target in _READS_OF_A_CACHE
        if not reads and not is_view(node) and node.target not in CASTS:
            return operand
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node):
            return operand
        node = source
        end = node if reads else end


def reach_of(nodes: Sequence[fx.Node], ends: dict[fx.Node, frozenset[str]]) -> dict[fx.Node, frozenset[str]]:
    """For each of some nodes, in order, the names of the ends that it reaches through them."""
    reached: dict[fx.Node, frozenset[str]] = {}
    for node in reversed(nodes):
        below = [reached[user] for user in node.users if user in reached]
        reached[node] = frozenset().union(ends.get(node, frozenset()), *below)
    return reached
