"""What --require-warm asks: that nothing has to be compiled, and else which ingredient differs from what is kept."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from k31compile.cli import cache_why, console
from k31compile.cli.warm_file import WarmPlan, WarmSpec
from k31compile.cli.warm_run import error_of
from k31compile.errors import ColdCompileError, UsageError

_VARIABLE = "K31_REQUIRE_WARM"


def require_warm_target(spec: WarmSpec, entry: str | None, threads: int | None) -> None:
    """Look for every graph of a TARGET, or of one entry of it, in the cache, and say what was found.

    Raises:
        ColdCompileError: one is not there; the text names the ingredient that differs.
        UsageError: the target has no such entry.
        K31Error: the target cannot be loaded.
    """
    jobs = cache_why.look_up(WarmPlan(Path.cwd(), (spec,), 1, threads), "require-warm")
    names = [job.entry for job in jobs]
    if entry is not None and entry not in names:
        raise UsageError(f"the target has no entry {entry!r}", hint=f"entries: {', '.join(names)}")
    jobs = [job for job in jobs if entry in (None, job.entry)]
    cold = next((job for job in jobs if not job.is_warm), None)
    if cold is not None and cold.error:
        raise error_of(cold.error)
    if cold is not None:
        raise ColdCompileError(cold.why, where=f"entry {cold.entry!r}", hint="warm the cache with `k31 cache warm`")
    data = {"target": spec.target, "entries": cache_why.told(jobs)}
    console.emit(data, lambda out: cache_why.render(jobs, out))


@contextlib.contextmanager
def nothing_compiled(is_wanted: bool) -> Iterator[None]:
    """Where it is wanted, let every compile of the block be an error, in whatever package it happens."""
    before = os.environ.get(_VARIABLE)
    if is_wanted:
        os.environ[_VARIABLE] = "1"
    try:
        yield
    finally:
        if is_wanted:
            os.environ.pop(_VARIABLE)
            if before is not None:
                os.environ[_VARIABLE] = before
