"""``k31 cache export`` and ``k31 cache import``: the cache of one machine, as one signed file, for another."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from k31compile.cli import console
from k31compile.cli.readable import size_text
from k31compile.errors import UsageError

if TYPE_CHECKING:
    from k31compile.bundle.receive import Received
    from k31compile.bundle.send import Sent

Folder = Annotated[str, typer.Option("--cache", metavar="PATH", help="Another cache than this user's own.")]
_KEY = re.compile(r"[0-9a-f]{8,128}")


def export_bundle(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="The file to be written.")],
    chosen: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY|TARGET]...", help="Entries by key (8 digits or more) or TARGET.")
    ] = None,
    folder: Folder = "",
) -> int:
    """Write compiled graphs, kernels and what was confirmed into one file, signed with K31_CACHE_KEY."""
    from k31compile.cache.manifest import is_key
    from k31compile.cli.cache import open_cache
    from k31compile.signatures import shared_key

    shared_key()
    store = open_cache(folder)
    keys = _keys_of(chosen) if chosen else None
    from k31compile.bundle.send import export_bundle as export

    sent = export(bundle, store, keys)
    console.emit(sent.to_dict(), lambda out: _render_sent(sent, out))
    return 1 if any(is_key(name) for name in sent.left_out) else 0


def import_bundle(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="A file that k31 cache export has written.")],
    folder: Folder = "",
) -> int:
    """Verify a bundle with K31_CACHE_KEY and take what it brings into this user's cache; what is here stays."""
    from k31compile.signatures import shared_key

    shared_key()
    from k31compile.bundle.receive import import_bundle as receive
    from k31compile.cli.cache import open_cache

    received = receive(bundle, open_cache(folder))
    console.emit(received.to_dict(), lambda out: _render_received(bundle, received, out))
    return 1 if received.failed else 0


def _keys_of(chosen: list[str]) -> list[str]:
    keys = [given for given in chosen if _KEY.fullmatch(given)]
    targets = [given for given in chosen if not _KEY.fullmatch(given)]
    if targets:
        from k31compile.cli.warm_file import plain_plan
        from k31compile.cli.warm_run import warm_keys

        keys += warm_keys(plain_plan(targets))
    if not keys:
        raise UsageError("none of these names an entry of the cache")
    return keys


def _render_sent(sent: Sent, out: Console) -> None:
    out.print(f"{sent.path}: {size_text(sent.bytes)}, signed with K31_CACHE_KEY", markup=False, highlight=False)
    out.print(f"entries: {len(sent.entries)}", highlight=False)
    for folder, count in sent.parts.items():
        out.print(f"{folder}: {count}", highlight=False)
    for key, why in sent.left_out.items():
        out.print(f"left out: {key}, {why}", markup=False, highlight=False)


def _render_received(bundle: Path, received: Received, out: Console) -> None:
    counts = [f"entries: {len(received.new)} new, {len(received.present)} here already"]
    for folder, each in received.parts.items():
        counts.append(f"{folder}: {each['new']} new, {each['present']} here already")
    out.print(f"{bundle}: its signature is right", markup=False, highlight=False)
    for line in counts:
        out.print(line, markup=False, highlight=False)
    for name, count in received.elsewhere.items():
        line = f"{count} entries are for another {name!r} than this machine has: they are kept and not found here"
        out.print(line, markup=False, highlight=False)
    for name, why in received.failed.items():
        out.print(f"not kept: {name}, {why}", markup=False, highlight=False)
