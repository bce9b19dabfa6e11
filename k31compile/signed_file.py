"""Small files that are believed for their signature: what one process of this user has found out, for the next one.

A file is one line with the HMAC of the rest, then the rest. It is nobody's code, yet what it says is not tried again.
So a file or a folder that anybody else could have made or changed is refused, with the reason and what to do.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from k31compile.errors import StoreError
from k31compile.signatures import is_signed, local_key, sign
from k31compile.store import atomic_write, cache_dir, check_private

log = logging.getLogger("k31compile")

MOST_BYTES = 1 << 20
"""A file beyond this is none of ours."""

FILE_NAMES = {"functions": r"([^/.\x00]{1,200})-([0-9a-f]{40})\.signed", "regions": r"([0-9a-f]{40})\.signed"}
"""What is kept so: the folder in the user's cache, and how files in it are called."""


def private_folder(name: str) -> Path:
    """The folder of this name in the user's cache, made where it is missing.

    Raises:
        StoreError: it is a link, somebody else's, or others can write it.
    """
    folder = cache_dir() / name
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if folder.is_symlink() or not folder.is_dir():
        raise StoreError("is no folder of its own but a link or a file", where=str(folder), hint=f"run: rm {folder}")
    check_private(folder)
    return folder


def write_signed(path: Path, body: bytes) -> None:
    """Write a body under this user's signature, all of it or nothing."""
    if len(body) > MOST_BYTES:
        raise StoreError(f"would take {len(body)} bytes, more than the {MOST_BYTES} of one file", where=str(path))
    atomic_write(path, sign(body, local_key()).encode() + b"\n" + body)


def read_signed(path: Path) -> bytes | None:
    """The body of a file; None where there is none.

    Raises:
        StoreError: it is not this user's alone, or not as it was written; the hint says how to be rid of it.
    """
    try:
        data = _read_private(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _refused(path, "is a symbolic link" if error.errno == errno.ELOOP else f"{error.strerror}") from error
    signature, found, body = data.partition(b"\n")
    if not found or not signature.isalnum():
        raise _refused(path, "carries no signature")
    if not is_signed(body, signature.decode("ascii", "replace"), local_key()):
        raise _refused(path, "is not as this user's key has signed it")
    return body


def _read_private(path: Path) -> bytes:
    """All of a file that is this user's alone; what is checked is what is read, whoever renames meanwhile."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
        info = os.fstat(file.fileno())
        if not stat.S_ISREG(info.st_mode):
            raise _refused(path, "is no plain file")
        if info.st_uid != os.geteuid():
            raise _refused(path, f"belongs to user {info.st_uid}, not to this user ({os.geteuid()})")
        if info.st_mode & 0o022:
            raise _refused(path, f"can be written by others (mode {stat.S_IMODE(info.st_mode):04o})")
        data = file.read(MOST_BYTES + 128)
    if len(data) >= MOST_BYTES + 128:
        raise _refused(path, f"is larger than {MOST_BYTES} bytes")
    return data


def _refused(path: Path, why: str) -> StoreError:
    return StoreError(why, where=str(path), hint=f"it is not used and found out anew; to be rid of it: rm {path}")


def kept_files(name: str) -> list[Path]:
    """This user's own files of a folder of `FILE_NAMES`, by their names; nothing else in it, and no link.

    Raises:
        StoreError: the folder is not this user's alone.
    """
    folder = cache_dir() / name
    if not os.path.lexists(folder):
        return []
    own_name = re.compile(FILE_NAMES[name])
    found = []
    for path in sorted(private_folder(name).iterdir()):
        info = path.lstat()
        if own_name.fullmatch(path.name) and stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid():
            found.append(path)
    return found


def touch(path: Path) -> None:
    """Mark a file as used just now; where that cannot be done it only goes sooner."""
    with contextlib.suppress(OSError):
        os.utime(path)


def keep_newest(folder: Path, pattern: str, most_files: int, most_bytes: int) -> None:
    """Remove the files of a pattern that were used longest ago, beyond so many and so many bytes."""
    seen: list[tuple[float, int, Path]] = []
    for path in folder.glob(pattern):
        with contextlib.suppress(OSError):
            info = path.lstat()
            seen.append((info.st_mtime, info.st_size, path))
    room = most_bytes
    for count, (_, size, path) in enumerate(sorted(seen, reverse=True)):
        room -= size
        if count >= most_files or room < 0:
            with contextlib.suppress(OSError):
                path.unlink()


def bodies(folder: Path, pattern: str) -> Iterator[tuple[str, bytes | StoreError]]:
    """Each file of a pattern by name: its body, or why it is refused."""
    for path in sorted(folder.glob(pattern)):
        try:
            body = read_signed(path)
        except StoreError as error:
            yield path.name, error
            continue
        if body is not None:
            yield path.name, body


def sound_bodies(folder: Path, known_as: str) -> Iterator[tuple[str, bytes]]:
    """Each signed file of a folder as `known_as/NAME`, and its body; one that is refused is named and left out."""
    for name, body in bodies(folder, "*.signed"):
        if isinstance(body, StoreError):
            log.warning("%s is left out: %s", name, body)
        else:
            yield f"{known_as}/{name}", body


def require_keys(data: object, keys: Mapping[str, type]) -> None:
    """Raise ValueError unless `data` is a mapping with exactly these keys, each of its type."""
    if not isinstance(data, dict) or {key: type(value) for key, value in data.items()} != dict(keys):
        raise ValueError(f"it is no record of {', '.join(keys)}")
