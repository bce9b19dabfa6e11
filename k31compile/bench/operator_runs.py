"""The suite of operators: one process for all its cases, in which k31 and its opponents take turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from k31compile.bench.case import Case
from k31compile.bench.machine import machine_facts, version_facts
from k31compile.bench.measure import Settings, measure_case
from k31compile.bench.operators import operator_cases
from k31compile.bench.process import Worker, environment
from k31compile.bench.rows import Row, row_from
from k31compile.bench.worker import Answers, Task
from k31compile.errors import BenchError

SUITE = "operators"
_LIMIT = 600.0  # seconds for one case, Inductor's compiles included


def answers() -> Answers:
    """What the worker of this suite can be asked."""
    return {"facts": _facts, "measure": _measure}


def run_operators(
    cases: Sequence[Case], settings: Settings, command: Sequence[str], advance: Callable[[str], None]
) -> list[Row]:
    """The rows of these cases; a case whose process fails has the error in its rows, and the next one a new process."""
    rows: list[Row] = []
    worker: Worker | None = None
    try:
        for case in cases:
            advance(case.full_name)
            if worker is None or not worker.is_there():
                worker = Worker(command, environment(settings.threads))
            task = {"task": "measure", "case": case.full_name, "settings": asdict(settings)}
            try:
                rows += [row_from(row) for row in worker.ask(task, _LIMIT)]
            except BenchError as error:
                rows += [_failed(case, opponent, settings, error) for opponent in settings.against]
    finally:
        if worker is not None:
            worker.stop()
    return rows


def facts(threads: int, command: Sequence[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Machine and versions as a worker sees them."""
    worker = Worker(command, environment(threads))
    try:
        machine, versions = worker.ask({"task": "facts", "threads": threads}, _LIMIT)
    finally:
        worker.stop()
    return machine, versions


def _failed(case: Case, opponent: str, settings: Settings, error: BenchError) -> Row:
    return Row(
        SUITE, case.name, case.label, opponent, settings.threads, error=error.what, series=case.series, size=case.size
    )


def _facts(task: Task) -> Any:
    torch.set_num_threads(task["threads"])
    return machine_facts(task["threads"]), version_facts()


def _measure(task: Task) -> Any:
    settings = Settings(**{**task["settings"], "against": tuple(task["settings"]["against"])})
    torch.set_num_threads(settings.threads)
    (case,) = (case for case in operator_cases() if case.full_name == task["case"])
    # what would else run uncompiled after too many compiles, and be called Inductor, is left out with that reason
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        return [asdict(row) for row in measure_case(SUITE, case, settings)]
