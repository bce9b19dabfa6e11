"""A prolog: what stands between a layer's input and the operands of its fused operator, named and labelled in parts."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import networkx as nx
from torch import fx

from k31compile.graph.dataflow import Dataflow
from k31compile.graph.named_regions import LABEL, RegionPart, label_of, label_region, read_regions
from k31compile.graph.source import source_line
from k31compile.graph.verify_region import verify_regions
from k31compile.passes.recognise.chains import strictly_between
from k31compile.passes.recognise.parts import Group, parts_of
from k31compile.report import Refusal


@dataclass(frozen=True)
class Extent:
    """Where a prolog begins and ends: its products, and each end with the names of the operands that it serves."""

    products: frozenset[fx.Node]
    ends: Mapping[fx.Node, frozenset[str]]


@dataclass(frozen=True)
class Missing:
    """A fused operator with all of a prolog but one part."""

    part: str
    why: str


@dataclass
class Named:
    """How many regions are there, whether a label is new, and which operators have a prolog that lacks a part."""

    regions: int = 0
    new: int = 0
    refused: list[Refusal] = field(default_factory=list)


class Prolog(ABC):
    """One kind of prolog."""

    name: str

    @abstractmethod
    def anchors(self, flow: Dataflow) -> Iterable[fx.Node]:
        """The fused operators that may have one, in the order of the graph."""

    @abstractmethod
    def extent(self, flow: Dataflow, anchor: fx.Node) -> Extent | Missing | None:
        """Where the prolog of an operator is, what it lacks, or None where nothing looks like one."""

    @abstractmethod
    def name_of(self, flow: Dataflow, inside: set[fx.Node], group: Group) -> str:
        """The name of a part."""


def name_prologs(module: fx.GraphModule, prolog: Prolog) -> Named:
    """Label every prolog of a kind; operators that share a product have one together."""
    flow = Dataflow(module.graph)
    named, found = Named(), list[tuple[fx.Node, Extent]]()
    for anchor in prolog.anchors(flow):
        extent = prolog.extent(flow, anchor)
        if isinstance(extent, Extent):
            found.append((anchor, extent))
        elif extent is not None:
            named.refused.append(_refusal(prolog, anchor, extent))
    before = _labels(flow, prolog)
    for node in before:
        del node.meta[LABEL]
    joined = _joined(found)
    for number, (_, extent) in enumerate(joined):
        _label(flow, prolog, number, extent)
    regions = [region for region in read_regions(module.graph) if region.name == prolog.name]
    verified = verify_regions(module.graph, regions)
    for region, wrong in zip(regions, verified, strict=True):
        if wrong:
            for node in region.nodes:
                del node.meta[LABEL]
            reason = f"its parts do not hang together: {'; '.join(wrong)}"
            named.refused.append(Refusal(prolog.name, reason, source_line(joined[region.number][0])))
    named.regions = sum(not wrong for wrong in verified)
    named.new = named.regions if before != _labels(flow, prolog) else 0
    return named


def _labels(flow: Dataflow, prolog: Prolog) -> dict[fx.Node, RegionPart]:
    return {node: label for node in flow.nodes if (label := label_of(node)) and label.region == prolog.name}


def _joined(found: Sequence[tuple[fx.Node, Extent]]) -> list[tuple[fx.Node, Extent]]:
    """The extents, those with a product in common made one."""
    shared: nx.Graph = nx.Graph()
    for i, (_, extent) in enumerate(found):
        shared.add_edges_from((i, product) for product in extent.products)
    joined = []
    for component in nx.connected_components(shared):
        members = [found[i] for i in sorted(i for i in component if isinstance(i, int))]
        ends: dict[fx.Node, frozenset[str]] = {}
        for _, extent in members:
            for end, names in extent.ends.items():
                ends[end] = ends.get(end, frozenset()) | names
        joined.append((members[0][0], Extent(frozenset().union(*(e.products for _, e in members)), ends)))
    return joined


def _label(flow: Dataflow, prolog: Prolog, number: int, extent: Extent) -> None:
    inside = strictly_between(flow, extent.products, extent.ends)
    # Products that serve another prolog too are that one's.
    inside = {node for node in inside if label_of(node) is None}
    parts = parts_of(flow, inside, dict(extent.ends), lambda group: prolog.name_of(flow, inside, group))
    label_region(prolog.name, number, parts)


def _refusal(prolog: Prolog, anchor: fx.Node, missing: Missing) -> Refusal:
    hint = "compute it from the layer's input, in the same graph as the operator that reads it"
    reason = f"its part {missing.part} is missing: {missing.why}"
    return Refusal(prolog.name, reason, source_line(anchor), hint, near_miss=True)
