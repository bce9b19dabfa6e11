"""An entry as one run of bytes, for the way to another machine: signed as a whole, compressed, reproducible.

A line that names the format, the signature of everything behind it, then a tar file under zstd. The signature is made
with ``K31_CACHE_KEY`` and covers the key of the entry; nothing is decompressed before it is checked.
"""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import zstandard

from k31compile.cache.manifest import MANIFEST, parse
from k31compile.cache.publish import Draft
from k31compile.errors import StoreError
from k31compile.signatures import is_signed, sign

_HEAD = b"k31-entry 1\n"
_SIGNATURE_LENGTH = 64
_LEVEL = 3


def pack(key: str, manifest: bytes, files: Mapping[str, Path], shared: bytes) -> bytes:
    """Write an entry down as bytes: the same for the same entry, wherever it is done."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        _add(tar, MANIFEST, manifest)
        for name in sorted(files):
            _add(tar, name, files[name].read_bytes())
    body = zstandard.ZstdCompressor(level=_LEVEL).compress(packed.getvalue())
    return _HEAD + sign(_signed(key, body), shared).encode() + b"\n" + body


def unpack(key: str, data: bytes, shared: bytes, most_bytes: int) -> Draft:
    """Read an entry of this key; StoreError where the bytes are not those that somebody with the same secret wrote."""
    body_at = len(_HEAD) + _SIGNATURE_LENGTH + 1
    if not data.startswith(_HEAD) or len(data) <= body_at:
        raise StoreError("it is no entry of a cache, or only the beginning of one", where=key, hint="")
    signature, body = data[len(_HEAD) : body_at - 1].decode("ascii", "replace"), data[body_at:]
    if data[body_at - 1 : body_at] != b"\n" or not is_signed(_signed(key, body), signature, shared):
        raise StoreError("its signature is not that of K31_CACHE_KEY, or it was changed", where=key, hint="")
    try:
        files = _read_tar(_decompressed(body, most_bytes))
        manifest = parse(files.pop(MANIFEST))
        _check(key, manifest, files)
    except (zstandard.ZstdError, tarfile.TarError, EOFError, ValueError, KeyError) as error:
        raise StoreError(f"it cannot be read: {error}", where=key, hint="") from error
    parts: dict[str, Any] = {name: manifest[name] for name in ("kind", "ingredients", "program", "report")}
    return Draft(key=key, files=files, **parts)


def _signed(key: str, body: bytes) -> bytes:
    return b"k31-entry\0" + key.encode() + b"\0" + body


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    about = tarfile.TarInfo(name)
    about.size = len(data)
    about.mode = 0o600
    tar.addfile(about, io.BytesIO(data))


def _decompressed(body: bytes, most_bytes: int) -> bytes:
    with zstandard.ZstdDecompressor().stream_reader(body) as reader:
        data = reader.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise ValueError(f"it is larger than the whole cache may be, {most_bytes} bytes")
    return data


def _read_tar(data: bytes) -> dict[str, bytes]:
    files = {}
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
        for about in tar:
            content = tar.extractfile(about) if about.isreg() else None
            if content is None or about.name in files:
                raise ValueError(f"{about.name!r} in it is no plain file")
            files[about.name] = content.read()
    return files


def _check(key: str, manifest: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
    if manifest["key"] != key:
        raise ValueError("its manifest is that of another entry")
    for name in sorted(files.keys() | manifest["files"].keys()):
        about = manifest["files"].get(name)
        if name not in files or about is None or about["sha256"] != hashlib.sha256(files[name]).hexdigest():
            raise ValueError(f"its file {name!r} is not as its manifest says")
