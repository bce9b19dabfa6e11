"""Named regions: sets of nodes that stay as they are and carry a label, in parts with edges between them.

A label is data on the node, so it goes where the node goes: through later passes, copies and lowering. The region is
read back from the labels. Parts and edges are those of the functional graph, where reading and writing are data flow.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import fx

from k31compile.graph.source import module_path, source_line
from k31compile.graph.weights import stored_bytes, weights_among

LABEL = "k31_region"
"""The key of a node's `meta` that holds its `RegionPart`."""

Kind = Literal["product", "norm", "vector", "write"]


@dataclass(frozen=True)
class RegionPart:
    """The label of one node.

    Attributes:
        region: the region's name, `indexer_prolog` or `mla_prolog`.
        number: which of its name in this graph.
        part: the part's name.
        kind: "product" with a weight, "norm", "vector" for other arithmetic, "write" to a cache.
        after: the parts that this one read from when the region was named.
        size: how many nodes the part had then.
        total: how many nodes all parts had.
    """

    region: str
    number: int
    part: str
    kind: Kind
    after: tuple[str, ...]
    size: int
    total: int


@dataclass(frozen=True)
class Part:
    """A part: its nodes and, outside of it, those that they read, both in the order of the graph.

    `weight_bytes` is what it reads of parameters, as they are stored; `size`, how many nodes it had when it was named.
    """

    name: str
    kind: Kind
    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    weight_bytes: int
    size: int

    def to_dict(self) -> dict[str, Any]:
        """The part as plain JSON values."""
        return {
            "name": self.name,
            "kind": self.kind,
            "nodes": [node.name for node in self.nodes],
            "inputs": [node.name for node in self.inputs],
            "weight_bytes": self.weight_bytes,
        }


@dataclass(frozen=True)
class NamedRegion:
    """A region in one graph.

    Attributes:
        name: `indexer_prolog` or `mla_prolog`.
        number: which of its name in this graph.
        parts: in an order in which they may run.
        edges: (a, b) where part b reads what part a computes, by the parts' order.
        inputs: the nodes outside that it reads: activations, positions, weights, caches.
        outputs: its nodes that are read outside.
        size: how many nodes it had when it was named.
        module: the innermost module of the user that holds all of it; empty if unknown.
        line: file and line of its first node.
    """

    name: str
    number: int
    parts: tuple[Part, ...]
    edges: tuple[tuple[str, str], ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    size: int
    module: str = ""
    line: str = ""

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """All its nodes, part by part."""
        return tuple(node for part in self.parts for node in part.nodes)

    @property
    def layer(self) -> int | None:
        """The first number in the module's path, which is the layer in a stack of them."""
        return next((int(step) for step in self.module.split(".") if step.isdigit()), None)

    @property
    def where(self) -> str:
        """Module and line, as a report says them."""
        return f"{self.module} ({self.line})" if self.module else self.line

    def part(self, name: str) -> Part:
        """The part of this name.

        Raises:
            KeyError: there is none.
        """
        return {part.name: part for part in self.parts}[name]

    def to_dict(self) -> dict[str, Any]:
        """The region as plain JSON values."""
        return {
            "name": self.name,
            "where": self.where,
            "layer": self.layer,
            "parts": [part.to_dict() for part in self.parts],
            "edges": [list(edge) for edge in self.edges],
            "inputs": [node.name for node in self.inputs],
            "outputs": [node.name for node in self.outputs],
        }


def label_region(name: str, number: int, parts: Mapping[str, tuple[Kind, Sequence[fx.Node]]]) -> None:
    """Label the nodes of each part, with the parts that they read from at this moment."""
    part_of = {node: part for part, (_, nodes) in parts.items() for node in nodes}
    for part, (kind, nodes) in parts.items():
        after = {part_of[source] for node in nodes for source in node.all_input_nodes if source in part_of} - {part}
        label = RegionPart(name, number, part, kind, tuple(sorted(after)), len(nodes), len(part_of))
        for node in nodes:
            node.meta[LABEL] = label


def label_of(node: fx.Node) -> RegionPart | None:
    """The node's label, if it has one."""
    label = node.meta.get(LABEL)
    return label if isinstance(label, RegionPart) else None


def read_regions(graph: fx.Graph) -> list[NamedRegion]:
    """The regions whose labels this graph carries, by name and number.

    Edges are those that were declared with the labels. Nodes that a later pass erased are no longer in their parts;
    `verify_region` tells whether what is left still hangs together.
    """
    nodes = list(graph.nodes)
    found: dict[tuple[str, int], list[fx.Node]] = {}
    for node in nodes:
        label = label_of(node)
        if label is not None:
            found.setdefault((label.region, label.number), []).append(node)
    order = {node: i for i, node in enumerate(nodes)}
    weights = weights_among(nodes) if found else set()
    return [_read(name, number, found[name, number], order, weights) for name, number in sorted(found)]


def _read(
    name: str, number: int, nodes: Sequence[fx.Node], order: Mapping[fx.Node, int], weights: set[fx.Node]
) -> NamedRegion:
    labels = {node: label for node in nodes if (label := label_of(node)) is not None}
    declared = {label.part: label for label in labels.values()}
    members = {part: tuple(node for node in nodes if labels[node].part == part) for part in declared}
    ordered = _in_running_order(declared, {part: order[members[part][0]] for part in declared})
    rank = {part: i for i, part in enumerate(ordered)}
    parts = []
    for part in ordered:
        inputs = _outside(members[part], set(members[part]), order)
        read = sum(stored_bytes(source) for source in inputs if source in weights)
        parts.append(Part(part, declared[part].kind, members[part], inputs, read, declared[part].size))
    edges = sorted(
        ((before, part) for part in ordered for before in declared[part].after),
        key=lambda edge: (rank.get(edge[0], -1), rank[edge[1]]),
    )
    inside = set(nodes)
    outputs = tuple(node for node in nodes if any(user not in inside for user in node.users))
    return NamedRegion(
        name=name,
        number=number,
        parts=tuple(parts),
        edges=tuple(edges),
        inputs=_outside(nodes, inside, order),
        outputs=outputs,
        size=max(label.total for label in labels.values()),
        module=_common_module(nodes),
        line=source_line(nodes[0]),
    )


def _in_running_order(declared: Mapping[str, RegionPart], first: Mapping[str, int]) -> list[str]:
    """The parts, each after those that it reads from where that can be, else where its first node stands."""
    placed: list[str] = []
    waiting = sorted(declared, key=first.__getitem__)
    while waiting:
        ready = (p for p in waiting if all(before in placed or before not in declared for before in declared[p].after))
        following = next(ready, waiting[0])
        placed.append(following)
        waiting.remove(following)
    return placed


def _outside(nodes: Iterable[fx.Node], inside: set[fx.Node], order: Mapping[fx.Node, int]) -> tuple[fx.Node, ...]:
    read = {source for node in nodes for source in node.all_input_nodes if source not in inside}
    return tuple(sorted(read, key=order.__getitem__))


def _common_module(nodes: Iterable[fx.Node]) -> str:
    paths = {path for node in nodes if (path := module_path(node))}
    return os.path.commonpath([path.replace(".", "/") for path in paths]).replace("/", ".") if paths else ""
