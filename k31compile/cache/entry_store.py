"""The store of compiled graphs: entries found by their key, checked before use, written once, bounded.

An entry is a folder ``entries/KEY`` with a manifest, its signature and at most three files more. Nothing here is
unpickled, imported or loaded; what is handed out are paths of files whose bytes are those that this user, or somebody
with the same ``K31_CACHE_KEY``, has written.
"""

from __future__ import annotations

import contextlib
import os
import stat
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k31compile.cache import limits as bounds
from k31compile.cache.limits import Limits
from k31compile.cache.manifest import is_key
from k31compile.cache.nearest import MOST_COMPARED, Nearest, nearest_of
from k31compile.cache.places import Places
from k31compile.cache.publish import Draft, check_draft, write_entry
from k31compile.cache.removal import Removed, remove_entry
from k31compile.cache.scratch import sweep
from k31compile.cache.usage import Usage
from k31compile.cache.verify import Fault, GoneError, check_entry, read_manifest
from k31compile.errors import StoreError
from k31compile.signatures import local_key, signing_key, trusted_keys
from k31compile.store import cache_dir


@dataclass(frozen=True)
class FoundEntry:
    """An entry whose every file was just checked."""

    key: str
    folder: Path
    manifest: Mapping[str, Any]

    def path(self, name: str) -> Path:
        """The path of a checked file; StoreError when the entry has none of that name."""
        if name not in self.manifest["files"]:
            known = ", ".join(sorted(self.manifest["files"])) or "none"
            raise StoreError(f"the entry has no file {name!r}", where=str(self.folder), hint=f"it has: {known}")
        return self.folder / name


@dataclass(frozen=True)
class ListedEntry:
    """An entry as a list shows it; `fault` says why its manifest is not believed, and then the rest of it is empty."""

    key: str
    bytes: int
    used_ns: int
    kind: str = ""
    ingredients: Mapping[str, str] | None = None
    files: Mapping[str, Any] | None = None
    fault: str = ""


