"""The graph as data flow: who reads whose *values*, what is constant, who must be passed on the way out."""

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any, TypeVar

import networkx as nx
import torch
from torch import fx

from k31compile.graph.sizes import is_tensor, value_of

ATEN = torch.ops.aten

# These read the shape and type of their first argument and never a value of it.
_SHAPE_ONLY = {
    ATEN.new_empty.default,
    ATEN.new_ones.default,
    ATEN.new_zeros.default,
    ATEN.new_full.default,
    ATEN.empty_like.default,
    ATEN.ones_like.default,
    ATEN.zeros_like.default,
    ATEN.full_like.default,
    ATEN.copy.default,
    ATEN.sym_size.int,
    ATEN.sym_numel.default,
}

# The attribute of a graph that holds its index: it goes when the graph goes, and copies of the graph have none.
_INDEX = "_k31_dataflow"
_SINK = object()
Remembered = TypeVar("Remembered")


def data_inputs(node: fx.Node) -> list[fx.Node]:
    """The nodes whose values `node` reads: its tensor arguments, without those that lend only a shape."""
    inputs = dict.fromkeys(node.all_input_nodes)
    if node.target in _SHAPE_ONLY and node.args and isinstance(node.args[0], fx.Node):
        lends_only_shape = node.args[0] not in _nodes_in(node.args[1:]) and node.args[0] not in _nodes_in(node.kwargs)
        if lends_only_shape:
            inputs.pop(node.args[0], None)
    return list(inputs)


def _nodes_in(arguments: Any) -> set[fx.Node]:
    found: set[fx.Node] = set()
    fx.map_arg(arguments, lambda n: found.add(n))
    return found


def dataflow_of(graph: fx.Graph) -> "Dataflow":
    """The index of a graph: the one made before, unless the graph was changed since."""
    flow = getattr(graph, _INDEX, None)
    if not isinstance(flow, Dataflow) or not flow.is_current():
        flow = Dataflow(graph)
        setattr(graph, _INDEX, flow)
    return flow


class Dataflow:
    """An index of one graph as it stands; see `dataflow_of`."""

    def __init__(self, graph: fx.Graph) -> None:
        """Index `graph`, which must be functional: mutations only as final `copy_` nodes, read by outputs alone."""
        self.graph = graph
        self.nodes = list(graph.nodes)
        self.position = {node: i for i, node in enumerate(self.nodes)}
        self.inputs = {node: data_inputs(node) for node in self.nodes}
        self.users: dict[fx.Node, list[fx.Node]] = {node: [] for node in self.nodes}
        for node, inputs in self.inputs.items():
            for source in inputs:
                self.users[source].append(node)
        self.constants = self._find_constants()
        self._remembered: dict[str, Any] = {}
        # fx replaces these whenever an argument changes and never changes them in place.
        self._arguments = [(node.args, node.kwargs) for node in self.nodes]

    def is_current(self) -> bool:
        """Whether the graph still has the nodes and arguments that were indexed."""
        nodes = list(self.graph.nodes)
        return len(nodes) == len(self.nodes) and all(
            new is old and new.args is args and new.kwargs is kwargs
            for new, old, (args, kwargs) in zip(nodes, self.nodes, self._arguments, strict=True)
        )

    def remember(self, name: str, compute: Callable[[], Remembered]) -> Remembered:
        """The value of `compute`, computed once for this index."""
        if name not in self._remembered:
            self._remembered[name] = compute()
        return self._remembered[name]  # type: ignore[no-any-return]

    def _find_constants(self) -> set[fx.Node]:
        """Nodes that depend on no tensor of the caller: free in every cut, recomputed in every confirmation."""
        constants: set[fx.Node] = set()
        for node in self.nodes:
            if node.op == "placeholder":
                constant = not is_tensor(node)
            elif node.op == "call_function":
                is_size = isinstance(value_of(node), torch.SymInt | torch.SymFloat | torch.SymBool | int)
                constant = is_size or (not _is_random(node) and all(i in constants for i in self.inputs[node]))
            else:
                constant = node.op == "get_attr" and is_tensor(node)
            if constant:
                constants.add(node)
        return constants

    @cached_property
    def live(self) -> set[fx.Node]:
        """Nodes whose values reach the end of the graph; others lend a shape at most."""
        ends = [node for node in self.nodes if node.op == "output" or node.target is ATEN.copy_.default]
        return self.ancestors(ends)

    def ancestors(self, starts: Iterable[fx.Node], stop: Callable[[fx.Node], bool] = lambda _: False) -> set[fx.Node]:
        """All nodes that `starts` depend on, themselves included; the walk does not go past `stop`."""
        return _reach(starts, self.inputs, stop)

    def descendants(self, starts: Iterable[fx.Node], stop: Callable[[fx.Node], bool] = lambda _: False) -> set[fx.Node]:
        """All nodes that depend on `starts`, themselves included."""
        return _reach(starts, self.users, stop)

    def between(self, starts: Iterable[fx.Node], ends: Iterable[fx.Node]) -> set[fx.Node]:
        """All nodes on a path from `starts` to `ends`, both included."""
        first = list(starts)
        if not first:
            return set()
        earliest = min(self.position[node] for node in first)
        above = self.ancestors(ends, stop=lambda node: self.position[node] <= earliest)
        inside: set[fx.Node] = set()
        todo = [node for node in first if node in above]
        while todo:
            node = todo.pop()
            if node not in inside:
                inside.add(node)
                todo.extend(user for user in self.users[node] if user in above)
        return inside

    def post_dominators(self, node: fx.Node) -> Iterator[fx.Node]:
        """The nodes that every path from `node` out of the graph passes, nearest first."""
        current = self._immediate_post_dominators.get(node)
        while current is not None and current is not _SINK and isinstance(current, fx.Node):
            if current.op == "output":
                return
            yield current
            following = self._immediate_post_dominators.get(current)
            current = None if following is current else following

    @cached_property
    def _immediate_post_dominators(self) -> dict[object, object]:
        reverse: nx.DiGraph = nx.DiGraph()
        for node, inputs in self.inputs.items():
            if not self.users[node]:
                reverse.add_edge(_SINK, node)
            for source in inputs:
                reverse.add_edge(node, source)
        return dict(nx.immediate_dominators(reverse, _SINK))

    def in_order(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        """The nodes in the order of the graph."""
        return sorted(nodes, key=self.position.__getitem__)


def _reach(
    starts: Iterable[fx.Node], edges: dict[fx.Node, list[fx.Node]], stop: Callable[[fx.Node], bool]
) -> set[fx.Node]:
    seen: set[fx.Node] = set()
    todo = list(starts)
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if not stop(node):
            todo.extend(edges[node])
    return seen


def _is_random(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags
