"""Making a bundle of what is in the cache."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from k31compile.bundle.container import Member, is_name, write_bundle
from k31compile.bundle.parts import PARTS
from k31compile.cache.entry_store import EntryStore
from k31compile.cache.manifest import MANIFEST
from k31compile.errors import BundleError, StoreError
from k31compile.signatures import shared_key


@dataclass(frozen=True)
class Sent:
    """What went into a bundle: its size, the keys of its entries, files by part, and what was left out and why."""

    path: Path
    bytes: int
    entries: tuple[str, ...]
    parts: Mapping[str, int]
    left_out: Mapping[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "bundle": str(self.path),
            "bytes": self.bytes,
            "entries": list(self.entries),
            "parts": dict(self.parts),
            "left_out": dict(self.left_out),
        }


def export_bundle(path: Path, store: EntryStore, keys: Iterable[str] | None = None) -> Sent:
    """Write entries of a store, all or those of some keys, and all parts, into one file signed with K31_CACHE_KEY.

    Raises:
        StoreError: K31_CACHE_KEY is missing or too short.
        BundleError: there is nothing to export, or a key is not there.
    """
    key = shared_key()
    if path.is_dir():
        raise BundleError("is a folder", where=str(path), hint="give the path of a file")
    chosen = _chosen(store, keys)
    members: dict[str, Member] = {}
    entries: list[str] = []
    left_out: dict[str, str] = {}
    for entry_key in chosen:
        found = store.find(entry_key)
        if found is None:
            left_out[entry_key] = "it is broken, or left the cache meanwhile"
            continue
        entries.append(entry_key)
        members |= _members_of(found.folder, found.manifest)
    if not entries:
        where = str(store.root)
        raise BundleError("no entry can be exported", where, "k31 cache verify says more; warm it with k31 cache warm")
    parts = {part.folder: 0 for part in PARTS}
    for part in PARTS:
        for name, body in part.exported():
            if not is_name(name):
                left_out[name] = "its name does not fit into a bundle; it is confirmed anew elsewhere"
                continue
            members[name] = Member.of(body)
            parts[part.folder] += 1
    about = {"torch": importlib.metadata.version("torch"), "python": platform.python_version(), "entries": len(entries)}
    try:
        size = write_bundle(path, about, members, key)
    except OSError as error:
        raise BundleError(f"cannot be written: {error.strerror}", str(path), "give another place") from error
    return Sent(path, size, tuple(entries), parts, left_out)


def _chosen(store: EntryStore, keys: Iterable[str] | None) -> list[str]:
    present = store.places.entry_keys()
    if not present:
        raise BundleError("the cache has no entry", str(store.root), "fill it first: k31 cache warm k31.toml")
    if keys is None:
        return present
    found: set[str] = set()
    for given in keys:
        fitting = [key for key in present if key.startswith(given)]
        if len(fitting) != 1:
            what = "no entry" if not fitting else f"{len(fitting)} entries"
            raise BundleError(f"{what} of the cache has the key {given!r}", str(store.root), "k31 cache ls lists them")
        found.update(fitting)
    return sorted(found)


def _members_of(folder: Path, manifest: Mapping[str, Any]) -> dict[str, Member]:
    """The manifest, and the files that it lists; they are read when they are written, and checked then."""
    place = f"entries/{manifest['key']}"
    try:
        members = {f"{place}/{MANIFEST}": Member.of((folder / MANIFEST).read_bytes())}
    except OSError as error:
        raise StoreError(f"an entry left the cache meanwhile: {error.strerror}", str(folder), "export again") from error
    for name, about in manifest["files"].items():
        members[f"{place}/{name}"] = Member(about["bytes"], about["sha256"], partial(_read, folder / name))
    return members


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise BundleError("an entry left the cache meanwhile", where=str(path), hint="export again") from None
