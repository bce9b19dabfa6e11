"""The leaves of a region: a minimum vertex cut above a forced core, weighted by bytes, nearest to the core.

Capacity is the bytes of a value whose shape fits one of the operator's roles, and infinite for every other value. By
count a cut takes one wide tensor for three; by plain bytes it sits in low-rank projections. Both were tried.
"""

import functools
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import networkx as nx
from networkx.algorithms.flow import shortest_augmenting_path
from torch import fx

from k31compile.graph.dataflow import ATEN, Dataflow
from k31compile.graph.sizes import is_integer, nbytes_of, numel_of, shape_of
from k31compile.graph.views import is_view, same_size_base

Eligible = Callable[[fx.Node], bool]

_SOURCE = "source"

# How far above the core the search may look; without a bound the cost is quadratic in a model's depth.
WINDOW_NODES = 600
WINDOW_OPERANDS = 3


@dataclass(frozen=True)
class Leak:
    """No finite cut: a path from an input of the graph to the core along which nothing fits a role."""

    path: tuple[fx.Node, ...]


def find_leaves(
    flow: Dataflow,
    core: Collection[fx.Node],
    eligible: Eligible,
    kept: Collection[fx.Node] = (),
    capacity: Callable[[fx.Node], int] = nbytes_of,
    given: Collection[fx.Node] = (),
) -> tuple[fx.Node, ...] | Leak:
    """The leaves above `core`; `kept` nodes are leaves wherever they stand (an anchor, an earlier operator's output).

    Leaves do not depend on each other: one that does is pushed inside and the cut repeated, the last finite cut kept.
    What is `given` is a leaf where the core reads it, and no reason to cut there what else is made of it.
    """
    # Asked of each node of a window once for every cut that is tried.
    found = _found_leaves(flow, set(core), functools.cache(eligible), kept, capacity, given)
    return found if isinstance(found, Leak) else tuple(flow.in_order({*found, *given}))


def _found_leaves(
    flow: Dataflow,
    inside: set[fx.Node],
    eligible: Eligible,
    kept: Collection[fx.Node],
    capacity: Callable[[fx.Node], int],
    given: Collection[fx.Node],
) -> tuple[fx.Node, ...] | Leak:
    found = _nearest_cut(flow, inside, eligible, kept, capacity, given)
    for _ in range(4):
        if isinstance(found, Leak):
            return found
        dependent = _dependent(flow, found, kept) or _slices_of_one(flow, found, eligible)
        if not dependent:
            return found
        inside |= dependent
        repeated = _nearest_cut(flow, inside, eligible, kept, capacity, given)
        if isinstance(repeated, Leak):
            return found
        found = repeated
    return found


def _dependent(flow: Dataflow, leaves: Iterable[fx.Node], kept: Collection[fx.Node]) -> set[fx.Node]:
    """Float leaves computed from another leaf; positions and kept leaves may be upstream of anything."""
    floats = [leaf for leaf in leaves if not is_integer(leaf) and leaf not in kept]
    inside: set[fx.Node] = set()
    for base in floats:
        below = flow.descendants([same_size_base(base)])
        for leaf in floats:
            if leaf is not base and leaf in below and same_size_base(leaf) is not same_size_base(base):
                inside |= flow.between([same_size_base(base)], [leaf]) - {same_size_base(base)}
    return inside


def _slices_of_one(flow: Dataflow, leaves: Iterable[fx.Node], eligible: Eligible) -> set[fx.Node]:
    """Leaves that are slices of one tensor, as an unrolled loop over heads or tokens leaves them.

    Three or more; or the two rows of what may be a leaf as a whole.
    """
    by_base: dict[fx.Node, list[fx.Node]] = {}
    for leaf in leaves:
        base = _sliced_base(leaf, eligible)
        if base is not leaf:
            by_base.setdefault(base, []).append(leaf)
    inside: set[fx.Node] = set()
    for base, slices in by_base.items():
        if len(slices) >= 3 or (eligible(base) and _are_both_rows(base, slices)):
            inside |= flow.between([base], slices) - {base}
    return inside


def _are_both_rows(base: fx.Node, slices: Collection[fx.Node]) -> bool:
    """Whether the slices are all that a loop over a dimension of size two selects."""
    found: set[tuple[object, ...]] = set()
    for node in slices:
        while node is not base and node.target is not ATEN.select.int:
            source = node.args[0]
            assert isinstance(source, fx.Node)
            node = source
        source = node.args[0] if node is not base else None
        if isinstance(source, fx.Node) and shape_of(source)[node.args[1]] == 2:  # type: ignore[index]
            found.add(node.args)
    return len(slices) == 2 == len(found) and len({row[:2] for row in found}) == 1


