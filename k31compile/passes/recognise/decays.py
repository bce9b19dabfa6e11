"""Where a graph forgets: exponentials of a gate, grouped by gate, and what they multiply (K3.1 spec 2.4, 2.5)."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import networkx as nx
from torch import fx

from k31compile.graph.dataflow import ATEN, Dataflow
from k31compile.graph.sizes import is_float, is_tensor, numel_of, shape_of
from k31compile.graph.views import CASTS, behind_views_and_casts, is_view
from k31compile.passes.recognise.contractions import is_contraction

_EXPONENTIALS = {ATEN.exp.default, ATEN.exp2.default, ATEN.pow.Scalar}
_CUMULATIVE = {ATEN.cumsum.default}
_PRODUCTS_WITH_A_CONSTANT = {ATEN.matmul.default, ATEN.mm.default, ATEN.bmm.default, ATEN.einsum.default}
# What stands between a gate and its exponential in somebody's code: sums, differences, masks and views of it.
_PLUMBING = {
    *_CUMULATIVE,
    ATEN.add.Tensor,
    ATEN.sub.Tensor,
    ATEN.mul.Tensor,
    ATEN.div.Tensor,
    ATEN.neg.default,
    ATEN.where.self,
    ATEN.masked_fill.Scalar,
    ATEN.masked_fill.Tensor,
    ATEN.tril.default,
    ATEN.constant_pad_nd.default,
    ATEN.pad.default,
    ATEN._to_copy.default,
    ATEN.to.dtype,
    ATEN.index.Tensor,
    ATEN.index_select.default,
    ATEN.gather.default,
    ATEN.flip.default,
    ATEN.clamp.default,
    ATEN.clamp_min.default,
    ATEN.clamp_max.default,
    ATEN.cat.default,
    ATEN.stack.default,
}
_SUMS = {
    ATEN.add.Tensor,
    ATEN.sub.Tensor,
    ATEN.addcmul.default,
    ATEN.baddbmm.default,
    ATEN.addmm.default,
    ATEN.addbmm.default,
}
_DIAGONALS = {ATEN.diag_embed.default}
_MATRIX_PRODUCTS = {ATEN.matmul.default, ATEN.bmm.default}
_STATE_PRODUCTS = {ATEN.mul.Tensor, ATEN.einsum.default}
PASSING_STATES = {
    ATEN.index_put.default,
    ATEN.index_copy.default,
    ATEN.slice_scatter.default,
    ATEN.select_scatter.default,
    ATEN.copy.default,
    ATEN.copy_.default,
    ATEN._to_copy.default,
    ATEN.to.dtype,
    ATEN.where.self,
    ATEN.stack.default,
}
WINDOW_NODES = 400
"""How many nodes after the last exponential of a gate its recurrence may still take."""


@dataclass(frozen=True)
class Decays:
    """All exponentials of one gate, and the highest nodes that are sums over it, in the order of the graph.

    Where a sigmoid decays a state as it is, it stands among the exponentials, and `products` are what it decays: all of
    them, or those of one state where it decays several.
    """

    exponentials: tuple[fx.Node, ...]
    cumulative: tuple[fx.Node, ...] = ()
    products: tuple[fx.Node, ...] = ()
    is_shared: bool = False

    @property
    def anchor(self) -> fx.Node:
        """The first exponential, or the first product where a decay is that of several states."""
        return self.products[0] if self.is_shared else self.exponentials[0]

    @property
    def starts(self) -> tuple[fx.Node, ...]:
        """What must lie inside a region: the running sums of the gate, or else its exponentials, or their products."""
        return self.products or self.cumulative or self.exponentials

    @property
    def gate_ends(self) -> tuple[fx.Node, ...]:
        """What depends on the gate and on no other leaf."""
        if not self.products:
            return self.starts
        behind = ((factor, behind_views_and_casts(factor)) for one in self.products for factor in one.all_input_nodes)
        return tuple(factor for factor, base in behind if base in self.exponentials)


def find_decays(flow: Dataflow) -> list[Decays]:
    """Exponentials grouped by the gate that they are taken of, in the order of the graph."""
    groups: dict[frozenset[fx.Node], list[fx.Node]] = {}
    sums: dict[frozenset[fx.Node], set[fx.Node]] = {}
    for node in flow.nodes:
        if node.target in _EXPONENTIALS and node not in flow.constants and is_float(node):
            gate, cumulative = _gate_of(flow, node)
            groups.setdefault(gate, []).append(node)
            sums.setdefault(gate, set()).update(cumulative)
    found = [Decays(tuple(nodes), tuple(flow.in_order(sums[gate]))) for gate, nodes in groups.items()]
    return [*(part for group in found for part in _parts(flow, group)), *_sigmoid_decays(flow)]


def _parts(flow: Dataflow, group: Decays) -> list[Decays]:
    """The group, or its parts where it decays several states: by exponential, or by what one exponential decays."""
    if len(group.exponentials) == 1 and not group.cumulative:
        chains = _chains(flow, state_products(flow, group))
        # An operator that serves one of several states takes the logarithm of what is shared.
        served = any(user.target is ATEN.log.default for user in _read_through_views(flow, group.exponentials[0]))
        if len(chains) > 1 or (chains and served):
            return [Decays(group.exponentials, products=chain, is_shared=True) for chain in chains]
    return _recurrences(flow, group)


def _chains(flow: Dataflow, products: Sequence[fx.Node]) -> list[tuple[fx.Node, ...]]:
    """State products by state: each is of what the one before became by sums, not by products."""
    chains: nx.Graph = nx.Graph()
    chains.add_nodes_from(products)
    for product in products:
        for source in product.all_input_nodes:
            before = flow.ancestors([source], stop=lambda node: not _keeps_state(node))
            chains.add_edges_from((product, other) for other in before if other in chains and other is not product)
    return [tuple(flow.in_order(chain)) for chain in nx.connected_components(chains)]


def _keeps_state(node: fx.Node) -> bool:
    return is_view(node) or node.target in _SUMS or node.target in PASSING_STATES


def _sigmoid_decays(flow: Dataflow) -> Iterator[Decays]:
    """Sigmoids, powers of them and one minus them, that are spread over something summed with and read like a state.

    All are never negative, so that a logarithm gives back what the operators take.
    """
    for node in flow.nodes:
        is_power = node.target is ATEN.pow.Tensor_Scalar and _is_sigmoid(node.args[0])
        may_decay = is_power or _is_sigmoid(node) or _is_complement(node)
        if not may_decay or node in flow.constants or not _spread_products(flow, node):
            continue
        products = state_products(flow, Decays((node,)))
        if any(_is_read(flow, product) for product in products):
            chains = _chains(flow, products)
            yield from (Decays((node,), products=chain, is_shared=len(chains) > 1) for chain in chains)


def _is_complement(node: fx.Node) -> bool:
    """Whether the node is one minus a sigmoid."""
    if node.target is ATEN.rsub.Scalar:
        return _is_sigmoid(node.args[0]) and node.args[1:] == (1,)
    return node.target is ATEN.sub.Tensor and node.args[:1] == (1,) and _is_sigmoid(node.args[1])


def _is_sigmoid(node: object) -> bool:
    return isinstance(node, fx.Node) and node.target is ATEN.sigmoid.default


def _spread_products(flow: Dataflow, factor: fx.Node) -> bool:
    """Whether a larger thing is multiplied with a factor, be it through views, and the product is summed with."""
    todo = [factor]
    while todo:
        node = todo.pop()
        for user in flow.users[node]:
            if is_view(user) or user.target in CASTS:
                todo.append(user)
            elif user.target in _STATE_PRODUCTS and len(shape_of(user)) > 2 and _grows(flow, node, user):
                return True
    return False


def _grows(flow: Dataflow, node: fx.Node, product: fx.Node) -> bool:
    return numel_of(product) > numel_of(node) and bool(sums_with(flow, product))


def _is_read(flow: Dataflow, product: fx.Node) -> bool:
    """Whether a product is a factor of a sum of products, be it through views."""
    return any(
        is_contraction(user) or (user.target is ATEN.mul.Tensor and any(map(is_contraction, flow.users[user])))
        for user in _read_through_views(flow, product)
    )


def _recurrences(flow: Dataflow, group: Decays) -> list[Decays]:
    """The group, or its parts where steps of one gate decay states that do not depend on each other."""
    if group.cumulative or len(group.exponentials) < 2:
        return [group]
    products = state_products(flow, group)
    decay_of = {product: _decay_in(flow, product, group) for product in products}
    chains: nx.Graph = nx.Graph()
    chains.add_nodes_from(decay_of.values())
    for product in products:
        earlier = flow.ancestors(flow.inputs[product], stop=lambda node: node in decay_of or node in group.exponentials)
        chains.add_edges_from((decay_of[product], decay_of[other]) for other in earlier & decay_of.keys())
    parts = list(nx.connected_components(chains))
    if len(parts) < 2 or sum(map(len, parts)) < len(group.exponentials):
        return [group]
    return [Decays(tuple(flow.in_order(part)), ()) for part in parts]


def _decay_in(flow: Dataflow, product: fx.Node, group: Decays) -> fx.Node:
    """The exponential that a state product decays by."""
    behind = (behind_views_and_casts(source) for source in product.all_input_nodes)
    plain = next((node for node in behind if node in group.exponentials), None)
    if plain is not None:
        return plain
    above = flow.ancestors([product.all_input_nodes[0]], stop=group.exponentials.__contains__)
    return next(node for node in group.exponentials if node in above)


def _gate_of(flow: Dataflow, exponential: fx.Node) -> tuple[frozenset[fx.Node], set[fx.Node]]:
    """What an exponential is taken of, behind sums and views, and the running sums on the way."""
    gate: set[fx.Node] = set()
    cumulative: set[fx.Node] = set()
    seen: set[fx.Node] = set()
    todo = [source for source in flow.inputs[exponential] if source not in flow.constants]
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        sources = [source for source in flow.inputs[node] if source not in flow.constants]
        is_sum = node.target in _CUMULATIVE or (node.target in _PRODUCTS_WITH_A_CONSTANT and len(sources) == 1)
        if is_sum:
            cumulative.add(node)
        # A product of two tensors of the caller is a gate's own formula, not a way to pass it on.
        passes = is_view(node) or is_sum or node.target in _PLUMBING
        if passes and sources and not (node.target in (ATEN.mul.Tensor, ATEN.div.Tensor) and len(sources) > 1):
            todo.extend(sources)
        else:
            gate.add(node)
    return frozenset(gate), cumulative


def serves_all_channels(product: fx.Node) -> bool:
    """Whether the decay in a state product is one number for both dimensions of the state: the scalar gate."""
    factors = [a for a in product.args[:2] if isinstance(a, fx.Node)] if product.args else []
    if product.target is ATEN.einsum.default:
        factors = list(product.args[1])  # type: ignore[arg-type]
    return min(numel_of(factor) for factor in factors) * numel_of_last_two(product) == numel_of(product)


def numel_of_last_two(node: fx.Node) -> int:
    """Elements of one matrix in a batch of them."""
    return shape_of(node)[-2] * shape_of(node)[-1]


def state_products(flow: Dataflow, decays: Decays) -> list[fx.Node]:
    """Products of a larger state with a decay that is one number for its last dimension, the one before, or both."""
    window = window_of(flow, decays)
    below = flow.descendants(decays.exponentials, stop=lambda node: node not in window)
    found = _moved_states(flow, decays.exponentials, window)
    for node in flow.in_order(below & window):
        factors = [a for a in node.args[:2] if isinstance(a, fx.Node) and is_tensor(a)] if node.args else []
        if node.target is ATEN.einsum.default:
            factors = [a for a in node.args[1] if isinstance(a, fx.Node)]  # type: ignore[union-attr]
        if node.target not in _STATE_PRODUCTS or len(factors) != 2:
            continue
        for decay, state in (factors, factors[::-1]):
            is_decayed = behind_views_and_casts(decay) in decays.exponentials and _is_spread(decay, state, node)
            if is_decayed and (sums_with(flow, node) or _is_decayed_last(flow, state, node)):
                found.append(node)
                break
    return flow.in_order(found)


def _moved_states(flow: Dataflow, exponentials: Sequence[fx.Node], window: Collection[fx.Node]) -> list[fx.Node]:
    """Products of a matrix and a state that are summed with, where exponentials are on the matrix' diagonal."""
    todo = [user for node in exponentials for user in _read_through_views(flow, node) if user.target in _DIAGONALS]
    seen: set[fx.Node] = set()
    found: list[fx.Node] = []
    while todo:
        node = todo.pop()
        if node in seen or node not in window:
            continue
        seen.add(node)
        for user in _read_through_views(flow, node):
            moves = user.target in _MATRIX_PRODUCTS and behind_views_and_casts(user.all_input_nodes[0]) is node
            if moves and sums_with(flow, user):
                found.append(user)
            elif user.target in _MATRIX_PRODUCTS or user.target in _SUMS:
                todo.append(user)
    return found


