"""The file of a bundle: a tar with zstd, behind a frame that every zstd tool skips and that holds the signature.

The signature is over the compressed bytes, so nothing is unpacked before it is checked. The tar has plain files only,
in the order of their names, each announced with its size and hash by the first of them; equal contents are equal bytes.
"""

from __future__ import annotations

import hashlib
import hmac
import io
import json
import os
import re
import stat
import tarfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import zstandard

from k31compile.errors import BundleError
from k31compile.store import atomic_file

INDEX = "bundle.json"
FORMAT = 1
MOST_INDEX = 32 << 20

_WORD = b"k31-bundle-1 "
_DIGITS = 64
_HEAD = b"\x5b\x2a\x4d\x18" + (len(_WORD) + _DIGITS).to_bytes(4, "little") + _WORD
_LEVEL = 10
_MOST_WINDOW = 1 << 27
_BLOCK = 512
_CHUNK = 1 << 20
_NAME = re.compile(r"[a-z]+/[A-Za-z0-9_<][A-Za-z0-9_.<>-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)?")
_AGAIN = "make it again with: k31 cache export BUNDLE"


@dataclass(frozen=True)
class Member:
    """A file of a bundle: its size and hash, and how its bytes are read when they are written down."""

    size: int
    sha256: str
    read: Callable[[], bytes]

    @staticmethod
    def of(data: bytes) -> Member:
        """A member whose bytes are here."""
        return Member(len(data), hashlib.sha256(data).hexdigest(), lambda: data)


def write_bundle(path: Path, about: Mapping[str, Any], members: Mapping[str, Member], key: bytes) -> int:
    """Write a bundle under its name once it is whole; returns its size.

    Raises:
        BundleError: a member is not what it was when it was announced.
        OSError: the disk does not take it.
    """
    listed = {name: {"bytes": member.size, "sha256": member.sha256} for name, member in sorted(members.items())}
    index = json.dumps({"format": FORMAT, "about": dict(about), "files": listed}, sort_keys=True, indent=1).encode()
    digest = hmac.new(key, _WORD, hashlib.sha256)
    with atomic_file(path) as file:
        file.write(_HEAD + b"0" * _DIGITS)
        with _compressing(file, digest) as sink:
            for name, member in [(INDEX, Member.of(index)), *sorted(members.items())]:
                data = member.read()
                if hashlib.sha256(data).hexdigest() != member.sha256:
                    raise BundleError(f"{name} changed while it was exported", hint="export again")
                sink.write(_header(name, len(data)) + data + bytes(-len(data) % _BLOCK))
            sink.write(bytes(2 * _BLOCK))
        size = file.tell()
        file.seek(len(_HEAD))
        file.write(digest.hexdigest().encode())
    return size


@dataclass(frozen=True)
class Opened:
    """A bundle whose signature was right when it was opened.

    Attributes:
        about: what the index says beside the files.
        files: name -> {"bytes", "sha256"}, in order.
        members: the same names with their contents, each to be read to its end before the next is asked for.

    """

    about: Mapping[str, Any]
    files: Mapping[str, Mapping[str, Any]]
    members: Iterator[tuple[str, BinaryIO]]


@contextmanager
def open_bundle(path: Path, key: bytes, most_bytes: int) -> Iterator[Opened]:
    """Check a bundle's signature and give its members one after the other, each to be read to its end.

    When the members are through, the whole file has been checked a second time as it was read: nothing of it may be
    used before. No more than `most_bytes` are ever unpacked.

    Raises:
        BundleError: it is not signed with this key, or not what `write_bundle` writes.
    """
    with _regular(path) as file:
        expected = _checked_signature(file, key, path)
        file.seek(len(_HEAD) + _DIGITS)
        source: Any = _Hashing(file, hmac.new(key, _WORD, hashlib.sha256))
        try:
            with zstandard.ZstdDecompressor(max_window_size=_MOST_WINDOW).stream_reader(source, closefd=False) as plain:
                tar = _Tar(plain)
                opened = _index(tar, path, most_bytes)
                yield replace(opened, members=_members(opened, tar, source, expected, path))
        except zstandard.ZstdError as error:
            raise BundleError(f"is not compressed as it should be: {error}", str(path), _AGAIN) from error


def _checked_signature(file: BinaryIO, key: bytes, path: Path) -> str:
    head = file.read(len(_HEAD) + _DIGITS)
    if not head.startswith(_HEAD) or len(head) != len(_HEAD) + _DIGITS:
        raise BundleError("is no bundle of k31", where=str(path))
    digest = hmac.new(key, _WORD, hashlib.sha256)
    while chunk := file.read(_CHUNK):
        digest.update(chunk)
    if not hmac.compare_digest(digest.hexdigest().encode(), head[len(_HEAD) :]):
        raise BundleError(
            "is not signed with the K31_CACHE_KEY of this process, or was changed since",
            where=str(path),
            hint="set K31_CACHE_KEY to the secret of the machine that exported it; else copy or make the bundle again",
        )
    return digest.hexdigest()


