"""``k31 run``: load an artefact and call its entries with their example inputs."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from k31compile.cli import console
from k31compile.cli.require_warm import nothing_compiled
from k31compile.errors import UsageError

if TYPE_CHECKING:
    import torch

    from k31compile.cache.artefact.load import Artefact


def run(
    file: Annotated[Path, typer.Argument(metavar="F.k31", help="What `k31 compile TARGET -o F.k31` wrote.")],
    entry: Annotated[str | None, typer.Option(metavar="NAME", help="This entry only.")] = None,
    repeat: Annotated[int, typer.Option(help="How many calls are timed, after one that is not.")] = 5,
    weights: Annotated[
        Path | None, typer.Option(metavar="FILE_OR_DIR", help="Where its safetensors are, if not where they were.")
    ] = None,
    require_warm: Annotated[
        bool, typer.Option("--require-warm", help="Let every compile be an error; F.k31 itself needs none.")
    ] = False,
) -> None:
    """Load an artefact, call each entry with its example inputs, and tell times and results.

    Flags of torch, such as the number of threads, are set as they were at compile.
    """
    if repeat < 1:
        raise UsageError(f"--repeat {repeat} is less than 1")
    begin = time.perf_counter()
    import torch  # noqa: F401

    imported = time.perf_counter()
    from k31compile.cache.artefact.load import load

    with nothing_compiled(require_warm):
        artefact = load(file, weights)
        ready = time.perf_counter() - imported
        if entry is not None:
            artefact.program(entry)
        names = [entry] if entry is not None else artefact.entries
        results = {name: _run(artefact, name, repeat) for name in names}
    data = {
        "file": str(file),
        "import_torch_seconds": round(imported - begin, 4),
        "ready_seconds": round(ready, 4),
        "entries": results,
    }
    console.emit(data, lambda out: _render(data, out))


def _run(artefact: Artefact, name: str, repeat: int) -> dict[str, Any]:
    """One call for its results, then the timed ones on the same tensors."""
    from k31compile.cache.artefact.flags import under

    program = artefact.program(name)
    tensors, origin = artefact.example(name)
    with under(program.data["flags"]):
        begin = time.perf_counter()
        program.check(tensors)
        outputs, inputs = program.compute(tensors)
        first = time.perf_counter() - begin
        results = {path: _told(value) for path, value in program.named_results(outputs, inputs, tensors)}
        times = []
        for _ in range(repeat):
            begin = time.perf_counter()
            program.check(tensors)
            program.compute(tensors)
            times.append(time.perf_counter() - begin)
    return {
        "inputs": origin,
        "first_call_seconds": round(first, 6),
        "call_seconds": round(statistics.median(times), 6),
        "calls": repeat,
        "fused": artefact.report(name)["fused"],
        "results": results,
        "written": [promise.path for promise in program.promises if promise.written],
    }


def _told(value: torch.Tensor) -> dict[str, Any]:
    import torch

    told = {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
    if value.numel() == 0:
        return told
    numbers = value.detach().to(torch.float64)
    finite = bool(numbers.isfinite().all())
    extremes = {"least": numbers.min().item(), "mean": numbers.mean().item(), "largest": numbers.max().item()}
    return {**told, "finite": finite, **(extremes if finite else {})}


def _render(data: dict[str, Any], out: Console) -> None:
    out.print(f"ready {data['ready_seconds']:.2f} s after import torch", highlight=False)
    for name, entry in data["entries"].items():
        out.print(
            f"{name}: a call {entry['call_seconds'] * 1e3:.2f} ms, median of {entry['calls']}, the first "
            f"{entry['first_call_seconds'] * 1e3:.2f} ms; inputs: {entry['inputs']}",
            highlight=False,
        )
        for path, value in entry["results"].items():
            numbers = ", ".join(f"{key} {value[key]:.4g}" for key in ("least", "mean", "largest") if key in value)
            worth = numbers or ("" if value.get("finite", True) else "not all finite")
            out.print(f"  {path} {value['dtype']} {value['shape']} {worth}", markup=False, highlight=False)
        if entry["written"]:
            out.print(f"  updated in place: {', '.join(entry['written'])}", markup=False, highlight=False)
