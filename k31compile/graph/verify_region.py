"""An independent check of a named region: it knows the graph and the region, and nothing of how it was found."""

import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch import fx

from k31compile.graph.named_regions import NamedRegion, label_of

_MOVES = {"view", "reshape", "transpose", "permute", "slice", "squeeze", "unsqueeze", "expand", "select", "to", "clone"}
_PRODUCTS = {"linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "mv", "tensordot", "inner"}


def verify_region(graph: fx.Graph, region: NamedRegion) -> list[str]:
    """What is wrong with a region in its graph, a sentence each; empty where it holds.

    The graph must be functional: writes in place are no data flow, and a path through one is not seen.

    It holds when every node is in exactly one part and labelled so, nodes of no part are not, parts have the nodes that
    they were named with, edges are exactly the dependencies between parts, parts run in their order, no path leaves the
    region and comes back, inputs and outputs are as declared, a product part is one product with weights and what comes
    after it, no other part has such a product, and what only moves a value is in that value's part.
    """
    return verify_regions(graph, [region])[0]


def verify_regions(graph: fx.Graph, regions: Sequence[NamedRegion]) -> list[list[str]]:
    """The same for several regions of one graph."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    given = _given(graph)
    return [_problems(region, order, given) for region in regions]


def _problems(region: NamedRegion, order: Mapping[fx.Node, int], given: Mapping[fx.Node, set[str]]) -> list[str]:
    problems = [*_membership(region, order)]
    if problems:
        return problems
    part_of = {node: part.name for part in region.parts for node in part.nodes}
    return [
        *_edges(region, part_of),
        *_order(region),
        *_convexity(part_of, order),
        *_borders(region, part_of, order),
        *_kinds(region, part_of, given),
    ]


def _membership(region: NamedRegion, order: Mapping[fx.Node, int]) -> Iterator[str]:
    seen: dict[fx.Node, str] = {}
    for part in region.parts:
        if not part.nodes:
            yield f"part {part.name} is empty"
        if len(part.nodes) != part.size:
            yield f"part {part.name} was named with {part.size} nodes and has {len(part.nodes)}"
        for node in part.nodes:
            if node in seen:
                yield f"{node.name} is in {seen[node]} and in {part.name}"
            seen[node] = part.name
            if node not in order:
                yield f"{node.name} of part {part.name} is not in the graph"
            elif (label := label_of(node)) is None or (label.region, label.number, label.part, label.kind) != (
                region.name,
                region.number,
                part.name,
                part.kind,
            ):
                yield f"{node.name} is not labelled as {part.name}"
    if len(seen) != region.size:
        yield f"it was named with {region.size} nodes and has {len(seen)}"
    names = [part.name for part in region.parts]
    if len(set(names)) != len(names):
        yield f"two parts have one name: {', '.join(names)}"
    for node in order.keys() - seen.keys():
        label = label_of(node)
        if label is not None and (label.region, label.number) == (region.name, region.number):
            yield f"{node.name} is labelled as {label.part} and is in no part"


def _edges(region: NamedRegion, part_of: Mapping[fx.Node, str]) -> Iterator[str]:
    real = {
        (part_of[source], name)
        for node, name in part_of.items()
        for source in node.all_input_nodes
        if part_of.get(source, name) != name
    }
    declared = set(region.edges)
    if len(declared) != len(region.edges):
        yield "an edge is declared twice"
    yield from (f"{b} reads {a}, and there is no such edge" for a, b in sorted(real - declared))
    yield from (f"there is an edge from {a} to {b}, and {b} does not read {a}" for a, b in sorted(declared - real))


def _order(region: NamedRegion) -> Iterator[str]:
    rank = {part.name: i for i, part in enumerate(region.parts)}
    for a, b in region.edges:
        if rank.get(a, -1) >= rank.get(b, -1):
            yield f"part {b} stands before {a}, which it reads"


def _convexity(part_of: Mapping[fx.Node, str], order: Mapping[fx.Node, int]) -> Iterator[str]:
    last = max(order[node] for node in part_of)
    beyond: set[fx.Node] = set()
    todo = [user for node in part_of for user in node.users]
    while todo:
        node = todo.pop()
        if node not in part_of and node not in beyond and order[node] <= last:
            beyond.add(node)
            todo.extend(node.users)
    for node in beyond:
        for user in node.users:
            if user in part_of:
                yield f"{user.name} in {part_of[user]} reads {node.name}, which is outside and depends on the region"


def _borders(region: NamedRegion, part_of: Mapping[fx.Node, str], order: Mapping[fx.Node, int]) -> Iterator[str]:
    def read_by(nodes: Collection[fx.Node]) -> list[fx.Node]:
        read = {source for node in nodes for source in node.all_input_nodes} - set(nodes)
        return sorted(read, key=order.__getitem__)

    reads = read_by(part_of.keys())
    if list(region.inputs) != reads:
        yield f"its inputs are {_names(reads)}, declared are {_names(region.inputs)}"
    gives = sorted((n for n in part_of if any(u not in part_of for u in n.users)), key=order.__getitem__)
    if list(region.outputs) != gives:
        yield f"its outputs are {_names(gives)}, declared are {_names(region.outputs)}"
    for part in region.parts:
        if list(part.inputs) != (read := read_by(part.nodes)):
            yield f"part {part.name} reads {_names(read)}, declared are {_names(part.inputs)}"


def _kinds(region: NamedRegion, part_of: Mapping[fx.Node, str], given: Mapping[fx.Node, set[str]]) -> Iterator[str]:
    for part in region.parts:
        products = [node for node in part.nodes if _is_product(node, given)]
        if part.kind != "product" and products:
            yield f"part {part.name} is no product and holds {_names(products)}"
        if part.kind == "product":
            if not products:
                yield f"part {part.name} is a product and has none"
            rows = [node for node in products if _reads_one_of(node, products, part.nodes)]
            yield from (f"{node.name} in {part.name} is a product of another product there" for node in rows)
            factors = {source for node in products for source in node.all_input_nodes}
            begins = {node for node in part.nodes if not set(part.nodes) & set(node.all_input_nodes)}
            early = _names(begins - set(products) - factors)
            if early:
                yield f"{early} in {part.name} does not come after its product"
    for node, name in part_of.items():
        source = node.args[0] if node.args else None
        if _moves(node) and isinstance(source, fx.Node) and part_of.get(source, name) != name:
            yield f"{node.name} in {name} only moves what {part_of[source]} computed"


def _reads_one_of(node: fx.Node, sources: Collection[fx.Node], inside: Collection[fx.Node]) -> bool:
    """Whether a node depends on one of some others within a part."""
    seen: set[fx.Node] = set()
    todo = [source for source in node.all_input_nodes if source in inside]
    while todo:
        current = todo.pop()
        if current in sources:
            return True
        if current not in seen:
            seen.add(current)
            todo.extend(source for source in current.all_input_nodes if source in inside)
    return False


def _given(graph: fx.Graph) -> dict[fx.Node, set[str]]:
    """For each node the kinds of inputs that it depends on: "weight" or "other"."""
    kinds: dict[fx.Node, set[str]] = {}
    for node in graph.nodes:
        own: set[str] = set()
        if node.op == "placeholder" and isinstance(node.meta.get("val"), torch.Tensor):
            own = {"weight" if node.meta.get("is_parameter") else "other"}
        kinds[node] = own.union(*(kinds[source] for source in node.all_input_nodes))
    return kinds


def _is_product(node: fx.Node, given: Mapping[fx.Node, set[str]]) -> bool:
    namespace, _, name = str(node.target).partition(".")
    name = name.partition(".")[0]
    factors = node.all_input_nodes
    if name == "sum":
        factors = [s for source in factors if str(source.target) == "aten.mul.Tensor" for s in source.all_input_nodes]
    elif name not in _PRODUCTS:
        return False
    weights = any(given[factor] == {"weight"} for factor in factors)
    return namespace == "aten" and weights and any("other" in given[factor] for factor in factors)


def _moves(node: fx.Node) -> bool:
    return node.target is operator.getitem or str(node.target).partition(".")[2].partition(".")[0] in _MOVES


def _names(nodes: Iterable[fx.Node]) -> str:
    return ", ".join(node.name for node in nodes)
