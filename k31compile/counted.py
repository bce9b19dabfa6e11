"""Backend k31 for one use of a model, counted: how many graphs were compiled, how many ran, and where the time went."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from k31compile.backend import k31
from k31compile.report import Report, last_report, reports

Compiled = Callable[..., Any]


class CountedBackend:
    """A backend for torch.compile that is k31 with these options, and counts.

    Attributes:
        reports: of every graph that was compiled through this, in order.
        backend_seconds: time inside of k31.
        run_seconds: time inside of compiled graphs.
        compiler_fn, kwargs: where Dynamo's hook of ours looks for k31 and its options.

    """

    def __init__(self, options: Mapping[str, Any] | None = None, on_stage: Callable[[str], None] | None = None) -> None:
        self.compiler_fn = k31
        self.kwargs = {"options": dict(options or {})}
        self.reports: list[Report] = []
        self.backend_seconds = 0.0
        self.run_seconds = 0.0
        self._on_stage = on_stage or (lambda _: None)
        self._threads = threading.local()
        self._lock = threading.Lock()

    def __call__(self, module: fx.GraphModule, example_inputs: Sequence[Any], **_: Any) -> Compiled:
        """Compile a graph and return it as something that counts its runs."""
        begin, known = time.perf_counter(), len(reports())
        self._on_stage("looking up")
        try:
            compiled = k31(module, example_inputs, options=self.kwargs["options"])
        finally:
            with self._lock:
                self.backend_seconds += time.perf_counter() - begin
                if len(reports()) > known:
                    self.reports.append(last_report())
            self._on_stage("tracing")

        def run(*inputs: Any) -> Any:
            self._threads.runs = self.runs + 1
            start = time.perf_counter()
            try:
                return compiled(*inputs)
            finally:
                self.run_seconds += time.perf_counter() - start

        return run

    @property
    def runs(self) -> int:
        """How many times this thread ran a graph that was compiled here."""
        return int(getattr(self._threads, "runs", 0))

    @property
    def compiles(self) -> int:
        """How many graphs went through k31; one that the cache had counts too."""
        return len(self.reports)

    def phases(self, wall: float) -> dict[str, float]:
        """Where the seconds of a first call went, that took `wall` in all; they add up to it."""
        found: dict[str, float] = {}
        for report in self.reports:
            for phase, seconds in report.phases.items():
                found[phase] = found.get(phase, 0.0) + seconds
        found["other"] = max(self.backend_seconds - sum(found.values()), 0.0)
        found["dynamo"] = max(wall - self.backend_seconds - self.run_seconds, 0.0)
        found["run"] = self.run_seconds
        return found


def own_error(error: Exception) -> Exception:
    """What a backend raised, out of what Dynamo made of it."""
    inner = error
    while isinstance(inner, torch._dynamo.exc.BackendCompilerFailed) and isinstance(inner.inner_exception, Exception):
        inner = inner.inner_exception
    return inner
