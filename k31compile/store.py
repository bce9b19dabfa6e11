"""Where files of ours live, and how they are written and trusted.

What lies here is later loaded as code, so a folder or file that others can write is refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from k31compile.errors import StoreError

_APP = "k31compile"


def cache_dir() -> Path:
    """Return the user's own cache folder, created with mode 0700 when missing.

    ``K31_CACHE_DIR`` decides; else it lies under the XDG cache folder, never in a shared temporary one.
    """
    path = _cache_path()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"the cache folder cannot be made: {error.strerror}", where=str(path)) from error
    if not path.is_dir():
        raise StoreError("the cache folder is not a folder", where=str(path))
    check_private(path)
    return path


def _cache_path() -> Path:
    chosen = os.environ.get("K31_CACHE_DIR")
    if chosen:
        return Path(chosen).expanduser().absolute()
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(xdg):  # the XDG specification says to ignore a relative one
        return Path(xdg) / _APP
    try:
        return Path.home() / ".cache" / _APP
    except RuntimeError as error:
        raise StoreError("this user has no home folder for a cache") from error


def check_private(path: str | os.PathLike[str]) -> None:
    """Raise unless a path belongs to this user and only this user can write it."""
    try:
        seen = (os.lstat(path), os.stat(path))  # a link's own owner could point it elsewhere later
    except OSError as error:
        raise StoreError(f"cannot be read: {error.strerror}", where=os.fspath(path)) from error
    if any(info.st_uid != os.geteuid() for info in seen):
        raise StoreError(f"belongs to user {seen[1].st_uid}, not to this user ({os.geteuid()})", where=os.fspath(path))
    mode = stat.S_IMODE(seen[1].st_mode)
    if mode & 0o022:
        raise StoreError(
            f"can be written by others (mode {mode:04o})",
            where=os.fspath(path),
            hint=f"run: chmod go-w {os.fspath(path)}",
        )


def atomic_write(path: str | os.PathLike[str], data: bytes, mode: int = 0o600) -> None:
    """Write a file so that a reader, or a crash, sees all of it or none of it."""
    with atomic_file(path, mode) as file:
        file.write(data)


def partial_prefix(name: str) -> str:
    """How the name of a file begins that is not yet whole and will be called `name`."""
    return f".{name}."


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike[str], mode: int = 0o600) -> Iterator[BinaryIO]:
    """Open a file to be written piece by piece, which takes its name only when all of it is on the disk.

    Until then it is `.NAME.` with a random end, in the same folder, and an error in the block removes it.
    """
    target = Path(path)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=partial_prefix(target.name))
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        os.replace(name, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise


def sha256_of(path: str | os.PathLike[str]) -> str:
    """Return the SHA-256 of a file's bytes as hexadecimal text."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