def _read_through_views(flow: Dataflow, node: fx.Node) -> Iterator[fx.Node]:
    """What reads a node or a view of it."""
    for user in flow.users[node]:
        if is_view(user) or user.target in CASTS:
            yield from _read_through_views(flow, user)
        else:
            yield user


def sums_with(flow: Dataflow, product: fx.Node) -> list[fx.Node]:
    """Sums that take a product in, be it through views: a state that decays gets something added."""
    found: list[fx.Node] = []
    todo = [product]
    while todo:
        for user in flow.users[todo.pop()]:
            if user.target in _SUMS:
                found.append(user)
            elif is_view(user):
                todo.append(user)
    return found


def _is_decayed_last(flow: Dataflow, state: fx.Node, product: fx.Node) -> bool:
    """Whether a sum is decayed for the tokens that follow, and read by a product or kept."""
    readers = {user for node in (product, *(u for u in flow.users[product] if is_view(u))) for user in flow.users[node]}
    is_read = any(is_contraction(user) or user.op == "output" or user.target in PASSING_STATES for user in readers)
    return behind_views_and_casts(state).target in _SUMS and is_read


def _is_spread(decay: fx.Node, state: fx.Node, product: fx.Node) -> bool:
    """Whether the decay is one number for the whole last or one before last dimension of the state, or for both."""
    sizes, own = shape_of(state), shape_of(decay)
    if len(sizes) < 3 or numel_of(product) != numel_of(state) or sorted(shape_of(product)) != sorted(sizes):
        return False
    if product.target is ATEN.einsum.default:
        return len(own) == len(sizes) - 1 and not set(own) - set(sizes)
    aligned = (1,) * (len(sizes) - len(own)) + own
    spread = [dim for dim in range(len(sizes)) if aligned[dim] != sizes[dim]]
    return bool(spread) and all(aligned[dim] == 1 and dim >= len(sizes) - 2 for dim in spread)


def window_of(flow: Dataflow, decays: Decays) -> set[fx.Node]:
    """The nodes that a recurrence may take, from the first decay to some way behind the last."""
    first = flow.position[(decays.cumulative or decays.exponentials)[0]]
    last = flow.position[decays.exponentials[-1]]
    return set(flow.nodes[first : last + WINDOW_NODES])
