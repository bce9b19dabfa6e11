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
    from k31compile.entry import Entry

_TICK = 0.5
_SUFFIX = ".k31"


@dataclass(frozen=True)
class Chosen:
    """What the command line says of the entries and of the artefact."""

    dtype: str | None
    layers: int | None
    entry: str | None
    weights: Path | None
    threads: int | None


def compile_ahead(target_name: str, path: Path, product: str, chosen: Chosen) -> None:
    """Compile a target to F.k31 and tell what is in it.

    Raises:
        UsageError: the command line does not fit together.
        K31Error: what stands in the way of an entry.
    """
    begin = time.perf_counter()
    _check(path, product, chosen)
    from k31compile.ahead import Progress, make_artefact

    if chosen.threads is not None:
        import torch

        torch.set_num_threads(chosen.threads)
    entries = _chosen_entries(target.load_entries(target_name, chosen.dtype, chosen.layers), chosen.entry)
    loaded = time.perf_counter() - begin
    with _told() as (begins, tell), contextlib.ExitStack() as stack:
        for entry in entries:
            stack.enter_context(calling(entry))
        progress = Progress(begins, tell)
        made = make_artefact(entries, path, chosen.weights, progress=progress)
    wall = time.perf_counter() - begin
    phases = {"load": loaded, **progress.seconds}
    data = {
        "target": target_name,
        **made,
        "seconds": round(wall, 3),
        "phases": {name: round(seconds, 3) for name, seconds in phases.items()},
    }
    console.emit(data, lambda out: _render(data, out))


def _check(path: Path, product: str, chosen: Chosen) -> None:
    if product.startswith("ascend"):
        raise UsageError(f"F.k31 for {product} is not built yet", hint="add --offline for its graphs, with -o a folder")
    if product not in ("", "cpu"):
        raise UsageError(f"there is no target {product!r}", hint="targets: cpu; with --offline ascend-a3, ascend-950")
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
