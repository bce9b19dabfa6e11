"""What remembering confirmations saves: the same calls compiled by two processes, the second with the first's memory.

    python benchmarks/bench_confirm.py [--model tiny --model mini] [--repeats N] [--json]

Each model's decode step and then its prefill, one after the other in one process, cold and operator by operator
(`codegen="ops"`), so that no compiler and no cache of graphs is in the numbers. All in seconds of wall time: `total`
from a built model to its first result, `trace` and `passes` as the report has them, `confirm` the part of the passes
that runs regions and `functions` the calls of functions, both before anything else can begin. Medians over the repeats,
each with a store of its own. The library of our C++ kernels is built before.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

PHASES = ("total", "trace", "passes", "confirm", "functions")
PARTS = ("decode", "prefill")


@contextmanager
def timed(module: Any, name: str, spent: dict[str, float], label: str) -> Iterator[None]:
    """Add the seconds in a function of a module to `spent`, inside the block."""
    plain: Callable[..., Any] = getattr(module, name)

    def around(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return plain(*args, **kwargs)
        finally:
            spent[label] += time.perf_counter() - start

    setattr(module, name, around)
    try:
        yield
    finally:
        setattr(module, name, plain)


def measure(model: str) -> list[dict[str, Any]]:
    """Compile both calls of a model in this process and say what each cost."""
    import k31compile
    from k31compile.cli.target import load_entries
    from k31compile.leaves import recall
    from k31compile.passes.recognise import engine

    rows = []
    for part in PARTS:
        (entry,) = load_entries(f"{model}:{part}")
        spent = dict.fromkeys(PHASES, 0.0)
        before, start = len(k31compile.reports()), time.perf_counter()
        with (
            torch.no_grad(),
            timed(engine, "confirm", spent, "confirm"),
            timed(recall, "confirm_call", spent, "functions"),
            timed(recall, "agrees", spent, "functions"),
        ):
            compiled = torch.compile(entry.model, backend="k31", options={"codegen": "ops"}, dynamic=False)
            compiled(*entry.args, **entry.kwargs)
        spent["total"] = time.perf_counter() - start
        reports = k31compile.reports()[before:]
        for phase in ("trace", "passes"):
            spent[phase] = sum(report.phases.get(phase, 0.0) for report in reports)
        found = [one for report in reports for one in (*report.confirmations, *report.leaves)]
        remembered = sum(bool(one["remembered"]) for one in found)
        fused = sum(sum(report.fused.values()) for report in reports)
        rows.append({"case": f"{model}:{part}", "fused": fused, "kinds": len(found), "remembered": remembered, **spent})
    return rows


def in_a_process(model: str, folder: str) -> list[dict[str, Any]]:
    """`measure` in a new process that keeps what it finds in a folder."""
    line = [sys.executable, "-P", __file__, "--measure", model]
    environment = {**os.environ, "K31_CACHE_DIR": folder}
    done = subprocess.run(line, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return list(json.loads(done.stdout.splitlines()[-1]))


def two_processes(model: str) -> list[dict[str, Any]]:
    """The rows of a first process and of a second one, which has what the first remembers."""
    from k31compile.kernels.cpu.loader import library
    from k31compile.store import cache_dir

    library()
    with tempfile.TemporaryDirectory(prefix="k31-confirm-") as folder:
        for name in ("kernels", "signing.key"):
            path = cache_dir() / name
            if path.is_dir():
                shutil.copytree(path, Path(folder) / name)
            elif path.exists():
                shutil.copy2(path, Path(folder) / name)
        return [{"process": which, **row} for which in ("first", "second") for row in in_a_process(model, folder)]


def median_rows(model: str, repeats: int) -> list[dict[str, Any]]:
    """The medians of some repeats, row by row; they must agree in all that is no time."""
    runs = [two_processes(model) for _ in range(repeats)]
    rows = []
    for same in zip(*runs, strict=True):
        counts = [{key: value for key, value in row.items() if key not in PHASES} for row in same]
        if any(one != counts[0] for one in counts):
            raise SystemExit(f"two repeats differ in more than time: {counts}")
        rows.append(counts[0] | {phase: statistics.median(row[phase] for row in same) for phase in PHASES})
    return rows


def main() -> None:
    """Print the table, or the rows as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", action="append", choices=("pico", "tiny", "mini"))
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        print(json.dumps(measure(given.measure)))
        return
    rows = [row for model in given.model or ("tiny", "mini") for row in median_rows(model, given.repeats)]
    if given.json:
        print(json.dumps({"rows": rows, "versions": {"torch": torch.__version__}, "threads": torch.get_num_threads()}))
        return
    table = Table("call", "process", "fused", "verdicts", "remembered", *PHASES)
    for row in rows:
        counts = [str(row[key]) for key in ("fused", "kinds", "remembered")]
        table.add_row(row["case"], row["process"], *counts, *(f"{row[phase]:.2f}" for phase in PHASES))
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
