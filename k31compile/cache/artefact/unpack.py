"""The libraries of an artefact as files in a private folder, where they can be loaded and a later start finds them."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from k31compile.errors import StoreError
from k31compile.store import atomic_write, cache_dir, check_private

_KEPT = 16
"""How many artefacts stay unpacked."""


def unpacked(digest: str, files: Mapping[str, bytes]) -> Path:
    """The folder with these files, made where it is not there or not sound.

    Where the user's cache folder cannot be written, as in a sealed image, it is a temporary one of this process.

    Raises:
        StoreError: that cannot be written either.
    """
    try:
        return _in_cache(digest, files)
    except StoreError as error:
        try:
            folder = Path(tempfile.mkdtemp(prefix="k31-artefact-"))
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
            _write(folder / digest[:32], files)
        except OSError:
            raise error from None
        return folder / digest[:32]


def _in_cache(digest: str, files: Mapping[str, bytes]) -> Path:
    root = cache_dir() / "artefacts"
    try:
        root.mkdir(mode=0o700, exist_ok=True)
        check_private(root)
        folder = root / digest[:32]
        if not _is_sound(folder, files):
            _write(folder, files)
        with contextlib.suppress(OSError):
            os.utime(folder)
    except OSError as error:
        raise StoreError(f"an artefact cannot be unpacked: {error.strerror or error}", where=str(root)) from error
    _remove_oldest(root, folder)
    return folder


def _is_sound(folder: Path, files: Mapping[str, bytes]) -> bool:
    try:
        check_private(folder)
        found = {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}
        if found != set(files):
            return False
        for name, data in files.items():
            path = folder / name
            if path.is_symlink():
                return False
            check_private(path)
            if hashlib.sha256(path.read_bytes()).digest() != hashlib.sha256(data).digest():
                return False
    except (StoreError, OSError):
        return False
    return True


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        for name, data in files.items():
            path = fresh / name
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            atomic_write(path, data)
        _publish(fresh, folder, files)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _publish(fresh: Path, folder: Path, files: Mapping[str, bytes]) -> None:
    """Give a folder its name; the first of several processes wins, and what is not sound makes room."""
    for _ in range(3):
        try:
            os.rename(fresh, folder)
            return
        except OSError:
            if _is_sound(folder, files):
                return
            aside = Path(tempfile.mkdtemp(prefix=".aside-", dir=folder.parent))
            with contextlib.suppress(OSError):
                os.rename(folder, aside / "old")
            shutil.rmtree(aside, ignore_errors=True)
    raise StoreError("another process keeps writing there", where=str(folder))


def _remove_oldest(root: Path, used: Path) -> None:
    """Keep so many folders; one that a process has loaded libraries from stays usable to it."""
    with contextlib.suppress(OSError):
        folders = [path for path in root.iterdir() if path.is_dir() and not path.name.startswith(".") and path != used]
        folders.sort(key=lambda path: path.stat().st_mtime, reverse=True)
        for old in folders[_KEPT - 1 :]:
            shutil.rmtree(old, ignore_errors=True)
