"""``k31 cache why``: what stands between two entries, or between a TARGET as it is now and what the cache has."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from k31compile.cli import console
from k31compile.cli.cache_bundle import Folder
from k31compile.cli.cache_warm import progress
from k31compile.errors import UsageError

if TYPE_CHECKING:
    from k31compile.cache.entry_store import ListedEntry
    from k31compile.cache.nearest import Nearest
    from k31compile.cli.warm_file import WarmPlan
    from k31compile.cli.warm_run import Job

_DIGITS = re.compile(r"[0-9a-fA-F]+")
_SHORT = 12


def why(
    asked: Annotated[str, typer.Argument(metavar="KEY|TARGET", help="The first digits of an entry's key, or TARGET.")],
    other: Annotated[str, typer.Argument(metavar="[OTHER]", help="Another entry; else the nearest one.")] = "",
    folder: Folder = "",
) -> int:
    """Show in which ingredients two entries differ, or a TARGET and its nearest entry; nothing is compiled.

    Of a TARGET the first graph of each entry that is not in the cache is told. Ends with 1 where one cannot be asked.
    """
    if not asked or _DIGITS.fullmatch(asked):
        _compare(asked, other, folder)
        return 0
    if other:
        raise UsageError(f"{asked} is no key, and only a key is compared with {other}", hint="k31 cache ls lists keys")
    from k31compile.cli.warm_file import plain_plan

    return _ask(asked, plain_plan([asked], {"cache": _own(folder)} if folder else {}))


def look_up(plan: WarmPlan, title: str) -> list[Job]:
    """The entries of a plan, each found in the cache or cold with the reason; nothing is compiled.

    Raises:
        K31Error: a TARGET of it cannot be loaded.
    """
    from k31compile.cli.warm_run import run_plan

    with progress(title) as (_, beat):
        return run_plan(plan, True, beat, beat).jobs


def told(jobs: list[Job]) -> list[dict[str, Any]]:
    """What came of a look, for programs."""
    names = ("entry", "state", "why", "error", "keys")
    return [{name: job.to_dict()[name] for name in names} for job in jobs]


def render(jobs: list[Job], out: Console) -> None:
    """What came of a look, a line for each entry."""
    for job in jobs:
        keys = ", ".join(key[:_SHORT] for key in job.result.get("keys", ()))
        text = f"in the cache: {keys}" if job.is_warm else job.why or str((job.error or {}).get("what", job.state))
        out.print(f"{job.name}: {text}", markup=False, highlight=False)


def _ask(target: str, plan: WarmPlan) -> int:
    jobs = look_up(plan, "why")
    console.emit({"target": target, "entries": told(jobs)}, lambda out: render(jobs, out))
    return 1 if any(job.error for job in jobs) else 0


def _own(folder: str) -> str:
    from k31compile.cli.cache import open_cache

    return str(open_cache(folder).root)


def _compare(key: str, other: str, folder: str) -> None:
    from k31compile.cache.nearest import Nearest, difference
    from k31compile.cli.cache import believed, open_cache, whole_key

    store = open_cache(folder)
    here = believed(store, whole_key(store, key))
    if other:
        there = believed(store, whole_key(store, other))
        nearest: Nearest | None = Nearest(
            there.key, there.kind, difference(there.ingredients or {}, here.ingredients or {})
        )
    else:
        nearest = store.nearest(here.ingredients or {}, without=here.key)
    data = {
        "key": here.key,
        "nearest": nearest.key if nearest else None,
        "differing": {name: {"there": pair[0], "here": pair[1]} for name, pair in nearest.differing.items()}
        if nearest
        else {},
    }
    console.emit(data, lambda out: _render_compared(here, nearest, out))


def _render_compared(here: ListedEntry, nearest: Nearest | None, out: Console) -> None:
    if nearest is None:
        out.print(f"{here.key[:_SHORT]} is the only entry", highlight=False)
        return
    out.print(f"{here.key[:_SHORT]} and {nearest.key[:_SHORT]} differ in {len(nearest.differing)}:", highlight=False)
    table = console.table("ingredient", here.key[:_SHORT], nearest.key[:_SHORT])
    for name, (there, ours) in nearest.differing.items():
        table.add_row(escape(name), escape(ours) or "-", escape(there) or "-")
    out.print(table)
