"""The folders of a store: entries under their keys, what is being made, and what was found broken."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from k31compile.cache.manifest import is_key
from k31compile.errors import StoreError
from k31compile.store import check_private


class Places:
    """Where the parts of one store lie.

    Attributes:
        root: the folder of the store.
        entries: one folder for each entry, under its key.
        making: what processes make and take apart right now.
        broken: entries that were set aside, for somebody to look at.
        usage: a hint of how much there is.

    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.entries = root / "entries"
        self.making = root / "making"
        self.broken = root / "broken"
        self.usage = root / "usage"

    def prepare(self) -> None:
        """Make the folders that are missing, private; raise StoreError where others could write, OSError on failure."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for folder in (self.entries, self.making):
            if not os.path.lexists(folder):
                folder.mkdir(mode=0o700, exist_ok=True)
        self.check()

    def check(self) -> None:
        """Raise StoreError unless every folder that is there is this user's alone, and none but the first is a link."""
        if not os.path.lexists(self.root):
            return
        check_private(self.root)
        for folder in (self.entries, self.making, self.broken):
            try:
                info = os.lstat(folder)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise StoreError(f"cannot be looked at: {error.strerror}", where=str(folder)) from error
            if not stat.S_ISDIR(info.st_mode):
                raise StoreError("is not a folder of the cache", where=str(folder), hint=f"move {folder} away")
            check_private(folder)

    def entry_keys(self) -> list[str]:
        """The names of all entries, in order; what is not named as one is none."""
        with contextlib.suppress(FileNotFoundError):
            return sorted(entry.name for entry in os.scandir(self.entries) if is_key(entry.name))
        return []

    def set_aside(self, key: str) -> Path:
        """Move an entry, or a link in its place, out of the way and return where it is; OSError when it cannot be."""
        self.broken.mkdir(mode=0o700, exist_ok=True)
        aside = self.broken / f"{key}.{secrets.token_hex(4)}"
        os.rename(self.entries / key, aside)
        return aside

    def set_aside_ones(self) -> Iterator[Path]:
        """Yield what was set aside, the oldest first."""
        with contextlib.suppress(OSError):
            found = [Path(entry.path) for entry in os.scandir(self.broken) if is_key(entry.name.partition(".")[0])]
            yield from sorted(found, key=_changed)


def _changed(path: Path) -> float:
    try:
        return os.lstat(path).st_ctime
    except OSError:
        return 0.0
