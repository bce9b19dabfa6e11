"""choice="measured": a graph with its fusions and as it was written, both built; its first call says which is faster.

Fused operators win where there is much to save. On another machine, or at sizes where a model is all overhead, the
graph as Inductor builds it may be faster: then that one runs, the report says so, and the cache keeps it.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from k31compile.graph.views import ATEN
from k31compile.report import Report

Call = Callable[..., Any]

FUSED, WRITTEN = "fused", "written"

_LEAST_ROUNDS, _MOST_ROUNDS = 5, 15
_SECONDS = 2.0  # after which no further round begins
_MARGIN = 1.02  # what the other one must be faster by: nearer is noise, and fusions save memory too


class Candidate:
    """One of the two: what runs it, and what keeps it in the cache once it is the one."""

    def __init__(self, call: Call, keep: Callable[[], None] | None = None) -> None:
        """`keep` is called at most once; None where there is no cache."""
        self.call = call
        self.keep = keep


class Measured:
    """A compiled graph that becomes one of its candidates at its first call."""

    def __init__(self, candidates: Mapping[str, Candidate], written_inputs: Sequence[int], report: Report) -> None:
        """`written_inputs` says which inputs a call writes into: measurements get copies of them."""
        self._candidates: Mapping[str, Candidate] | None = candidates
        self._written = written_inputs
        self._report = report
        self._chosen: Call | None = None
        self._lock = threading.Lock()

    def __call__(self, *inputs: Any) -> Any:
        """Run the graph once."""
        if self._chosen is None:
            with self._lock:
                if self._chosen is None:
                    self._choose(inputs)
        assert self._chosen is not None
        return self._chosen(*inputs)

    def _choose(self, inputs: Sequence[Any]) -> None:
        assert self._candidates is not None
        copies = with_copies(inputs, self._written)
        times = in_turns({name: one.call for name, one in self._candidates.items()}, copies)
        taken = WRITTEN if times[WRITTEN] * _MARGIN < times[FUSED] else FUSED
        tell(self._report, taken, times)
        candidate = self._candidates[taken]
        if candidate.keep is not None:
            candidate.keep()
        # Last: whoever sees it has the report as well. The other one's code can go.
        self._chosen, self._candidates = candidate.call, None


def in_turns(calls: Mapping[str, Call], inputs: Sequence[Any]) -> dict[str, float]:
    """The median seconds of a call of each, taken in turns after one call of each that does not count."""
    for call in calls.values():
        call(*inputs)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    begin = time.perf_counter()
    for done in range(_MOST_ROUNDS):
        if done >= _LEAST_ROUNDS and time.perf_counter() - begin > _SECONDS:
            break
        for name, call in calls.items():
            start = time.perf_counter()
            call(*inputs)
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def with_copies(inputs: Sequence[Any], written: Sequence[int]) -> list[Any]:
    """The inputs with copies of what is written and of all that shares its memory, laid out as they were."""
    places = {inputs[i].untyped_storage().data_ptr() for i in written}
    copies: dict[int, torch.UntypedStorage] = {}
    made: list[Any] = []
    for value in inputs:
        if not isinstance(value, torch.Tensor) or (place := value.untyped_storage().data_ptr()) not in places:
            made.append(value)
            continue
        if place not in copies:
            copies[place] = value.untyped_storage().clone()
        own = torch.empty(0, dtype=value.dtype)
        made.append(own.set_(copies[place], value.storage_offset(), value.size(), value.stride()))
    return made


def written_inputs(traced: fx.GraphModule) -> list[int]:
    """Which inputs a functional graph writes into at its end."""
    inputs = traced.graph.find_nodes(op="placeholder")
    copied = {node.args[0] for node in traced.graph.find_nodes(op="call_function", target=ATEN.copy_.default)}
    return [place for place, node in enumerate(inputs) if node in copied]


def tell(report: Report, taken: str, times: Mapping[str, float]) -> None:
    """Put a choice into the report; where the graph runs as it was written nothing of it is fused any more."""
    seconds = {name: float(f"{value:.3g}") for name, value in times.items()}
    report.choice.append({"taken": taken, "seconds": seconds})
    if taken == WRITTEN:
        report.fused, report.contains, report.providers, report.layers = {}, {}, {}, {}
        report.notes.append(
            f"choice='measured': this graph runs as it was written, {seconds[WRITTEN]:.3g} s a call; with its fusions "
            f"it takes {seconds[FUSED]:.3g} s here"
        )


def both_or_fused(build: Callable[[bool], Candidate], inputs: Sequence[int], report: Report) -> Call:
    """What calls the faster one, built by `build(is_fused)`; the fused one alone where the other cannot be built."""
    fused = build(True)
    try:
        written = build(False)
    except Exception as error:
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        report.notes.append(f"choice='measured' had nothing to compare with, the graph runs fused: {why}")
        if fused.keep is not None:
            fused.keep()
        return fused.call
    return Measured({FUSED: fused, WRITTEN: written}, inputs, report)