def _index(tar: _Tar, path: Path, most_bytes: int) -> Opened:
    name, size = tar.header(path)
    if name != INDEX or size > MOST_INDEX:
        raise BundleError(f"begins with {name!r} of {size} bytes and not with its index", where=str(path))
    try:
        index = json.loads(tar.data(size, path))
        files = {str(name): dict(about) for name, about in index["files"].items()}
        fits = index["format"] == FORMAT and all(_is_listed(name, about) for name, about in files.items())
        about = dict(index["about"])
    except (ValueError, KeyError, TypeError, AttributeError):
        raise BundleError("has an index that cannot be read", where=str(path)) from None
    if not fits or list(files) != sorted(files):
        raise BundleError("lists files in a way that nobody writes", where=str(path))
    total = sum(file["bytes"] for file in files.values())
    if total > most_bytes:
        raise BundleError(
            f"would unpack to {total} bytes, and this cache may have {most_bytes}",
            where=str(path),
            hint="raise K31_CACHE_MAX_BYTES, or export fewer entries",
        )
    return Opened(about, files, iter(()))


def _members(opened: Opened, tar: _Tar, source: _Hashing, expected: str, path: Path) -> Iterator[tuple[str, BinaryIO]]:
    for wanted, about in opened.files.items():
        name, size = tar.header(path)
        if name != wanted or size != about["bytes"]:
            raise BundleError(f"has {name!r} of {size} bytes where its index has {wanted!r}", where=str(path))
        part = _Part(tar.plain, size)
        yield name, io.BufferedReader(part, _CHUNK)
        if part.left or part.digest.hexdigest() != about["sha256"]:
            raise BundleError(f"has a {name!r} that is not what its index says", where=str(path))
        tar.skip_padding(size, path)
    if any(_read(tar.plain, 2 * _BLOCK, path)) or tar.plain.read(1) or source.read(1):
        raise BundleError("goes on where it should end", where=str(path))
    if source.digest.hexdigest() != expected:
        raise BundleError("was changed while it was read", where=str(path), hint="import it again")


def is_name(name: str) -> bool:
    """Whether a file of a bundle may be called so: at most two folders deep, plain, and short enough for a tar."""
    folder, _, last = name.rpartition("/")
    return _NAME.fullmatch(name) is not None and len(last) <= 100 and len(folder) <= 150


def _is_listed(name: str, about: Mapping[str, Any]) -> bool:
    return (
        is_name(name)
        and set(about) == {"bytes", "sha256"}
        and type(about["bytes"]) is int
        and about["bytes"] >= 0
        and isinstance(about["sha256"], str)
    )


class _Tar:
    """The plain bytes of a tar, header by header: no extension of the format is followed."""

    def __init__(self, plain: Any) -> None:
        self.plain = plain

    def header(self, path: Path) -> tuple[str, int]:
        """The name and the size of the next file; BundleError for anything but a plain file."""
        try:
            info = tarfile.TarInfo.frombuf(self.data(_BLOCK, path), "ascii", "strict")
        except (tarfile.HeaderError, UnicodeError) as error:
            raise BundleError(f"is damaged: {error}", where=str(path)) from None
        if info.type != tarfile.REGTYPE:
            raise BundleError(f"holds {info.name!r}, which is no plain file", where=str(path))
        return info.name, info.size

    def data(self, size: int, path: Path) -> bytes:
        """The next bytes, and what fills them up to whole blocks."""
        data = _read(self.plain, size, path)
        self.skip_padding(size, path)
        return data

    def skip_padding(self, size: int, path: Path) -> None:
        """Read on to the next block."""
        if any(_read(self.plain, -size % _BLOCK, path)):
            raise BundleError("has something where nothing should be", where=str(path))


class _Part(io.RawIOBase):
    """One file of the tar: reads no further than its end, and hashes what was read."""

    def __init__(self, plain: Any, size: int) -> None:
        self.plain, self.left, self.digest = plain, size, hashlib.sha256()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self.plain.read(min(len(buffer), self.left)) if self.left else b""
        self.left -= len(data)
        self.digest.update(data)
        buffer[: len(data)] = data
        return len(data)


class _Hashing:
    """A file that hashes what is read from it or written to it."""

    def __init__(self, file: BinaryIO, digest: Any) -> None:
        self.file, self.digest = file, digest

    def read(self, size: int = -1) -> bytes:
        data = self.file.read(size)
        self.digest.update(data)
        return data

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        return self.file.write(data)


@contextmanager
def _compressing(file: BinaryIO, digest: Any) -> Iterator[Any]:
    compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True)
    target: Any = _Hashing(file, digest)
    with compressor.stream_writer(target, closefd=False) as sink:
        yield sink


@contextmanager
def _regular(path: Path) -> Iterator[BinaryIO]:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise BundleError(f"cannot be read: {error.strerror}", str(path), "give the path of a bundle") from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise BundleError("is no file", where=str(path), hint="give the path of a bundle")
    with os.fdopen(handle, "rb") as file:
        yield file


def _header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o600
    return info.tobuf(tarfile.USTAR_FORMAT, "ascii", "strict")


def _read(plain: Any, size: int, path: Path) -> bytes:
    held = bytearray()
    while len(held) < size:
        chunk = plain.read(min(size - len(held), _CHUNK))
        if not chunk:
            raise BundleError("ends too early", where=str(path))
        held += chunk
    return bytes(held)
