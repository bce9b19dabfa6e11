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
from k31compile.graph.equal_regions import find_equal_region
from k31compile.graph.region import Region, text_of_values
from k31compile.graph.rewrite import Replacement, insert_replacements, trace_replacement
from k31compile.graph.sizes import nbytes_of
from k31compile.graph.source import source_line
from k31compile.report import Refusal


@dataclass(frozen=True)
class Demand:
    """What a recogniser asks for one anchor: the outputs, what must lie inside, what may be a leaf and its price.

    `kept` and `given` are leaves for certain, see `find_leaves`.
    """

    outputs: tuple[fx.Node, ...]
    core: frozenset[fx.Node]
    eligible: Eligible
    kept: tuple[fx.Node, ...] = ()
    capacity: Callable[[fx.Node], int] = nbytes_of
    given: tuple[fx.Node, ...] = ()


class Recogniser(ABC):
    """One operator as the engine sees it."""

    name: str
    # Whether an anchor is an operand, which more than one region may read.
    anchors_stay = False

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


@dataclass(frozen=True)
class _Reason:
    rank: int
    text: str


def recognise(module: fx.GraphModule, recogniser: Recogniser) -> Findings:
    """Rewrite every region of `module` that the recogniser confirms; refuse the others with their reasons.

    Regions of one round are found in the same graph and rewritten together, so that a model's depth costs one index
    and one sort a round. What a rewrite may have changed, anchors inside it and refusals, is looked at once more.
    """
    findings = Findings()
    settled: set[fx.Node] = set()
    while True:
        search = _Search(dataflow_of(module.graph), recogniser)
        refused = search.attempt_all(settled)
        if not search.found:
            findings.refused.extend(refused.values())
            return findings
        insert_replacements(module, [one.replacement for one in search.found])
        settled.difference_update(refused)
        findings.fused += len(search.found)
        findings.confirmations.extend(one.confirmation for one in search.found)


class _Search:
    """One round over one graph."""

    def __init__(self, flow: Dataflow, recogniser: Recogniser) -> None:
        self.flow = flow
        self.recogniser = recogniser
        self.found: list[_Found] = []
        self._kinds: dict[str, Region] = {}
        self._programs: dict[str, Replacement] = {}

    def attempt_all(self, settled: set[fx.Node]) -> dict[fx.Node, Refusal]:
        """Try the anchors that are not settled; those inside a region found just now wait for the next round."""
        refused: dict[fx.Node, Refusal] = {}
        covered: set[fx.Node] = set()
        for anchor in self.recogniser.anchors(self.flow):
            if anchor in settled or anchor in covered:
                continue
            outcome = self._attempt(anchor)
            if isinstance(outcome, _Found):
                if _interleaved(self.flow, outcome.replacement, [one.replacement for one in self.found]):
                    continue
                self.found.append(outcome)
                self._kinds.setdefault(outcome.region.canonical_hash, outcome.region)
                covered.update(outcome.region.nodes)
                if self.recogniser.anchors_stay:
                    continue
            elif outcome is not None:
                refused[anchor] = outcome
            settled.add(anchor)
        return refused

    def _attempt(self, anchor: fx.Node) -> _Found | Refusal | None:
        best = _Reason(0, "")
        try:
            # Looked for once: an equal region is asked for first, and most demands are dearer than that question.
            demands, again = itertools.tee(self.recogniser.demands(self.flow, anchor))
            equal = self._try_equals(anchor, demands)
            if equal is not None:
                return equal
            for demand in again:
                outcome = self._try_demand(anchor, demand)
                if isinstance(outcome, _Found):
                    return outcome
                best = max(best, outcome, key=lambda reason: reason.rank)
        except Mismatch as mismatch:
            best = max(best, _Reason(2, str(mismatch.args[0])), key=lambda reason: reason.rank)
        if not best.text or not self.recogniser.resembles(self.flow, anchor):
            return None
        hint = self.recogniser.hint(best.text)
        return Refusal(self.recogniser.name, best.text, source_line(anchor), hint, best.rank >= 2)

    def _try_equals(self, anchor: fx.Node, demands: Iterable[Demand]) -> _Found | None:
        """A region equal to one that was found before: an equal layer's, at the cost of a walk."""
        if not self._kinds:
            return None
        for demand in demands:
            for known in self._kinds.values():
                region = find_equal_region(self.flow, known, demand.outputs)
                outcome = self._try_region(anchor, region) if region is not None else None
                if isinstance(outcome, _Found):
                    return outcome
        return None

    def _try_demand(self, anchor: fx.Node, demand: Demand) -> _Found | _Reason:
        leaves = find_leaves(self.flow, demand.core, demand.eligible, demand.kept, demand.capacity, demand.given)
        if isinstance(leaves, Leak):
            return _Reason(1, _describe_leak(leaves))
        best = _Reason(0, "")
        for variant in self.recogniser.variants(self.flow, leaves):
            try:
                region = Region.between(self.flow, variant, demand.outputs)
            except ValueError:
                continue
            outcome = self._try_region(anchor, region)
            if isinstance(outcome, _Found):
                return outcome
            best = max(best, outcome, key=lambda reason: reason.rank)
        return best

    def _try_region(self, anchor: fx.Node, region: Region) -> _Found | _Reason:
        readings = self.recogniser.readings(self.flow, anchor, region)
        first = next(readings, None)
        if first is None:
            return _Reason(1, _describe_leaves(region.leaves))
        try:
            found = confirm(itertools.chain([first], readings))
            self.recogniser.guards(self.flow, region, found.reading)
            return _Found(found.confirmation, region, self._replacement(found.key, found.reading))
        except Mismatch as mismatch:
            return _Reason(2, str(mismatch.args[0]))
        except ValueError as error:
            return _Reason(2, str(error))

    def _replacement(self, key: str, reading: Reading) -> Replacement:
        """The traced program of a reading; equal regions with equal operands share one."""
        operands = (*reading.region.leaves, *reading.extra_operands)
        same = f"{key}:{text_of_values((*operands, *reading.replaced))}"
        known = self._programs.get(same)
        if known is None:
            known = self._programs[same] = trace_replacement(operands, reading.replaced, reading.build)
        return Replacement(operands, reading.replaced, known.program)


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
