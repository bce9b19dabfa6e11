"""The nodes of a prolog in parts: products, norms, writes, and what other arithmetic stands between them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import fx

from k31compile.graph.dataflow import ATEN, Dataflow
from k31compile.graph.named_regions import Kind
from k31compile.graph.sizes import is_tensor, numel_of
from k31compile.graph.views import CASTS
from k31compile.passes.recognise.chains import is_product, is_write, moved_from, nodes_of, reach_of, weights_of

_WHOLE_NORMS = {
    ATEN.rms_norm.default,
    ATEN.layer_norm.default,
    ATEN.native_layer_norm.default,
    ATEN.group_norm.default,
}
_REDUCTIONS = {
    ATEN.mean.dim,
    ATEN.sum.dim_IntList,
    ATEN.var.dim,
    ATEN.var.correction,
    ATEN.std.dim,
    ATEN.std.correction,
    ATEN.linalg_vector_norm.default,
}
_SCALES = {
    ATEN.mul.Tensor,
    ATEN.mul.Scalar,
    ATEN.div.Tensor,
    ATEN.div.Scalar,
    ATEN.add.Tensor,
    ATEN.add.Scalar,
    *CASTS,
}


@dataclass(frozen=True)
class Group:
    """Nodes that belong together, not yet named.

    Attributes:
        kind: what they do.
        reach: the operands of the fused operator that they reach.
        seeds: for "vector", the groups of other kinds that they come from directly.
        above: all products of the region that they depend on.
        nodes: in the order of the graph.
    """

    kind: Kind
    reach: frozenset[str]
    seeds: frozenset[int]
    above: frozenset[fx.Node]
    nodes: tuple[fx.Node, ...]


NameOf = Callable[[Group], str]


def parts_of(
    flow: Dataflow, inside: set[fx.Node], ends: dict[fx.Node, frozenset[str]], name_of: NameOf
) -> dict[str, tuple[Kind, list[fx.Node]]]:
    """The nodes `inside` by part; products with one name are one part, a second part of a name gets a number."""
    parts: dict[str, tuple[Kind, list[fx.Node]]] = {}
    for group in _groups(flow, inside, ends):
        name, count = name_of(group), 1
        while name in parts and not (group.kind == parts[name][0] == "product"):
            count += 1
            name = f"{name_of(group)}_{count}"
        parts.setdefault(name, (group.kind, []))[1].extend(group.nodes)
    return {name: (kind, flow.in_order(nodes)) for name, (kind, nodes) in parts.items()}


def rotates(flow: Dataflow, group: Group, inside: set[fx.Node]) -> bool:
    """Whether the group multiplies by what is neither a weight nor made in its region: by positions."""
    weights = weights_of(flow)
    return any(
        source not in inside and source not in weights and is_tensor(source)
        for node in group.nodes
        if node.target is ATEN.mul.Tensor
        for source in node.all_input_nodes
        if numel_of(source) > 1
    )


def _groups(flow: Dataflow, inside: set[fx.Node], ends: dict[fx.Node, frozenset[str]]) -> list[Group]:
    ordered = flow.in_order(inside)
    reach = reach_of(ordered, ends)
    products = {node: _products_above(flow, node, inside) for node in ordered}
    seeds = _seeds(flow, ordered, reach)
    keys: dict[fx.Node, tuple[Kind, frozenset[int], frozenset[str]]] = {}
    for node in ordered:
        source = moved_from(node, inside)
        if node in seeds:
            keys[node] = (seeds[node][0], frozenset({seeds[node][1]}), frozenset())
        elif source is not None:
            keys[node] = keys[source]
        else:
            come_from = frozenset().union(*(keys[s][1] for s in node.all_input_nodes if s in inside))
            keys[node] = ("vector", come_from, reach[node])
    members: dict[tuple[Kind, frozenset[int], frozenset[str]], list[fx.Node]] = {}
    for node in ordered:
        members.setdefault(keys[node], []).append(node)
    return [
        Group(
            kind,
            reach[nodes[0]] if kind == "vector" else frozenset().union(*(reach[node] for node in nodes)),
            come_from,
            frozenset().union(*(products[node] for node in nodes)),
            tuple(nodes),
        )
        for (kind, come_from, _), nodes in members.items()
    ]


def _products_above(flow: Dataflow, node: fx.Node, inside: set[fx.Node]) -> frozenset[fx.Node]:
    """The products at or above a node within a region."""
    seen, todo = set[fx.Node](), [node]
    while todo:
        current = todo.pop()
        if current in inside and current not in seen:
            seen.add(current)
            todo.extend(current.all_input_nodes)
    return frozenset(n for n in seen if is_product(flow, n))


def _seeds(
    flow: Dataflow, ordered: Sequence[fx.Node], reach: dict[fx.Node, frozenset[str]]
) -> dict[fx.Node, tuple[Kind, int]]:
    """Products, writes and norms with a number each; all writes for the same operands are one."""
    inside = set(ordered)
    found: dict[fx.Node, tuple[Kind, int]] = {}
    writes: dict[frozenset[str], int] = {}
    for number, node in enumerate(ordered):
        if is_product(flow, node):
            found.update(dict.fromkeys(nodes_of(node), ("product", number)))
        elif is_write(node):
            found[node] = ("write", writes.setdefault(reach[node], number))
    for number, node in enumerate(ordered):
        if node in found or not (node.target in _WHOLE_NORMS or node.target in _REDUCTIONS):
            continue
        above = _up_to_seeds(_ends_of_norm(flow, node, inside), inside, found)
        others = {found[n][1] for n in above if n in found and found[n][0] == "norm"}
        # What is normed in two steps, a mean and a spread, is one norm.
        one: tuple[Kind, int] = ("norm", min(others, default=len(ordered) + number))
        joined = {n for n, (kind, old) in found.items() if kind == "norm" and old in others}
        found.update(dict.fromkeys(joined | above, one))
    return found


def _ends_of_norm(flow: Dataflow, reduction: fx.Node, inside: set[fx.Node]) -> list[fx.Node]:
    """Where the rows that a reduction was taken of have been divided by it, scaled and shifted by weights."""
    rows = reduction.args[0]
    assert isinstance(rows, fx.Node)
    size, ends, seen = numel_of(rows), list[fx.Node](), set[fx.Node]()
    todo = [reduction]
    while todo:
        node = todo.pop()
        if node in seen or node not in inside:
            continue
        seen.add(node)
        if node.target in _WHOLE_NORMS if node is reduction else numel_of(node) == size:
            ends.append(_scaled(flow, node, inside))
        else:
            todo.extend(flow.users[node])
    return ends


def _scaled(flow: Dataflow, node: fx.Node, inside: set[fx.Node]) -> fx.Node:
    """The last value of a chain that only scales by weights and numbers, shifts by them and casts."""
    weights = weights_of(flow)
    while True:
        readers = [user for user in node.users if user in flow.live]
        if len(readers) != 1 or readers[0] not in inside or readers[0].target not in _SCALES:
            return node
        others = [source for source in readers[0].all_input_nodes if source is not node]
        if any(source not in weights for source in others):
            return node
        node = readers[0]


def _up_to_seeds(ends: Sequence[fx.Node], inside: set[fx.Node], seeds: dict[fx.Node, tuple[Kind, int]]) -> set[fx.Node]:
    """What computes some ends, up to products and writes and without what only moves their values."""
    found: set[fx.Node] = set()
    todo = list(ends)
    while todo:
        node = todo.pop()
        if node in found or node not in inside or (node in seeds and seeds[node][0] != "norm"):
            continue
        if _moves_a_seed(node, inside, seeds):
            continue
        found.add(node)
        todo.extend(node.all_input_nodes)
    return found


def _moves_a_seed(node: fx.Node, inside: set[fx.Node], seeds: dict[fx.Node, tuple[Kind, int]]) -> bool:
    source = moved_from(node, inside)
    while source is not None:
        if source in seeds:
            return seeds[source][0] != "norm"
        source = moved_from(source, inside)
    return False
