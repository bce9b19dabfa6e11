"""The shared engine: find a region by its anchor, confirm it by running, rewrite it, or say why not.

A recogniser declares where an operator may be and what it computes; everything else is here.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import fx

from k31compile.graph.confirm import Confirmation, Mismatch, Reading, confirm
from k31compile.graph.cuts import Eligible, Leak, find_leaves
from k31compile.graph.dataflow import Dataflow, dataflow_of
from k31compile.graph.region import Region
from k31compile.graph.rewrite import Replacement, insert_replacements, trace_replacement
from k31compile.graph.sizes import nbytes_of
from k31compile.graph.source import source_line
from k31compile.report import Refusal


@dataclass(frozen=True)
class Demand:
    """What a recogniser asks for one anchor: the outputs, what must lie inside, what may be a leaf and its price."""

    outputs: tuple[fx.Node, ...]
    core: frozenset[fx.Node]
    eligible: Eligible
    kept: tuple[fx.Node, ...] = ()
    capacity: Callable[[fx.Node], int] = nbytes_of


class Recogniser(ABC):
    """One operator as the engine sees it."""

    name: str

    @abstractmethod
    def anchors(self, flow: Dataflow) -> Iterable[fx.Node]:
        """Nodes that only the operator's region would have, in the order to try them."""

    @abstractmethod
    def demands(self, flow: Dataflow, anchor: fx.Node) -> Iterable[Demand]:
        """Where the region may begin and end, the most specific form first.

        Raises:
            Mismatch: the anchor cannot be one, with the reason.
        """

    @abstractmethod
    def variants(self, flow: Dataflow, leaves: tuple[fx.Node, ...]) -> Iterable[tuple[fx.Node, ...]]:
        """Other leaves that serve better than those the cut found (the pages behind a gathered key), then the found."""

    @abstractmethod
    def readings(self, flow: Dataflow, anchor: fx.Node, region: Region) -> Iterator[Reading]:
        """Every way to read the leaves as operands, the likely ones first."""

    @abstractmethod
    def guards(self, flow: Dataflow, region: Region, reading: Reading) -> None:
        """What must hold around a confirmed region.

        Raises:
            Mismatch: it does not, with the reason.
        """

    @abstractmethod
    def resembles(self, flow: Dataflow, anchor: fx.Node) -> bool:
        """Whether a user would expect this anchor to be the operator, so that a refusal is worth a sentence."""

    def hint(self, reason: str) -> str:
        """What to change, for a reason of refusal."""
        return "see docs/recognition.md for the forms that are recognised"


@dataclass
class Findings:
    """What a recogniser found in one graph."""

    fused: int = 0
    refused: list[Refusal] = field(default_factory=list)
    confirmations: list[Confirmation] = field(default_factory=list)


@dataclass(frozen=True)
class _Found:
    """A region that was confirmed, with what will stand for it."""

    confirmation: Confirmation
    region: Region
    replacement: Replacement


def recognise(module: fx.GraphModule, recogniser: Recogniser) -> Findings:
    """Rewrite every region of `module` that the recogniser confirms; refuse the others with their reasons.

    Regions of one round are found in the same graph and rewritten together, so that a model's depth costs one index
    and one sort a round. What a rewrite may have changed, anchors inside it and refusals, is looked at once more.
    """
    findings = Findings()
    settled: set[fx.Node] = set()
    while True:
        flow = dataflow_of(module.graph)
        found, refused = _attempt_all(flow, recogniser, settled)
        if not found:
            findings.refused.extend(refused.values())
            return findings
        insert_replacements(module, [one.replacement for one in found])
        settled.difference_update(refused)
        findings.fused += len(found)
        findings.confirmations.extend(one.confirmation for one in found)


def _attempt_all(
    flow: Dataflow, recogniser: Recogniser, settled: set[fx.Node]
) -> tuple[list[_Found], dict[fx.Node, Refusal]]:
    """Try the anchors that are not settled; those inside a region found just now wait for the next round."""
    found: list[_Found] = []
    refused: dict[fx.Node, Refusal] = {}
    covered: set[fx.Node] = set()
    for anchor in recogniser.anchors(flow):
        if anchor in settled or anchor in covered:
            continue
        outcome = _attempt(flow, recogniser, anchor)
        if isinstance(outcome, _Found):
            if _interleaved(flow, outcome.replacement, [one.replacement for one in found]):
                continue
            found.append(outcome)
            covered.update(outcome.region.nodes)
        elif outcome is not None:
            refused[anchor] = outcome
        settled.add(anchor)
    return found, refused


