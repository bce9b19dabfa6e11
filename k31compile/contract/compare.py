"""Hold what was found against a contract: what each layer lost, why, and on which line; how much memory grew."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from k31compile.contract.lockfile import Graph, graph_of, read_contract
from k31compile.errors import ContractError
from k31compile.options import Options
from k31compile.report import Refusal, Report

ALLOWED_GROWTH = 0.05
"""The part by which a peak may grow before it breaks the contract."""

INSIDE = "inside larger operators"


@dataclass(frozen=True)
class Loss:
    """One operator that a layer was promised and did not get."""

    entry: str
    layer: str
    name: str
    promised: int
    found: int
    reason: str
    where: str
    hint: str

    def __str__(self) -> str:
        layer = self.layer or "outside of all modules"
        counts = f"promised {self.promised}, found {self.found}"
        return f"{_of(self.entry)}{layer} lost {self.name} ({counts}): {self.reason} ({self.where}); {self.hint}"


@dataclass(frozen=True)
class Growth:
    """A graph whose predicted peak is beyond what its contract allows."""

    entry: str
    number: int
    promised: int
    found: int
    where: str

    def __str__(self) -> str:
        by = f"{self.found / self.promised - 1:.0%}" if self.promised else "all of it"
        return (
            f"{_of(self.entry)}graph {self.number} needs {self.found} bytes at its peak, {by} more than the "
            f"{self.promised} promised ({ALLOWED_GROWTH:.0%} are allowed); the peak is at {self.where}"
        )


@dataclass
class Verdict:
    """What broke the contract, and what only has to be told."""

    losses: list[Loss] = field(default_factory=list)
    growths: list[Growth] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing was lost and no peak grew beyond the tolerance."""
        return not self.losses and not self.growths

    def lines(self) -> list[str]:
        """One line for each thing that broke the contract."""
        return [*map(str, self.losses), *map(str, self.growths)]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "ok": self.ok}


def compare(promised: Sequence[Graph], found: Sequence[Graph], report: Report) -> Verdict:
    """Hold the graphs of one call against those of its contract; `report` is over all of the call's graphs.

    Operators are counted over all graphs of the call, so that a graph break by itself breaks nothing. An operator that
    moved to another module of the same layer, or that a larger one took in, is not lost. Peaks are compared where the
    inputs are those of the contract.
    """
    verdict = Verdict()
    want, got = _layers(promised), _layers(found)
    names = sorted({name for layers in (want, got) for counts in layers.values() for name in counts})
    contained = Counter(_contains(found)), Counter(_contains(promised))
    missing: dict[str, Counter[str]] = {}
    for name in sorted({*names, *contained[0], *contained[1]}):
        credit = contained[0][name] - contained[1][name]
        lost, gained = _balance({p: c[name] for p, c in want.items()}, {p: c[name] for p, c in got.items()}, credit)
        missing[name] = lost
        for layer, count in gained.items():
            verdict.notes.append(f"gained: {count} x {name} in {layer or 'the code outside of all modules'}")
    entry = promised[0].entry if promised else ""
    # A named region goes with the operator that it stands in front of, so that one is told first.
    for name, lost in sorted(missing.items(), key=lambda item: (item[0].endswith("_prolog"), item[0])):
        for layer, count in lost.items():
            there = want.get(layer, Counter())[name] or count
            reason, where, hint = _why(report, layer, name, {n for n, other in missing.items() if layer in other})
            verdict.losses.append(Loss(entry, layer, name, there, there - count, reason, where, hint))
    _compare_memory(promised, found, verdict)
    return verdict


def hold_to_contract(report: Report, options: Options) -> None:
    """Hold one graph, as the backend made it, against the contract that `options.lock` names, if it names one.

    The graph of the contract with the same inputs is its measure; without such a graph (another length), it must get
    all that some graph of the contract got, and its memory is not compared: that is noted, and an error under `strict`.

    Raises:
        ContractError: it gets less, or needs more memory; the text is the first line of what is missing.
        LockError: the contract cannot be read.
    """
    if options.lock is None:
        return
    graphs = read_contract(Path(options.lock)).graphs
    found = graph_of(report)
    same = [graph for graph in graphs if graph.inputs == found.inputs]
    verdicts = [compare([graph], [found], report) for graph in same or graphs]
    best = min(
        verdicts, key=lambda verdict: (sum(loss.promised - loss.found for loss in verdict.losses), not verdict.ok)
    )
    lines = best.lines()
    if lines:
        more = f" (and {len(lines) - 1} more like this)" if len(lines) > 1 else ""
        raise ContractError(lines[0] + more, options.lock)
    if not same:
        shapes = ", ".join(found.inputs)
        unknown = f"no graph of the contract {options.lock} has these inputs: {shapes}"
        if options.strict:
            raise ContractError(unknown)
        best.notes.append(f"{unknown}; this one got what another promises")
    report.notes.extend(best.notes)


