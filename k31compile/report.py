"""What a compile decided: what was fused, what was not and why, and what each step cost."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from k31compile.errors import K31Error

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Refusal:
    """One fusion that did not happen.

    Attributes:
        name: the fusion.
        reason: a sentence that says which condition was not met.
        where: file and line in the user's model.
        hint: what to change.
        near_miss: True when all conditions but one were met.
        layers: paths of the modules whose code stands at `where`.

    """

    name: str
    reason: str
    where: str = ""
    hint: str = ""
    near_miss: bool = False
    layers: tuple[str, ...] = ()

    def __str__(self) -> str:
        place = f" ({self.where})" if self.where else ""
        advice = f"; {self.hint}" if self.hint else ""
        return f"{self.name}: {self.reason}{place}{advice}"


@dataclass(frozen=True)
class PassRun:
    """One pass as it ran: its time, how many places it changed, and what it does to the numbers."""

    name: str
    seconds: float = 0.0
    changed: int = 0
    numerics: str = "exact"


def _no_schedule() -> dict[str, Any]:
    return {
        "streams": 1,
        "events": 0,
        "critical_path": None,
        "serial": None,
        "predicted": None,
        "super_kernels": 0,
    }


def _no_memory() -> dict[str, Any]:
    return {"weights": 0, "inputs": 0, "peak": 0, "at": ""}


def _no_cache() -> dict[str, Any]:
    return {"hit": False, "level": None, "key": None, "why": "not looked up"}


_OF_A_PROCESS = ("cache", "phases", "versions", "tier")
_EVIDENCE = ("confirmations", "leaves")


@dataclass
class Report:
    """What was decided for one graph, or by ``merge`` for several.

    Attributes:
        fused: operator name -> call sites in the final graph.
        contains: operator name -> how many of it a larger operator took in.
        refused: the fusions that did not happen.
        graphs: how many graphs this report tells of.
        graph_breaks: how many times the model's code left the graph.
        nodes_before: nodes of the traced graph.
        nodes_after: nodes of the graph after all passes.
        passes: every pass that ran, in order.
        schedule: streams, events, critical_path, serial, predicted, super_kernels.
        cache: hit, level, key, why.
        phases: phase name -> seconds.
        versions: package or tool -> version.
        notes: what a user must know, one sentence each: every fall-back is here.
        providers: operator name -> provider and why it was picked.
        confirmations: per confirmed region: name, samples, sizes, tolerance, worst_error, and whether it was
            remembered from an earlier compile.
        layers: path of a module -> operator name -> call sites; "" is the code outside of all modules.
        lines: path of a module -> `file.py:line` of the first code that ran there.
        inputs: dtype and shape of each input that is no weight, sorted; "?" for a dynamic size.
        memory: predicted bytes of weights, of inputs, and of all else at its peak when run operator by operator;
            `at` is the line of the peak. Zeros where nobody asked for it.
        tier: under codegen="tiered": "ops" (until it is built), "inductor" (taken over), "failed" (stays operator by
            operator); else empty.
        regions: per named region: name, where, layer, calls, inputs, outputs, edges between its parts, and parts:
            name, kind, nodes, inputs, weight_bytes.
        leaves: per function that was kept whole: function, where, operator, why, calls, samples, lengths, worst_error.
        weights: under layout="nz", per weight that a product reads: name, layout ("nd" or "nz"), dtype, shape, reason
            and remedy where it is nd, and the bytes of its packed copy; empty where nobody asked for it.
        learned: functions that a region came out of, candidates from the next compile on.
        choice: under choice="measured", per graph after its first call: taken ("fused" or "written") and the seconds
            that a call of each took.

    """

    fused: dict[str, int] = field(default_factory=dict)
    contains: dict[str, int] = field(default_factory=dict)
    refused: list[Refusal] = field(default_factory=list)
    graphs: int = 1
    graph_breaks: int = 0
    nodes_before: int = 0
    nodes_after: int = 0
    passes: list[PassRun] = field(default_factory=list)
    schedule: dict[str, Any] = field(default_factory=_no_schedule)
    cache: dict[str, Any] = field(default_factory=_no_cache)
    phases: dict[str, float] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    providers: dict[str, dict[str, str]] = field(default_factory=dict)
    confirmations: list[dict[str, Any]] = field(default_factory=list)
    layers: dict[str, dict[str, int]] = field(default_factory=dict)
    lines: dict[str, str] = field(default_factory=dict)
    inputs: list[str] = field(default_factory=list)
    memory: dict[str, Any] = field(default_factory=_no_memory)
    tier: str = ""
    regions: list[dict[str, Any]] = field(default_factory=list)
    leaves: list[dict[str, Any]] = field(default_factory=list)
    learned: list[str] = field(default_factory=list)
    weights: list[dict[str, Any]] = field(default_factory=list)
    choice: list[dict[str, Any]] = field(default_factory=list)

    @staticmethod
    def merge(reports: Iterable[Report]) -> Report:
        """Return one report over several graphs: counts and times added, sentences kept once."""
        parts = list(reports)
        total = Report(graphs=0, cache=_merged_cache(parts))
        for part in parts:
            total._absorb(part)
        return total

    def _absorb(self, part: Report) -> None:
        self.graphs += part.graphs
        self.graph_breaks += part.graph_breaks
        self.nodes_before += part.nodes_before
        self.nodes_after += part.nodes_after
        for mine, theirs in ((self.fused, part.fused), (self.contains, part.contains)):
            _add_counts(mine, theirs)
        for path, counts in part.layers.items():
            _add_counts(self.layers.setdefault(path, {}), counts)
        # Graphs of one call run one after the other: the memory of the hungriest is what they need.
        self.memory = max(self.memory, part.memory, key=lambda memory: int(memory["peak"]))
        self.inputs = sorted({*self.inputs, *part.inputs})
        self.tier = self.tier if part.tier in ("", self.tier) else " and ".join(filter(None, (self.tier, part.tier)))
        for phase, seconds in part.phases.items():
            self.phases[phase] = self.phases.get(phase, 0.0) + seconds
        self.refused = _once([*self.refused, *part.refused])
        self.notes = _once([*self.notes, *part.notes])
        self.confirmations = _once_confirmed([*self.confirmations, *part.confirmations])
        self.regions = [*self.regions, *part.regions]
        self.leaves = _once([*self.leaves, *part.leaves])
        self.learned = _once([*self.learned, *part.learned])
        self.weights = _once([*self.weights, *part.weights])
        self.choice = [*self.choice, *part.choice]
        self.passes = _merged_passes([*self.passes, *part.passes])
        self.schedule = _merged_schedule(self.schedule, part.schedule)
        self.lines = part.lines | self.lines
        self.versions |= part.versions
        self.providers |= part.providers

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain JSON values."""
        return asdict(self)

    def to_kept(self) -> dict[str, Any]:
        """What of a report is kept beside a compiled graph: all that does not belong to the process that made it."""
        passes = [asdict(replace(run, seconds=0.0)) for run in self.passes]
        kept = {name: value for name, value in self.to_dict().items() if name not in _OF_A_PROCESS}
        return kept | {"passes": passes} | {name: [_as_found(one) for one in kept[name]] for name in _EVIDENCE}

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Take over what `to_kept` gave in another process; notes are added to those that are here."""
        for name, value in kept.items():
            match name:
                case "refused":
                    known = [Refusal(**{**refusal, "layers": tuple(refusal["layers"])}) for refusal in value]
                    self.refused = known
                case "passes":
                    self.passes = [PassRun(**run) for run in value]
                case "notes":
                    self.notes = _once([*self.notes, *value])
                case "confirmations" | "leaves":
                    setattr(self, name, [as_remembered(one) for one in value])
                case _:
                    setattr(self, name, value)

    def to_json(self) -> str:
        """Return the report as JSON text."""
        return json.dumps(self.to_dict(), indent=2, sort_keys=True)

    def near_misses_first(self) -> list[Refusal]:
        """Return the refusals, those first that were one condition away from a fusion."""
        return sorted(self.refused, key=lambda refusal: not refusal.near_miss)

    def headline(self) -> str:
        """Return the one line that a user must not miss."""
        if self.fused:
            return "fused: " + ", ".join(f"{count} x {name}" for name, count in sorted(self.fused.items()))
        where = "this graph" if self.graphs == 1 else f"these {self.graphs} graphs"
        refusals = self.near_misses_first()
        if not refusals:
            return f"nothing was fused in {where}; nothing in it resembled a known operator"
        kind = "nearest miss" if refusals[0].near_miss else "first refusal"
        return f"nothing was fused in {where}; {kind}: {refusals[0]}"

    def render(self, console: Console) -> None:
        """Print the report on a rich console."""
        from k31compile.report_view import show

        show(self, console)

    def __str__(self) -> str:
        from k31compile.report_view import as_text

        return as_text(self)


def _add_counts(mine: dict[str, int], theirs: dict[str, int]) -> None:
    for name, count in theirs.items():
        mine[name] = mine.get(name, 0) + count


def _once(items: Sequence[Any]) -> list[Any]:
    kept: list[Any] = []
    for item in items:
        if item not in kept:
            kept.append(item)
    return kept


def as_remembered(evidence: Mapping[str, Any]) -> dict[str, Any]:
    """A confirmation, of a region or a function, that was not run but known before."""
    found = _as_found(evidence)
    return found | {"remembered": True, "text": f"remembered: {found['text']} before"}


def _as_found(evidence: Mapping[str, Any]) -> dict[str, Any]:
    """A confirmation as it was when it was run: the same in every process, whoever remembered it."""
    text = evidence.get("text", "")
    if evidence.get("remembered"):
        text = text.removeprefix("remembered: ").removesuffix(" before")
    return {**evidence, "remembered": False, "text": text}


def _once_confirmed(confirmations: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each confirmation once; one graph of a call may have confirmed what the next remembered."""
    facts = [{key: value for key, value in one.items() if key not in ("remembered", "text")} for one in confirmations]
    return [one for i, one in enumerate(confirmations) if facts[i] not in facts[:i]]


