"""Where things are made and taken apart: folders that carry the name of the process that uses them.

An entry is made here and renamed to its final name when it is whole, and renamed back to here before it is taken apart,
so that nobody ever sees half of one. A process that is killed leaves its folder behind; a later one removes it, once it
knows that nobody uses it any more.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path

STALE_SECONDS = 900
"""After so long without a change a folder is left over, where its process cannot be asked about."""


def new_folder(place: Path, purpose: str) -> Path:
    """Make a private folder for this process and return it."""
    folder = new_name(place, purpose)
    folder.mkdir(mode=0o700)
    return folder


@contextlib.contextmanager
def scratch_folder(place: Path, purpose: str) -> Iterator[Path]:
    """A private folder that is gone after the block, unless it was renamed in it."""
    folder = new_folder(place, purpose)
    try:
        yield folder
    finally:
        remove_made(folder)


def new_name(place: Path, purpose: str) -> Path:
    """A name that nothing has, which tells machine, process and its start time."""
    pid = os.getpid()
    return place / f"{purpose}.{machine_tag()}.{pid}.{_start_of(pid)}.{secrets.token_hex(6)}"


def sweep(place: Path) -> int:
    """Remove what killed processes left behind and return how many folders that were; errors are left to the next one.

    A folder of a living process of this machine always stays, however old. One of another machine, or of another
    container that shares the folder, stays until nothing in it has changed for `STALE_SECONDS`.
    """
    removed = 0
    try:
        found = sorted(entry.name for entry in os.scandir(place))
    except OSError:
        return 0
    for name in found:
        if _is_left_over(place / name):
            # Renamed first: should its process live after all, it finds its folder gone instead of half empty.
            with contextlib.suppress(OSError):
                gone = new_name(place, "left")
                os.rename(place / name, gone)
                remove_made(gone)
                removed += 1
    return removed


def remove_made(folder: Path) -> None:
    """Remove a folder that this package made under a name of its own; anything else in it than plain files stays."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            if entry.is_file(follow_symlinks=False):
                os.unlink(entry.path)
        os.rmdir(folder)


@functools.cache
def machine_tag() -> str:
    """Twelve digits for where process numbers are unique: a host since its start, or a container on it."""
    parts = [os.uname().nodename]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def _is_left_over(folder: Path) -> bool:
    parts = folder.name.split(".")
    try:
        info = os.lstat(folder)
        if len(parts) != 5 or not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
            return False
        _, tag, pid, start, _ = parts
        if tag == machine_tag():
            return not _is_alive(int(pid), start)
        newest = max([info.st_mtime, *(entry.stat(follow_symlinks=False).st_mtime for entry in os.scandir(folder))])
    except (OSError, ValueError):
        return False
    return abs(time.time() - newest) > STALE_SECONDS


def _is_alive(pid: int, start: str) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return _start_of(pid) == start


def _start_of(pid: int) -> str:
    """When a process began, in the kernel's ticks; 0 where nobody tells, "ended" for one that only waits."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "0"
    return "ended" if fields[0] in "ZX" else fields[19]
