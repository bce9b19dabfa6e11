"""The making of F.k31 as a user sees it: a line as each compile begins, lines while it lasts, and where time went."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from k31compile.cli import console, target
from k31compile.cli.calling import calling
from k31compile.errors import UsageError

if TYPE_CHECKING:
    from k31compile.ahead import Progress
    from k31compile.entry import Entry

_TICK = 0.5
_SUFFIX = ".k31"
_TARGETS = ("", "cpu", "ascend-a3", "ascend-950")


@dataclass(frozen=True)
class Chosen:
    """What the command line says of the entries and of the artefact."""

    dtype: str | None
    layers: int | None
    entry: str | None
    weights: Path | None
    threads: int | None


def compile_ahead(target_name: str, path: Path, product: str, chosen: Chosen, how: tuple[str, int, bool, bool]) -> None:
    """Compile a target to F.k31 and tell what is in it; `how` is what an Ascend product alone has.

    Raises:
        UsageError: the command line does not fit together.
        K31Error: what stands in the way of an entry.
    """
    begin = time.perf_counter()
    _check(path, product, chosen)
    from k31compile.ahead import Progress

    if chosen.threads is not None:
        import torch

        torch.set_num_threads(chosen.threads)
    # As for --offline: an Ascend product computes in bfloat16.
    dtype = chosen.dtype or ("bf16" if product and product != "cpu" and target.is_shipped(target_name) else None)
    entries = _chosen_entries(target.load_entries(target_name, dtype, chosen.layers), chosen.entry)
    loaded = time.perf_counter() - begin
    with _told() as (begins, tell), contextlib.ExitStack() as stack:
        for entry in entries:
            stack.enter_context(calling(entry))
        progress = Progress(begins, tell)
        made = _make(entries, path, product, chosen.weights, progress, how)
    wall = time.perf_counter() - begin
    phases = {"load": loaded, **progress.seconds}
    data = {
        "target": target_name,
        **made,
        "seconds": round(wall, 3),
        "phases": {name: round(seconds, 3) for name, seconds in phases.items()},
    }
    console.emit(data, lambda out: _render(data, out))


def _make(
    entries: list[Entry],
    path: Path,
    product: str,
    weights: Path | None,
    progress: Progress,
    how: tuple[str, int, bool, bool],
) -> dict[str, Any]:
    if product in ("", "cpu"):
        from k31compile.ahead import make_artefact

        return make_artefact(entries, path, weights, progress=progress)
    from k31compile.ahead.ascend import Product, make_ascend_artefact

    mode, streams, super_kernel, may_round = how
    return make_ascend_artefact(
        entries, path, Product(product, streams, super_kernel, mode, may_round), weights, progress
    )


def _check(path: Path, product: str, chosen: Chosen) -> None:
    if product not in _TARGETS:
        raise UsageError(f"there is no target {product!r}", hint=f"targets: {', '.join(_TARGETS[1:])}")
    if path.suffix != _SUFFIX:
        raise UsageError(f"{path} does not end in {_SUFFIX}", hint="give -o F.k31, or add --offline --target ascend-a3")
    if path.is_dir():
        raise UsageError(f"{path} is a folder", hint="give -o a file that ends in .k31")
    if chosen.weights is not None and not chosen.weights.exists():
        raise UsageError(f"--weights {chosen.weights} does not exist", hint="give a .safetensors file or its folder")
    if chosen.threads is not None and chosen.threads < 1:
        raise UsageError(f"--threads {chosen.threads} is less than 1")


def _chosen_entries(entries: list[Entry], name: str | None) -> list[Entry]:
    found = [entry for entry in entries if name in (None, entry.name)]
    if not found:
        raise UsageError(f"the target has no entry {name!r}", hint=f"entries: {', '.join(e.name for e in entries)}")
    return found


@contextlib.contextmanager
def _told() -> Iterator[tuple[Callable[[str, str], None], Callable[[str], None]]]:
    """Functions to be told of each compile and of each part of one; a thread repeats the newest while it lasts."""
    with console.waiting("compile") as line:
        lock, done = threading.Lock(), threading.Event()
        name, said = "", "starting"

        def begins(entry: str, reason: str) -> None:
            nonlocal name
            name = entry
            tell(f"begins, {reason}")

        def tell(text: str) -> None:
            nonlocal said
            with lock:
                said = f"{name}: {text}" if name else text
                line(said)

        def repeat() -> None:
            while not done.wait(_TICK):
                with lock:
                    line(said)

        thread = threading.Thread(target=repeat, daemon=True)
        thread.start()
        try:
            yield begins, tell
        finally:
            done.set()
            thread.join()


def _render(data: dict[str, Any], out: Console) -> None:
    table = console.table("entry", "takes", "fused", "seconds")
    for name, entry in data["entries"].items():
        bounds = ", ".join(f"{size} {low}..{high}" for size, (low, high) in entry["sizes"].items())
        inputs = list(entry["inputs"].items())
        first = ", ".join(f"{path} {shape}" for path, shape in inputs[:1]).replace("'", "")
        more = f" and {len(inputs) - 1} more" if len(inputs) > 1 else ""
        fused = ", ".join(f"{count} x {operator}" for operator, count in entry["fused"].items()) or "nothing"
        takes = f"{first}{more}{'; ' + bounds if bounds else ''}"
        table.add_row(name, takes, fused, f"{sum(entry['seconds'].values()):.1f}")
    out.print(table)
    for file in data["weights"]:
        out.print(f"weights: {file['tensors']} in {file['file']}", markup=False, highlight=False)
    out.print(f"written: {data['file']}, {data['bytes']:,} bytes", markup=False, highlight=False)
    phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in data["phases"].items())
    count = len(data["entries"])
    out.print(f"{count} compiled in {data['seconds']:.1f} s: {phases}", markup=False, highlight=False)
