"""``k31 cache``: what the cache of compiled graphs holds, whether it is sound, why something was not found in it."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from k31compile.cli import console
from k31compile.cli.cache_bundle import export_bundle, import_bundle
from k31compile.cli.cache_warm import warm
from k31compile.cli.cache_why import why
from k31compile.cli.readable import age_text, size_text
from k31compile.errors import UsageError

if TYPE_CHECKING:
    from k31compile.cache.entry_store import EntryStore, ListedEntry
    from k31compile.cache.removal import Removed

cache = typer.Typer(rich_markup_mode=None, no_args_is_help=True, help="Look after the cache of compiled graphs.")

SHORT = 12
"""So many digits of a key are shown; any that only one entry begins with name it."""

_Folder = Annotated[str, typer.Option("--cache", metavar="PATH", help="Another cache than this user's own.")]

cache.command()(warm)
cache.command()(why)
cache.command("export")(export_bundle)
cache.command("import")(import_bundle)


@cache.command("ls")
def list_entries(folder: _Folder = "") -> None:
    """List the entries, the one used last first."""
    store = open_cache(folder)
    rows = list(reversed(store.listed()))
    data = {"cache": str(store.root), "entries": [_row(row) for row in rows]}
    console.emit(data, lambda out: _render_rows(store, rows, out))


@cache.command()
def stat(folder: _Folder = "") -> None:
    """Show how full the cache is, within which bounds, and what else lies in it."""
    from k31compile.signatures import has_shared_key

    store = open_cache(folder)
    rows = store.listed()
    aside = list(store.places.set_aside_ones())
    data = {
        "cache": str(store.root),
        "entries": len(rows),
        "bytes": sum(row.bytes for row in rows),
        "files": sum(len(row.files or ()) + 2 for row in rows),
        "kinds": dict(sorted(Counter(row.kind or "not believed" for row in rows).items())),
        "set_aside": len(aside),
        "max_entries": store.limits.entries,
        "max_bytes": store.limits.bytes,
        "files_per_entry": store.limits.files_per_entry,
        "signed_with": "K31_CACHE_KEY" if has_shared_key() else "this user's key",
        "learned": {} if folder else _learned(),
    }
    console.emit(data, lambda out: _render_stat(data, out))


@cache.command()
def verify(
    keys: Annotated[list[str] | None, typer.Argument(metavar="[KEY]...", help="Only these entries.")] = None,
    folder: _Folder = "",
) -> int:
    """Check owner, mode, signature and every byte, and change nothing; ends with 1 when an entry is broken."""
    store = open_cache(folder)
    found = store.verify([whole_key(store, key) for key in keys] if keys else None)
    broken = {key: fault for key, fault in found.items() if fault}
    data = {"cache": str(store.root), "checked": len(found), "broken": broken}
    console.emit(data, lambda out: _render_verified(len(found), broken, out))
    return 1 if broken else 0


@cache.command()
def gc(
    max_bytes: Annotated[str, typer.Option(metavar="SIZE", help="As 500M; else K31_CACHE_MAX_BYTES.")] = "",
    max_entries: Annotated[str, typer.Option(metavar="N", help="Else K31_CACHE_MAX_ENTRIES.")] = "",
    folder: _Folder = "",
) -> None:
    """Remove what was set aside, what killed processes left, and what was used longest ago beyond the bounds."""
    from k31compile.cache.limits import Limits, amount_of

    store = open_cache(folder)
    limits = Limits(
        bytes=amount_of(max_bytes, "--max-bytes") if max_bytes else store.limits.bytes,
        entries=amount_of(max_entries, "--max-entries") if max_entries else store.limits.entries,
    )
    removed = store.gc(limits)
    console.emit(_removal(store, removed), lambda out: _render_removed(store, removed, out))


@cache.command()
def clear(
    learned: Annotated[
        bool, typer.Option("--learned", help="Also what was confirmed of functions and regions: it is found out anew.")
    ] = False,
    folder: _Folder = "",
) -> None:
    """Remove all entries; files that are no part of one stay, and links are not followed.

    What was confirmed of functions and regions stays too, and is named, unless --learned says otherwise.
    """
    if learned and folder:
        raise UsageError("--learned is of this user's own cache, and --cache names another", hint="leave one out")
    store = open_cache(folder)
    removed = store.clear()
    before = {} if folder else _learned()
    if learned:
        _forget(removed)
    data = _removal(store, removed) | {"learned": {} if folder else _learned()}
    console.emit(data, lambda out: _render_cleared(store, removed, before, data["learned"], out))


@cache.command()
def push(
    url: Annotated[str, typer.Argument(metavar="URL", help="As s3://bucket/cache; K31_CACHE_KEY signs.")],
    keys: Annotated[list[str] | None, typer.Argument(metavar="[KEY]...", help="Only these entries.")] = None,
    folder: _Folder = "",
) -> int:
    """Give entries to a remote cache, so that other machines find them; ends with 1 when one did not get there."""
    from k31compile.cache.remote import Remote, TieredStore
    from k31compile.cache.shared_kernels import keep_kernels

    local = open_cache(folder)
    store = TieredStore(local.root, Remote(url), local.limits)
    if not keys:
        keep_kernels(local)
    wanted = [whole_key(local, key) for key in keys] if keys else local.places.entry_keys()
    given: list[str] = []
    left: list[str] = []
    with console.progress("push", len(wanted)) as advance:
        for key in wanted:
            advance(key[:SHORT])
            (given if store.push(key, is_asked_for=True) else left).append(key)
    data = {"remote": url, "given": given, "left": left, "why": store.remote.off or store.remote.refusal}
    console.emit(data, lambda out: out.print(f"{len(given)} entries given, {len(left)} not", highlight=False))
    return 1 if left else 0


def open_cache(folder: str) -> EntryStore:
    """The cache at a path, or this user's own for an empty one."""
    from k31compile.cache.opened import open_store

    if folder and not Path(folder).expanduser().is_dir():
        raise UsageError(f"there is no folder {folder}", hint="give the folder of a cache, or leave --cache out")
    return open_store(folder or True)


