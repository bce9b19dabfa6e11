"""``k31 cache warm``: everything that a k31.toml names, compiled into the cache, or only looked for there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from k31compile.cli import console
from k31compile.errors import WarmError

if TYPE_CHECKING:
    from k31compile.cli.warm_run import Warmed

_EVERY = 3.0  # seconds of silence before a line says that it goes on


def warm(
    file: Annotated[Path, typer.Argument(metavar="[K31.TOML]", help="What is to be warmed.")] = Path("k31.toml"),
    check: Annotated[
        bool, typer.Option("--check", help="Compile nothing; end with 1 and name what is not in the cache.")
    ] = False,
    workers: Annotated[int | None, typer.Option(metavar="N", help="How many processes; else as the file says.")] = None,
) -> int:
    """Compile all entries of a k31.toml, in all their buckets, into the cache; what is there already is skipped."""
    from k31compile.cli.warm_file import read_plan
    from k31compile.cli.warm_run import run_plan

    plan = read_plan(file, workers)
    with progress("check" if check else "warm") as (say, beat):
        warmed = run_plan(plan, check, say, beat)
    data = {"file": str(file), "check": check, **warmed.to_dict()}
    console.emit(data, lambda out: _render(warmed, out))
    cold = [job for job in warmed.jobs if not job.is_warm]
    if cold and not console.json_wanted():
        count = "1 entry is" if len(cold) == 1 else f"{len(cold)} entries are"
        raise WarmError(f"{count} not warm: {', '.join(job.name for job in cold)}", where=str(file))
    return 1 if cold else 0


@contextmanager
def progress(title: str) -> Iterator[tuple[Callable[[str], None], Callable[[str], None]]]:
    """Two functions: one for a line that is always shown, one for what goes on, shown after a silence."""
    out = console.errors()
    last = time.monotonic()

    def say(text: str) -> None:
        nonlocal last
        out.print(f"{title}: {text}", markup=False)
        last = time.monotonic()

    if out.is_terminal:
        with out.status(title) as status:
            yield say, lambda text: status.update(f"{title}: {escape(text)}")
        return

    def beat(text: str) -> None:
        if time.monotonic() - last >= _EVERY:
            say(text)

    yield say, beat


def _render(warmed: Warmed, out: Console) -> None:
    from k31compile.cli.warm_run import phases_text

    table = console.table("entry", "sizes", "for", "state", "seconds", "graphs", "key")
    for job in warmed.jobs:
        sizes = ", ".join(f"{name} {size}" for name, size in job.sizes.items()) or "its own"
        keys = ", ".join(key[:12] for key in job.result.get("keys", ()))
        graphs = str(job.result.get("hits", 0) + job.result.get("misses", 0))
        product = job.spec.product or "its device"
        table.add_row(escape(job.entry), escape(sizes), product, job.state, f"{job.seconds:.1f}", graphs, keys)
    out.print(table)
    for job in warmed.jobs:
        for note in job.result.get("notes", ()):
            out.print(f"{job.name}: {note}", markup=False, highlight=False)
    data = warmed.to_dict()
    mean = "" if warmed.workers == 1 else f", mean of {warmed.workers} workers"
    out.print(f"phases in seconds{mean}: {phases_text(warmed.phases)}", highlight=False)
    counts = ", ".join(f"{count} {state}" for state, count in data["counts"].items())
    graphs = f"{data['misses']} graphs missed and {data['hits']} hit"
    out.print(f"{len(warmed.jobs)} entries in {warmed.wall:.1f} s: {counts}; {graphs}", highlight=False)
