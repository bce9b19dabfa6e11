"""Taking an entry away without touching anything that was not made as a part of one."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from k31compile.cache.manifest import MANIFEST, SIGNATURE, file_names
from k31compile.cache.places import Places
from k31compile.cache.scratch import new_name, remove_made

USUAL = frozenset({"graph.txt", "library.so", "externs.json"})
"""What entries hold mostly: known as ours even beside a manifest that cannot be read any more."""


@dataclass
class Removed:
    """What came of removing entries.

    Attributes:
        keys: the entries that are gone.
        bytes: what they took.
        kept: path -> why it was left, for everything that was not ours to remove.

    """

    keys: list[str] = field(default_factory=list)
    bytes: int = 0
    kept: dict[str, str] = field(default_factory=dict)


def remove_entry(places: Places, folder: Path, removed: Removed, known: Iterable[str] = ()) -> bool:
    """Remove the folder of an entry and note it; files that the entry did not bring stay, and its folder with them.

    An entry leaves its name at once, by a rename, so that no reader meets a half of it.
    """
    try:
        info = os.lstat(folder)
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
            removed.kept[str(folder)] = "it is a link, a file, or another user's"
            return False
        size = size_of(folder)
        own, others = _split(folder, set(known))
        if others:
            for name in sorted(own, key=lambda name: name != SIGNATURE):  # without it nobody believes the rest
                os.unlink(folder / name)
            removed.kept |= {str(folder / name): "no part of the entry" for name in others}
            return False
        gone = new_name(places.making, "left")
        os.rename(folder, gone)
    except FileNotFoundError:
        return False
    except OSError as error:
        removed.kept[str(folder)] = error.strerror or str(error)
        return False
    remove_made(gone)
    removed.keys.append(folder.name.partition(".")[0])
    removed.bytes += size
    return True


def size_of(folder: Path) -> int:
    """What the files of a folder take on the disk, in bytes; what disappears meanwhile counts nothing."""
    total = 0
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            with contextlib.suppress(OSError):
                info = entry.stat(follow_symlinks=False)
                total += max(info.st_size, info.st_blocks * 512)
    return total


def _split(folder: Path, known: set[str]) -> tuple[list[str], list[str]]:
    """The names in a folder that are the entry's own, and all others."""
    own: list[str] = []
    others: list[str] = []
    ours = {MANIFEST, SIGNATURE} | (_listed(folder) or USUAL | known)
    for entry in os.scandir(folder):
        is_own = entry.name in ours and entry.is_file(follow_symlinks=False)
        (own if is_own or entry.name.startswith(".nfs") else others).append(entry.name)
    return own, others


def _listed(folder: Path) -> set[str]:
    path = folder / MANIFEST
    try:
        return file_names(path.read_bytes()) if stat.S_ISREG(os.lstat(path).st_mode) else set()
    except OSError:
        return set()