def whole_key(store: EntryStore, digits: str) -> str:
    """The key of the entry that begins with these digits; UsageError where none or several do."""
    keys = store.places.entry_keys()
    found = [key for key in keys if key.startswith(digits.lower())]
    if digits and len(found) == 1:
        return found[0]
    if not found or not digits:
        raise UsageError(f"no entry's key begins with {digits!r}", hint="k31 cache ls lists them")
    listed = ", ".join(key[: max(SHORT, len(digits) + 4)] for key in found[:4])
    raise UsageError(f"{len(found)} entries' keys begin with {digits!r}", hint=f"give more digits: {listed}")


def believed(store: EntryStore, key: str) -> ListedEntry:
    """An entry as a list shows it; UsageError where its manifest is not believed."""
    row = next((row for row in store.listed() if row.key == key), None)
    if row is None or row.fault:
        fault = row.fault if row else "it is gone"
        raise UsageError(f"the entry {key[:SHORT]} cannot be compared: {fault}", hint="")
    return row


def _learned() -> dict[str, dict[str, int]]:
    """How many files and bytes of what was confirmed lie beside the entries, by folder of this user's cache."""
    from k31compile.signed_file import FILE_NAMES, kept_files

    sizes = {name: [path.lstat().st_size for path in kept_files(name)] for name in FILE_NAMES}
    return {name: {"files": len(each), "bytes": sum(each)} for name, each in sizes.items()}


def _forget(removed: Removed) -> None:
    from k31compile.signed_file import FILE_NAMES, kept_files

    for path in (path for name in FILE_NAMES for path in kept_files(name)):
        try:
            path.unlink()
        except OSError as error:
            removed.kept[str(path)] = error.strerror or str(error)


def _learned_text(learned: dict[str, dict[str, int]]) -> str:
    return ", ".join(f"{each['files']} {name} ({size_text(each['bytes'])})" for name, each in learned.items())


def _row(row: ListedEntry) -> dict[str, Any]:
    return {
        "key": row.key,
        "kind": row.kind,
        "bytes": row.bytes,
        "used": row.used_ns / 1e9,
        "files": sorted(row.files or ()),
        "fault": row.fault,
    }


def _removal(store: EntryStore, removed: Removed) -> dict[str, Any]:
    return {"cache": str(store.root), "removed": removed.keys, "bytes": removed.bytes, "kept": removed.kept}


def _render_rows(store: EntryStore, rows: list[ListedEntry], out: Console) -> None:
    if rows:
        now = time.time()
        table = console.table("key", "kind", "size", "last used", "files")
        for row in rows:
            files = row.fault or ", ".join(sorted(row.files or ()))
            age = age_text(now - row.used_ns / 1e9)
            table.add_row(row.key[:SHORT], row.kind or "not believed", size_text(row.bytes), age, escape(files))
        out.print(table)
    total = size_text(sum(row.bytes for row in rows))
    out.print(f"{len(rows)} entries, {total} in {store.root}", markup=False, highlight=False)


def _render_stat(data: dict[str, Any], out: Console) -> None:
    kinds = ", ".join(f"{count} {kind}" for kind, count in data["kinds"].items()) or "none"
    for name, text in (
        ("cache", data["cache"]),
        ("entries", f"{data['entries']} of at most {data['max_entries']} ({kinds})"),
        ("size", f"{size_text(data['bytes'])} of at most {size_text(data['max_bytes'])} in {data['files']} files"),
        ("set aside", f"{data['set_aside']} broken or refused, removed by gc"),
        ("signed with", data["signed_with"]),
        *([("learned", f"{_learned_text(data['learned'])}, kept beside the entries")] if data["learned"] else []),
    ):
        out.print(f"{name:<12} {text}", markup=False, highlight=False)


def _render_verified(count: int, broken: dict[str, str], out: Console) -> None:
    for key, fault in broken.items():
        out.print(f"{key[:SHORT]}: {fault}", markup=False, highlight=False)
    out.print(f"{count} entries checked, {len(broken)} broken", highlight=False)


def _render_cleared(
    store: EntryStore,
    removed: Removed,
    before: dict[str, dict[str, int]],
    after: dict[str, dict[str, int]],
    out: Console,
) -> None:
    _render_removed(store, removed, out)
    if before != after:
        out.print(f"learned: removed {_learned_text(before)}", highlight=False)
    if any(each["files"] for each in after.values()):
        out.print(f"learned: {_learned_text(after)} stay; --learned removes them", highlight=False)


def _render_removed(store: EntryStore, removed: Removed, out: Console) -> None:
    count = f"{len(removed.keys)} entries removed, {size_text(removed.bytes)}"
    out.print(f"{count}; {len(store.places.entry_keys())} left", highlight=False)
    for path, reason in removed.kept.items():
        out.print(f"  left where it is: {path}: {reason}", markup=False, highlight=False)
