"""One variant of a whole model in a process of its own, which shares no compiler and no registered function."""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from k31compile.backend import compile as compile_whole
from k31compile.bench.case import OURS
from k31compile.bench.clock import Clock, calls_per_sample, clock_for, sample
from k31compile.bench.fresh import cpu_seconds
from k31compile.bench.memory import peak_extra_bytes, resident_peak
from k31compile.bench.models import model_cases
from k31compile.bench.models.case import ModelCase
from k31compile.bench.reference import differs, numbers_of, write_reference
from k31compile.bench.roof import cores_had, probe
from k31compile.bench.worker import Answers, Task
from k31compile.entry import Entry
from k31compile.report import Report, reports

Load = Callable[[str], list[Entry]]
_PART_SAMPLES = 9


class ModelWorker:
    """Holds one variant between `open` and the end of the process."""

    def __init__(self, load: Load) -> None:
        """`load` gives the entries of a TARGET."""
        self._load = load
        self._call: Callable[[], Any] = lambda: None
        self._clock: Clock = time.thread_time_ns
        self._calls = 1

    def answers(self) -> Answers:
        """What it can be asked."""
        return {
            "open": self._open,
            "sample": lambda _task: self._sampled(),
            "extra": lambda _task: peak_extra_bytes(self._call),
            "part": self._part,
            "floor": self._floor,
            "had": lambda _task: cores_had(torch.get_num_threads()),
        }

    def _open(self, task: Task) -> dict[str, Any]:
        """Build, call once, and compare with the reference that the eager process has written before."""
        torch.set_num_threads(task["threads"])
        self._clock = clock_for(task["threads"])
        case = self._case(task)
        if case.needs is not None and importlib.util.find_spec(case.needs[0]) is None:
            return {"skipped": f"{case.needs[0]} is not installed (pip install 'k31compile[{case.needs[1]}]')"}
        entry, file = case.make(), Path(task["reference"])
        if task["variant"] == "eager":
            write_reference(entry, file)
        # after too many compiles a model would run uncompiled and nobody would say so
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        program = compiled(entry, case, task["variant"])
        found: dict[str, Any] = {}

        def call() -> Any:
            with entry.grad_mode():
                return program(*entry.args, **entry.kwargs)

        start, cpu = time.perf_counter(), cpu_seconds()
        result = call()
        found["first_seconds"] = time.perf_counter() - start
        _join_compilers()
        found["first_cpu_seconds"], found["resident_peak"] = cpu_seconds() - cpu, resident_peak()
        found["wrong"] = differs(numbers_of(result), file)
        found["fused"] = Report.merge(reports()).fused if task["variant"] == OURS and reports() else {}
        self._call = call
        return found

    def _case(self, task: Task) -> ModelCase:
        if target := task.get("target"):
            (entry,) = (entry for entry in self._load(target) if entry.name == task["case"])
            return ModelCase(target, entry.name, lambda: entry)
        (case,) = (case for case in model_cases() if case.full_name == task["case"])
        return case

    def _part(self, task: Task) -> float | None:
        """Nanoseconds of the part of a call that must grow, the median of some samples; None where none is named."""
        make = self._case(task).part
        if make is None:
            return None
        call = make()
        calls = calls_per_sample(call, self._clock)
        return statistics.median(sample(call, calls, self._clock) for _ in range(_PART_SAMPLES))

    def _floor(self, task: Task) -> float:
        """Nanoseconds that what a call cannot do without takes here and now."""
        make = self._case(task).roof
        assert make is not None
        roof = make()
        return roof.work / probe(roof.kind, self._clock)

    def _sampled(self) -> float:
        if self._calls == 1:
            self._calls = calls_per_sample(self._call, self._clock)
        return sample(self._call, self._calls, self._clock)


def compiled(entry: Entry, case: ModelCase, variant: str) -> Callable[..., Any]:
    """The model as a variant runs it."""
    if variant == "eager":
        return entry.model
    if variant == OURS:
        if case.whole:
            return compile_whole(entry.model, **case.options)  # type: ignore[arg-type]
        return torch.compile(entry.model, backend="k31", dynamic=False, options=dict(case.options))
    mode = "max-autotune-no-cudagraphs" if variant == "max-autotune" else None
    return torch.compile(entry.model, dynamic=False, mode=mode)


def _join_compilers() -> None:
    """End Inductor's worker processes, so that their seconds are counted and none of them takes time later."""
    from torch._inductor.async_compile import shutdown_compile_workers

    shutdown_compile_workers()