def place_of(path: str) -> str:
    """The layer that a module belongs to: its path up to the last number in it."""
    parts = path.split(".")
    numbered = [i for i, part in enumerate(parts) if part.isdecimal()]
    return ".".join(parts[: numbered[-1] + 1]) if numbered else ""


def _of(entry: str) -> str:
    return f"{entry}: " if entry else ""


def _layers(graphs: Sequence[Graph]) -> dict[str, Counter[str]]:
    total: dict[str, Counter[str]] = {}
    for graph in graphs:
        for path, counts in graph.layers.items():
            total.setdefault(path, Counter()).update(counts)
    return total


def _contains(graphs: Sequence[Graph]) -> Counter[str]:
    total: Counter[str] = Counter()
    for graph in graphs:
        total.update(graph.contains)
    return total


def _balance(want: Mapping[str, int], got: Mapping[str, int], credit: int) -> tuple[Counter[str], Counter[str]]:
    """What each layer lacks and has beyond its promise; `credit` is how many more larger operators took in."""
    lost = Counter({path: count - got.get(path, 0) for path, count in want.items() if count > got.get(path, 0)})
    gained = Counter({path: count - want.get(path, 0) for path, count in got.items() if count > want.get(path, 0)})
    for old in list(lost):
        for new in list(gained):
            if _is_same_place(old, new):
                moved = min(lost[old], gained[new])
                lost[old] -= moved
                gained[new] -= moved
    for path in list(lost):
        taken = max(0, min(lost[path], credit))
        lost[path] -= taken
        credit -= taken
    if credit < 0 and sum(gained.values()) < -credit:
        lost[INSIDE] = -credit - sum(gained.values())
    return +lost, +gained


def _is_same_place(old: str, new: str) -> bool:
    return place_of(old) == place_of(new) or f".{new}".endswith(f".{old}") or f".{old}".endswith(f".{new}")


def _why(report: Report, layer: str, name: str, lost_there: set[str]) -> tuple[str, str, str]:
    """Reason, file and line, and remedy for an operator that a layer lost."""
    refusal = _refusal(report, layer, name)
    line = _line(report, layer)
    if refusal is not None:
        return refusal.reason, refusal.where or line, refusal.hint or ContractError.default_hint
    undone = next((note for note in report.notes if name in note and "undone" in note), "")
    if undone or not report.lines:
        return undone or (report.notes or ["the graph is empty"])[0], line, ContractError.default_hint
    if not any(place_of(path) == place_of(layer) for path in report.lines):
        breaks = f" ({report.graph_breaks} graph breaks)" if report.graph_breaks else ""
        return f"nothing of that layer was compiled here{breaks}", line, ContractError.default_hint
    for other in sorted(lost_there - {name}):
        cause = _refusal(report, layer, other)
        if cause is not None:
            return f"it is lost together with {other}", cause.where or line, cause.hint or ContractError.default_hint
    return "nothing there resembles it any more", line, ContractError.default_hint


def _refusal(report: Report, layer: str, name: str) -> Refusal | None:
    """The refusal that speaks of this operator in this layer, of this very module before its neighbours."""
    known = [refusal for refusal in report.near_misses_first() if refusal.name == name]
    for speaks in (lambda path: path == layer, lambda path: place_of(path) == place_of(layer)):
        for refusal in known:
            if any(map(speaks, refusal.layers)):
                return refusal
    return None


def _line(report: Report, layer: str) -> str:
    """Where the layer's code begins, or that of the nearest module around or beside it."""
    parts = layer.split(".")
    for length in range(len(parts), 0, -1):
        around = ".".join(parts[:length])
        for path, line in report.lines.items():
            if path == around or path.startswith(f"{around}."):
                return line
    return next(iter(report.lines.values()), "line unknown")


def _compare_memory(promised: Sequence[Graph], found: Sequence[Graph], verdict: Verdict) -> None:
    if [graph.inputs for graph in promised] != [graph.inputs for graph in found]:
        verdict.notes.append("the graphs' inputs are not those of the contract: memory was not compared")
        return
    for old, new in zip(promised, found, strict=True):
        before, now = old.memory["peak"], new.memory["peak"]
        if now > before * (1 + ALLOWED_GROWTH):
            verdict.growths.append(Growth(old.entry, old.number, before, now, str(new.memory["at"])))
        elif now < before * (1 - ALLOWED_GROWTH):
            verdict.notes.append(f"gained: graph {old.number} needs {now} bytes at its peak, {before} were promised")