class EntryStore:
    """One folder of entries.

    ``find`` and ``publish`` never fail a compilation: what is wrong with the folder or an entry becomes a warning that
    names it. The others are commands and raise StoreError.
    """

    def __init__(self, root: Path, limits: Limits | None = None) -> None:
        self.places = Places(Path(root).expanduser().absolute())
        self.limits = Limits() if limits is None else limits
        self._has_swept = False

    @property
    def root(self) -> Path:
        """The folder of the store."""
        return self.places.root

    def find(self, key: str) -> FoundEntry | None:
        """The entry of a key, or None; a broken one is named, set aside and None."""
        _check_key(key)
        folder = self.places.entries / key
        if not os.path.lexists(folder):
            return None
        try:
            self.places.check()
            self._sweep_once()
            return self._checked(key)
        except (StoreError, OSError) as error:
            _warn(f"the cache is not used: {error}")
            return None

    def publish(
        self,
        key: str,
        kind: str,
        ingredients: Mapping[str, str],
        program: Mapping[str, Any],
        report: Mapping[str, Any],
        files: Mapping[str, bytes | Path],
        sign_with: bytes | None = None,
    ) -> Path | None:
        """Write an entry unless a sound one of this key is there; return its folder, or None after a warning.

        ``sign_with`` signs it instead of the key for what is written now.

        Raises StoreError only for what no store could take: a name, a count of files, a part that is no plain JSON.
        """
        _check_key(key)
        draft = Draft(key=key, kind=kind, ingredients=ingredients, program=program, report=report, files=files)
        check_draft(draft, self.limits)
        try:
            self.places.prepare()
            sweep(self.places.making)
            if self._is_taken(key):
                return self.places.entries / key
            return write_entry(self.places, self.limits, draft, sign_with or signing_key(), lambda: self._is_taken(key))
        except OSError as error:
            _warn(f"entry {key[:12]} was not kept: {error.strerror or error} ({error.filename or self.root})")
        except StoreError as error:
            _warn(f"entry {key[:12]} was not kept: {error}")
        return None

    def listed(self) -> list[ListedEntry]:
        """All entries, the least recently used first, with what their manifests say; other files are not read."""
        self.places.check()
        keys = _trusted() if self.places.entries.is_dir() else []
        rows = []
        for kept in bounds.scan(self.places):
            try:
                manifest = read_manifest(self.places.entries / kept.key, keys)
            except GoneError:
                continue
            except Fault as fault:
                rows.append(ListedEntry(kept.key, kept.bytes, kept.used_ns, fault=str(fault)))
                continue
            parts = (manifest["kind"], manifest["ingredients"], manifest["files"])
            rows.append(ListedEntry(kept.key, kept.bytes, kept.used_ns, *parts))
        return rows

    def verify(self, keys: Iterable[str] | None = None) -> dict[str, str]:
        """Check every byte of the named entries, else of all: key -> what is wrong with it, "" for nothing."""
        self.places.check()
        trusted = _trusted() if self.places.entries.is_dir() else []
        found = {}
        for key in self.places.entry_keys() if keys is None else keys:
            try:
                check_entry(self.places.entries / key, trusted, self.limits.files_per_entry)
                found[key] = ""
            except GoneError:
                continue
            except Fault as fault:
                found[key] = str(fault)
        return found

    def gc(self, limits: Limits | None = None) -> Removed:
        """Remove what killed processes left, all that was set aside, and entries until the limits hold."""
        self.places.check()
        sweep(self.places.making)
        bounds.bound_broken(self.places, 0)
        return bounds.collect(self.places, limits or self.limits)

    def clear(self) -> Removed:
        """Remove every entry and what was set aside; what is no part of an entry stays where it is and is named."""
        self.places.check()
        known = {name for row in self.listed() for name in row.files or ()}
        sweep(self.places.making)
        removed = Removed()
        for key in self.places.entry_keys():
            remove_entry(self.places, self.places.entries / key, removed, known)
        for path in self.places.set_aside_ones():
            remove_entry(self.places, path, removed, known)
        Usage(self.places.usage).reset(0)
        return removed

    def nearest(self, ingredients: Mapping[str, str], without: str = "") -> Nearest | None:
        """The entry that differs in the fewest ingredients from these; ``without`` leaves one key out."""
        self.places.check()
        keys = _trusted() if self.places.entries.is_dir() else []
        candidates = []
        for key in bounds.last_used(self.places, MOST_COMPARED):
            with contextlib.suppress(Fault, GoneError):
                manifest = read_manifest(self.places.entries / key, keys)
                if key != without:
                    candidates.append((key, manifest["kind"], manifest["ingredients"]))
        return nearest_of(candidates, ingredients)

    def why_missed(self, ingredients: Mapping[str, str]) -> str:
        """One sentence on why a key with these ingredients was not found; never fails."""
        try:
            nearest = self.nearest(ingredients) if self.places.entries.is_dir() else None
        except (StoreError, OSError) as error:
            return f"the cache cannot be read: {error}"
        return nearest.sentence() if nearest else "the cache has no entry yet"

    def _checked(self, key: str) -> FoundEntry | None:
        folder = self.places.entries / key
        trusted = _trusted()
        for _ in range(3):
            try:
                manifest = check_entry(folder, trusted, self.limits.files_per_entry)
            except GoneError:
                if not os.path.lexists(folder):
                    return None
                continue
            except Fault as fault:
                if not fault.is_broken:
                    _warn(f"entry {key[:12]} is refused: {fault} ({folder})")
                    return None
                if self._set_aside(key, fault):
                    return None
                continue
            bounds.touch(folder)
            return FoundEntry(key, folder, manifest)
        return None

    def _is_taken(self, key: str) -> bool:
        """Tell whether a sound entry has this name; anything else of this user's that has it is set aside."""
        folder = self.places.entries / key
        if not os.path.lexists(folder):
            return False
        try:
            check_entry(folder, _trusted(), self.limits.files_per_entry)
        except GoneError:
            return False
        except Fault as fault:
            info = os.lstat(folder)
            if info.st_uid != os.geteuid():
                raise StoreError(f"its name is taken: {fault}", where=str(folder), hint="") from None
            return not self._set_aside(key, fault) and self._is_taken(key)
        bounds.touch(folder)
        return True

    def _set_aside(self, key: str, fault: Fault) -> bool:
        """Move a broken entry away and say so; False when another process had put a sound one there meanwhile."""
        try:
            aside = self.places.set_aside(key)
        except FileNotFoundError:
            return False
        except OSError as error:
            _warn(f"entry {key[:12]} is broken, {fault.reason}, and cannot be set aside: {error.strerror}")
            return True
        if not stat.S_ISLNK(os.lstat(aside).st_mode) and self._is_sound(aside):
            try:
                os.rename(aside, self.places.entries / key)
            except OSError:
                remove_entry(self.places, aside, Removed())
            return False
        bounds.bound_broken(self.places, bounds.MOST_BROKEN)
        _warn(f"entry {key[:12]} is set aside: {fault} ({aside})")
        return True

    def _is_sound(self, folder: Path) -> bool:
        try:
            check_entry(folder, _trusted(), self.limits.files_per_entry)
        except (Fault, GoneError):
            return False
        return True

    def _sweep_once(self) -> None:
        if not self._has_swept:
            self._has_swept = True
            sweep(self.places.making)


def default_store() -> EntryStore:
    """The store in this user's cache folder."""
    return EntryStore(cache_dir() / "graphs")


def _trusted() -> list[bytes]:
    """The keys that are believed; this user's own is made when there is none, so that a check has one to fail with."""
    return trusted_keys() or [local_key()]


def _check_key(key: str) -> None:
    if not is_key(key):
        raise StoreError(f"{key!r} is no key of an entry", hint="a key has 16 to 128 hexadecimal digits")


def _warn(text: str) -> None:
    warnings.warn(f"k31compile: {text}", stacklevel=4)
