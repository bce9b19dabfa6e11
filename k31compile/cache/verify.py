"""Whether an entry may be believed: owner, mode, links, signature and hashes, all before a byte of it is code.

Everything is opened through the folder's own handle and never through a link, so that what was checked is what was read
even while other processes replace the entry.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Iterator, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any

from k31compile.cache.manifest import MANIFEST, SIGNATURE, parse
from k31compile.signatures import is_signed

_MOST_MANIFEST = 64 << 20
_MOST_SIGNATURE = 4096
_REMEDY_BUILD = "it is built again"


class Fault(Exception):
    """Why an entry is not believed, and what to do.

    Attributes:
        reason: what is wrong, in words.
        remedy: what helps.
        is_broken: it is this user's and not what was written, so that it may be set aside; what is left where it is
            until something new is written there is repaired by its remedy, or is somebody else's.

    """

    def __init__(self, reason: str, remedy: str = _REMEDY_BUILD, is_broken: bool = True) -> None:
        super().__init__(reason, remedy, is_broken)
        self.reason = reason
        self.remedy = remedy
        self.is_broken = is_broken

    def __str__(self) -> str:
        return f"{self.reason}; {self.remedy}"


class GoneError(Exception):
    """There is no entry of this name, or it left while it was read."""


def check_entry(folder: Path, keys: Sequence[bytes], files_per_entry: int) -> dict[str, Any]:
    """Return the manifest of an entry all of whose files are as they were written; raise Fault or GoneError."""
    with _opened_folder(folder) as handle:
        manifest = _signed_manifest(folder, handle, keys)
        names = set(os.listdir(handle))
        for name in sorted(names - {MANIFEST, SIGNATURE} - set(manifest["files"])):
            if not name.startswith(".nfs"):  # a network file system keeps so what was removed while it was open
                raise Fault(f"it holds a file that its manifest does not list, {name!r}")
        if len(manifest["files"]) + 2 > files_per_entry:
            raise Fault(f"it has more than {files_per_entry} files")
        for name, about in sorted(manifest["files"].items()):
            if name not in names:
                _check_there(folder, handle)
                raise Fault(f"its file {name!r} is missing")
            _check_file(folder, handle, name, about)
    return manifest


def read_manifest(folder: Path, keys: Sequence[bytes]) -> dict[str, Any]:
    """Return the manifest of an entry after checking who wrote it; its other files are not looked at."""
    with _opened_folder(folder) as handle:
        return _signed_manifest(folder, handle, keys)


@contextlib.contextmanager
def _opened_folder(folder: Path) -> Iterator[int]:
    try:
        seen = os.lstat(folder)
        _check_ours(folder, seen, "it", stat.S_ISDIR)
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise GoneError from None
    except OSError as error:
        raise Fault(f"it cannot be opened: {error.strerror}", f"remove {folder}", is_broken=False) from error
    try:
        _check_ours(folder, os.fstat(handle), "it", stat.S_ISDIR)
        yield handle
    finally:
        os.close(handle)


def _signed_manifest(folder: Path, handle: int, keys: Sequence[bytes]) -> dict[str, Any]:
    data = _read_small(folder, handle, MANIFEST, _MOST_MANIFEST)
    signature = _read_small(folder, handle, SIGNATURE, _MOST_SIGNATURE).decode("ascii", "replace")
    if not any(is_signed(data, signature, key) for key in keys):
        raise Fault(
            "its signature fits neither this user's key nor K31_CACHE_KEY, or its manifest was changed",
            "set K31_CACHE_KEY as it was when the entry was made; without it the entry is built again",
        )
    try:
        manifest = parse(data)
    except (ValueError, RecursionError) as error:
        raise Fault(str(error), is_broken=False) from error
    if manifest["key"] != folder.name.partition(".")[0]:
        raise Fault(f"its manifest is that of another entry, {manifest['key'][:12]}")
    return manifest


def _read_small(folder: Path, handle: int, name: str, most: int) -> bytes:
    with _opened_file(folder, handle, name) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise Fault(f"its {name} is too large to be one")
    if not data:
        raise Fault(f"its {name} is empty")
    return data


def _check_file(folder: Path, handle: int, name: str, about: dict[str, Any]) -> None:
    with _opened_file(folder, handle, name) as file:
        size = os.fstat(file.fileno()).st_size
        if size != about["bytes"]:
            raise Fault(f"its file {name!r} has {size} bytes and had {about['bytes']}")
        if hashlib.file_digest(file, "sha256").hexdigest() != about["sha256"]:
            raise Fault(f"the bytes of its file {name!r} are not those that were written")


@contextlib.contextmanager
def _opened_file(folder: Path, handle: int, name: str) -> Iterator[BufferedReader]:
    try:
        # Looked at before it is opened: opening a pipe would wait for ever.
        _check_ours(
            folder / name, os.stat(name, dir_fd=handle, follow_symlinks=False), f"its file {name!r}", stat.S_ISREG
        )
        opened = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=handle)
    except FileNotFoundError:
        _check_there(folder, handle)
        raise Fault(f"its file {name!r} is missing") from None
    except OSError as error:
        raise Fault(f"its file {name!r} cannot be opened: {error.strerror}") from error
    with os.fdopen(opened, "rb") as file:
        _check_ours(folder / name, os.fstat(file.fileno()), f"its file {name!r}", stat.S_ISREG)
        try:
            yield file
        except OSError as error:
            raise Fault(f"its file {name!r} cannot be read: {error.strerror}") from error


def _check_there(folder: Path, handle: int) -> None:
    """Raise GoneError when a folder lost its files because another process took it away."""
    try:
        now = os.lstat(folder)
    except OSError:
        raise GoneError from None
    if (now.st_dev, now.st_ino) != (os.fstat(handle).st_dev, os.fstat(handle).st_ino):
        raise GoneError


def _check_ours(path: Path, info: os.stat_result, what: str, is_kind: Any) -> None:
    if stat.S_ISLNK(info.st_mode):
        raise Fault(f"{what} is a symbolic link", f"run: rm {path}", is_broken=False)
    if not is_kind(info.st_mode):
        raise Fault(
            f"{what} is neither a plain file nor a folder where one should be", f"remove {path}", is_broken=False
        )
    if info.st_uid != os.geteuid():
        raise Fault(
            f"{what} belongs to user {info.st_uid}, not to this user ({os.geteuid()})",
            f"let user {info.st_uid} export it and import it here, or remove {path}",
            is_broken=False,
        )
    mode = stat.S_IMODE(info.st_mode)
    if mode & 0o022:
        raise Fault(
            f"{what} can be written by others (mode {mode:04o})",
            f"run: chmod go-w {path}; if others did write there, run: k31 cache clear",
            is_broken=False,
        )