def _merged_passes(runs: Iterable[PassRun]) -> list[PassRun]:
    by_name: dict[str, PassRun] = {}
    for run in runs:
        old = by_name.get(run.name, PassRun(run.name, numerics=run.numerics))
        by_name[run.name] = PassRun(run.name, old.seconds + run.seconds, old.changed + run.changed, run.numerics)
    return list(by_name.values())


def _merged_schedule(left: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
    # Graphs of one call run one after the other: their times and events add up, their streams do not.
    merged = {**left, **right}
    merged["streams"] = max(left["streams"], right["streams"])
    for key in ("events", "super_kernels", "critical_path", "serial", "predicted"):
        known = [part[key] for part in (left, right) if part.get(key) is not None]
        merged[key] = sum(known) if known else None
    return merged


def _merged_cache(parts: Sequence[Report]) -> dict[str, Any]:
    if len(parts) == 1:
        return dict(parts[0].cache)
    hits = sum(bool(part.cache.get("hit")) for part in parts)
    why = f"{hits} of {len(parts)} graphs were found" if parts else "no graph was compiled"
    return {"hit": bool(parts) and hits == len(parts), "level": None, "key": None, "why": why}


_lock = threading.Lock()
_reports: list[Report] = []


def record(report: Report) -> None:
    """Remember a report as the newest one of this process."""
    with _lock:
        _reports.append(report)


def reports() -> list[Report]:
    """Return the reports of all graphs compiled in this process, oldest first."""
    with _lock:
        return list(_reports)


def last_report() -> Report:
    """Return the report of the newest graph compiled in this process."""
    with _lock:
        if _reports:
            return _reports[-1]
    raise K31Error(
        "no graph was compiled by k31 in this process yet",
        hint="call the compiled model once; torch.compile itself compiles nothing",
    )


def clear_reports() -> None:
    """Forget all reports of this process."""
    with _lock:
        _reports.clear()
