"""What leaves a recurrence: the state that is kept, and the values that all else goes through."""

from collections.abc import Collection, Sequence

import networkx as nx
from torch import fx

from k31compile.graph.dataflow import ATEN, Dataflow
from k31compile.graph.sizes import is_float, shape_of
from k31compile.graph.views import is_view
from k31compile.passes.recognise.decays import PASSING_STATES, Decays, window_of


def final_states(flow: Dataflow, decays: Decays, state: fx.Node) -> dict[fx.Node, set[fx.Node]]:
    """Nodes of the state's shape that are kept after the graph, each with what passes it on to the end.

    Kept is what is copied into an input or returned, be it through views, casts and writes into a pool. An output
    of one chunk that is as long as a key is wide has the state's shape too.
    """
    below = flow.descendants(decays.exponentials)
    kept: dict[fx.Node, set[fx.Node]] = {}
    output = flow.nodes[-1]
    ends = [node for node in flow.nodes if node.target is ATEN.copy_.default]
    for end in (*ends, *flow.inputs[output]):
        node, way = end, [end]
        while node in below and (is_view(node) or node.target in PASSING_STATES) and node not in kept:
            sources = [source for source in flow.inputs[node] if source in below]
            if len(sources) != 1:
                break
            node = sources[0]
            way.append(node)
        if node in below and _has_shape_of(node, state) and not is_view(node):
            kept.setdefault(node, set()).update(way[:-1])
    return kept


def _has_shape_of(node: fx.Node, state: fx.Node) -> bool:
    def wide(of: fx.Node) -> list[int]:
        return sorted(size for size in shape_of(of) if size != 1)

    return is_float(node) and wide(node) == wide(state)


def common_exits(
    flow: Dataflow,
    decays: Decays,
    starts: Sequence[fx.Node],
    states: Collection[fx.Node],
    passing: Collection[fx.Node],
) -> list[fx.Node]:
    """Nodes that every way from `starts` out of the decays' window goes through, nearest first.

    The ways that only keep a state, from `states` through `passing` to the end, do not count.
    """
    window = window_of(flow, decays)
    below = flow.descendants(starts, stop=lambda node: node not in window) - set(passing)
    reverse: nx.DiGraph = nx.DiGraph()
    sink, source = "sink", "source"
    for node in below:
        if node not in window:
            reverse.add_edge(sink, node)
            continue
        users = [user for user in flow.users[node] if user in below]
        if node in states:
            users = [user for user in users if user.op != "output"]
        elif node.op == "output":
            reverse.add_edge(sink, node)
        for user in users:
            reverse.add_edge(user, node)
    for node in starts:
        reverse.add_edge(node, source)
    if sink not in reverse:
        return []
    dominators = nx.immediate_dominators(reverse, sink)
    chain: list[fx.Node] = []
    place: object = dominators.get(source)
    while isinstance(place, fx.Node):
        if place.op != "output" and place not in starts:
            chain.append(place)
        following = dominators.get(place)
        place = None if following is place else following
    return chain