def _sliced_base(node: fx.Node, eligible: Eligible) -> fx.Node:
    """The farthest value behind slices that may itself be a leaf, or what they all started from."""
    base, highest = node, None
    while is_view(base) and isinstance(base.args[0], fx.Node):
        base = base.args[0]
        # One projection may hold queries, keys and values: the whole of it is nobody's operand.
        highest = base if eligible(base) and numel_of(base) > numel_of(node) else highest
    return highest or base


def _nearest_cut(
    flow: Dataflow,
    inside: Collection[fx.Node],
    eligible: Eligible,
    kept: Collection[fx.Node],
    capacity: Callable[[fx.Node], int],
    given: Collection[fx.Node],
) -> tuple[fx.Node, ...] | Leak:
    for node in inside:
        if node.op == "placeholder" and node not in flow.constants:
            return Leak((node,))
    read = {source for node in inside for source in flow.inputs[node] if source not in given}
    window = _window(flow, inside, read, eligible, kept)
    finite = {node for node in window if node in kept or eligible(node)}
    tops = _tops(flow, window, inside, finite)
    graph: nx.DiGraph = nx.DiGraph()
    for node in finite:
        graph.add_edge((node, "in"), (node, "out"), capacity=0 if node in kept else capacity(node))
        graph.add_edges_from((_outlet(top), (node, "in")) for top in tops[node])
    for source in read & window:
        reached_from = {source} if source in finite else tops[source]
        graph.add_edges_from((_outlet(top), "sink") for top in reached_from)
    if _SOURCE not in graph or "sink" not in graph:
        return ()
    try:
        # networkx gives the minimum cut that lies nearest to the sink; few leaves, so few paths to augment.
        _, (reached, _) = nx.minimum_cut(graph, _SOURCE, "sink", flow_func=shortest_augmenting_path)
    except nx.NetworkXUnbounded:
        return Leak(_leaking_path(flow, window, inside, finite, read))
    return tuple(flow.in_order(n for n in finite if (n, "in") in reached and (n, "out") not in reached))


def _outlet(top: object) -> object:
    return top if top is _SOURCE else (top, "out")


def _tops(
    flow: Dataflow, window: Collection[fx.Node], inside: Collection[fx.Node], finite: Collection[fx.Node]
) -> dict[fx.Node, set[object]]:
    """For each node of the window the nearest values above it that may be leaves, and the source where none is.

    What can be no leaf has an infinite capacity, so that only these matter to the cut: a graph of tens of nodes.
    """
    tops: dict[fx.Node, set[object]] = {}
    for node in flow.in_order(window):
        found: set[object] = set()
        sources = [source for source in flow.inputs[node] if source not in flow.constants]
        if not sources or any(source not in window and source not in inside for source in sources):
            found.add(_SOURCE)
        for source in sources:
            if source in window:
                found |= {source} if source in finite else tops[source]
        tops[node] = found
    return tops


def _window(
    flow: Dataflow,
    inside: Collection[fx.Node],
    read: Collection[fx.Node],
    eligible: Eligible,
    kept: Collection[fx.Node],
) -> set[fx.Node]:
    """The nodes above the core, breadth first, up to a few eligible values on every way and a bound on all.

    The nearest minimum cut is seldom beyond the second value that could be an operand; what lies further up is the
    rest of the model. The search does not look behind kept leaves.
    """
    passed: dict[fx.Node, int] = {}
    front = [(source, 0) for source in flow.in_order(read)]
    while front and len(passed) < WINDOW_NODES:
        following: list[tuple[fx.Node, int]] = []
        for node, count in front:
            if node in inside or node in flow.constants or passed.get(node, count + 1) <= count:
                continue
            passed[node] = count
            if node not in kept and count < WINDOW_OPERANDS:
                is_operand = not is_view(node) and node.target is not ATEN._to_copy.default and eligible(node)
                following.extend((source, count + is_operand) for source in flow.inputs[node])
        front = following
    return set(passed)


def _leaking_path(
    flow: Dataflow,
    window: Collection[fx.Node],
    inside: Collection[fx.Node],
    finite: Collection[fx.Node],
    read: Collection[fx.Node],
) -> tuple[fx.Node, ...]:
    """A shortest way from outside the window to the core on which nothing may be a leaf."""
    graph: nx.DiGraph = nx.DiGraph()
    for node in flow.in_order(window):
        if node not in finite:
            sources = [source for source in flow.inputs[node] if source not in flow.constants]
            if not sources or any(source not in window and source not in inside for source in sources):
                graph.add_edge(_SOURCE, node)
            graph.add_edges_from((source, node) for source in sources if source in window and source not in finite)
    graph.add_edges_from(
        (source, "sink") for source in flow.in_order(read) if source in window and source not in finite
    )
    if _SOURCE not in graph or "sink" not in graph or not nx.has_path(graph, _SOURCE, "sink"):
        return ()
    return tuple(nx.shortest_path(graph, _SOURCE, "sink")[1:-1])