def _interleaved(flow: Dataflow, new: Replacement, others: Sequence[Replacement]) -> bool:
    """Whether two rewrites could wait for each other: an operator with several outputs waits for all its leaves."""

    def last_leaf(one: Replacement) -> int:
        return max((flow.position[leaf] for leaf in one.leaves), default=-1)

    def first_output(one: Replacement) -> int:
        return min(flow.position[output] for output in one.outputs)

    return any(
        len(new.outputs) + len(other.outputs) > 2
        and last_leaf(new) > first_output(other)
        and last_leaf(other) > first_output(new)
        for other in others
    )


@dataclass(frozen=True)
class _Reason:
    rank: int
    text: str


def _attempt(flow: Dataflow, recogniser: Recogniser, anchor: fx.Node) -> _Found | Refusal | None:
    best = _Reason(0, "")
    try:
        for demand in recogniser.demands(flow, anchor):
            outcome = _try_demand(flow, recogniser, anchor, demand)
            if isinstance(outcome, _Found):
                return outcome
            best = max(best, outcome, key=lambda reason: reason.rank)
    except Mismatch as mismatch:
        best = max(best, _Reason(2, str(mismatch.args[0])), key=lambda reason: reason.rank)
    if not best.text or not recogniser.resembles(flow, anchor):
        return None
    return Refusal(recogniser.name, best.text, source_line(anchor), recogniser.hint(best.text), best.rank >= 2)


def _try_demand(flow: Dataflow, recogniser: Recogniser, anchor: fx.Node, demand: Demand) -> _Found | _Reason:
    leaves = find_leaves(flow, demand.core, demand.eligible, demand.kept, demand.capacity)
    if isinstance(leaves, Leak):
        return _Reason(1, _describe_leak(leaves))
    best = _Reason(0, "")
    for variant in recogniser.variants(flow, leaves):
        try:
            region = Region.between(flow, variant, demand.outputs)
        except ValueError:
            continue
        readings = recogniser.readings(flow, anchor, region)
        first = next(readings, None)
        if first is None:
            best = max(best, _Reason(1, _describe_leaves(region.leaves)), key=lambda reason: reason.rank)
            continue
        try:
            key = f"{recogniser.name}:{region.canonical_hash}:{first.context}"
            reading, confirmation = confirm(itertools.chain([first], readings), key)
            recogniser.guards(flow, region, reading)
        except Mismatch as mismatch:
            best = max(best, _Reason(2, str(mismatch.args[0])), key=lambda reason: reason.rank)
            continue
        try:
            replacement = trace_replacement(_operand_nodes(reading), reading.replaced, reading.build)
        except ValueError as error:
            best = max(best, _Reason(2, str(error)), key=lambda reason: reason.rank)
            continue
        return _Found(confirmation, region, replacement)
    return best


def _operand_nodes(reading: Reading) -> tuple[fx.Node, ...]:
    return (*reading.region.leaves, *reading.extra_operands)


def _describe_leak(leak: Leak) -> str:
    if not leak.path:
        return "its inputs could not be separated from the rest of the graph"
    first, last = leak.path[0], leak.path[-1]
    return (
        f"{source_line(last)} depends on {first.name} along a path where no value has the shape of an operand "
        f"({len(leak.path)} nodes)"
    )


def _describe_leaves(leaves: Sequence[fx.Node]) -> str:
    from k31compile.graph.sizes import shape_of

    shapes = ", ".join(f"{leaf.name} {list(shape_of(leaf))}" for leaf in leaves)
    return f"its inputs cannot be told apart as operands: {shapes}"


def outside_users(flow: Dataflow, inner: Collection[fx.Node], outputs: Collection[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Inner nodes whose values someone outside the region reads, each with one such reader."""
    inside = set(inner) | set(outputs)
    return {
        node: reader
        for node in inner
        if node not in outputs and node not in flow.constants
        for reader in flow.users[node]
        if reader not in inside and reader in flow.live
    }
