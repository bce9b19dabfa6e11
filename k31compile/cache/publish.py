"""Writing an entry: made aside, flushed to the disk, and given its name by one rename.

No lock is taken. Of processes that write the same entry at once the first one's rename succeeds; the others find it
there, check it and drop their own.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BufferedRandom
from pathlib import Path
from typing import Any

from k31compile.cache.limits import Limits, make_room, touch
from k31compile.cache.manifest import MANIFEST, SIGNATURE, is_payload_name, manifest_bytes
from k31compile.cache.places import Places
from k31compile.cache.removal import size_of
from k31compile.cache.scratch import scratch_folder
from k31compile.cache.usage import Usage
from k31compile.errors import StoreError
from k31compile.signatures import sign

_TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)


@dataclass(frozen=True, kw_only=True)
class Draft:
    """An entry to be written; `files` are names with their bytes, or paths of files to be copied."""

    key: str
    kind: str
    ingredients: Mapping[str, str]
    program: Mapping[str, Any]
    report: Mapping[str, Any]
    files: Mapping[str, bytes | Path]


def check_draft(draft: Draft, limits: Limits) -> None:
    """Raise StoreError where an entry could not be written in the format, before anything is written."""
    wrong = [name for name in draft.files if not is_payload_name(name)]
    if wrong:
        raise StoreError(
            f"a file of an entry cannot be called {wrong[0]!r}", draft.key, "give a plain name, as graph.txt"
        )
    most = limits.files_per_entry - 2
    if len(draft.files) > most:
        raise StoreError(f"an entry takes {most} files and got {len(draft.files)}", draft.key, "pack some into one")
    manifest_bytes(draft.key, draft.kind, draft.ingredients, draft.program, draft.report, {})


def write_entry(places: Places, limits: Limits, draft: Draft, signing: bytes, is_taken: Callable[[], bool]) -> Path:
    """Write an entry under its key and return its folder; another process's sound one of the same key is as good.

    ``is_taken`` says whether a sound entry has the name, after setting aside one that is not. Raises OSError when the
    disk does not take it, and StoreError when it is larger than the whole store may be; nothing is left behind.
    """
    final = places.entries / draft.key
    with scratch_folder(places.making, "new") as folder:
        _fill(folder, draft, signing)
        size = size_of(folder)
        if size > limits.bytes:
            raise StoreError(
                f"the entry has {size} bytes and the whole cache may have {limits.bytes}",
                where=draft.key,
                hint="raise K31_CACHE_MAX_BYTES",
            )
        make_room(places, limits, size)
        touch(folder)
        for _ in range(3):
            try:
                os.rename(folder, final)
            except OSError as error:
                if error.errno not in _TAKEN:
                    raise
                if is_taken():
                    return final
                continue
            flush_folder(places.entries)
            Usage(places.usage).add(size)
            return final
    raise StoreError("its name is taken again and again by what is no entry", where=str(final), hint=f"look at {final}")


def flush_folder(folder: Path) -> None:
    """Have the names in a folder written to the disk, where the file system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _fill(folder: Path, draft: Draft, signing: bytes) -> None:
    about = {name: _write(folder / name, content) for name, content in draft.files.items()}
    manifest = manifest_bytes(draft.key, draft.kind, draft.ingredients, draft.program, draft.report, about)
    _write(folder / MANIFEST, manifest)
    _write(folder / SIGNATURE, sign(manifest, signing).encode())
    flush_folder(folder)


def _write(path: Path, content: bytes | Path) -> dict[str, Any]:
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(handle, "w+b") as file:
        if isinstance(content, Path):
            with content.open("rb") as source:
                shutil.copyfileobj(source, file, 1 << 20)
        else:
            file.write(content)
        file.flush()
        os.fsync(file.fileno())
        return _describe(file)


def _describe(file: BufferedRandom) -> dict[str, Any]:
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    return {"sha256": hashlib.file_digest(file, "sha256").hexdigest(), "bytes": size}
