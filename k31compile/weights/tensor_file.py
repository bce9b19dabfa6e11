"""Safetensors files read and written tensor by tensor: the library's own writer wants all of a file in memory at once.

A file is the length of its header (8 bytes), the header (JSON: name -> dtype, shape, offsets), and the bytes. Whether a
file is a valid one is left to the library.
"""

import hashlib
import json
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import SafetensorError, safe_open

from k31compile.errors import WeightFileError

_METADATA = "__metadata__"
_ALIGNMENT = 8
_PIECE = 16 << 20


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file: its shape and dtype (as safetensors spells it), and where its bytes are."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """How many bytes it has."""
        return self.end - self.begin


@dataclass(frozen=True)
class TensorFile:
    """The header of a safetensors file; tensors in the order in which the header has them.

    `is_said_empty`: it has metadata without an entry, which is not the same bytes as none.
    """

    path: Path
    metadata: Mapping[str, str]
    tensors: tuple[StoredTensor, ...]
    data_start: int
    is_said_empty: bool = False

    def pieces(self, tensor: StoredTensor, size: int = _PIECE) -> Iterator[bytes]:
        """The bytes of a tensor, at most `size` at a time."""
        with open(self.path, "rb") as file:
            file.seek(self.data_start + tensor.begin)
            left = tensor.nbytes
            while left:
                piece = file.read(min(size, left))
                if not piece:
                    raise WeightFileError(f"{tensor.name} ends before its {tensor.nbytes} bytes", where=str(self.path))
                left -= len(piece)
                yield piece

    def read(self, tensor: StoredTensor, offset: int = 0, size: int | None = None) -> bytearray:
        """`size` bytes of a tensor from `offset` on, all that follow by default, in memory that may be written."""
        data = bytearray(tensor.nbytes - offset if size is None else size)
        with open(self.path, "rb") as file:
            file.seek(self.data_start + tensor.begin + offset)
            if file.readinto(data) != len(data):
                raise WeightFileError(f"{tensor.name} ends before its {tensor.nbytes} bytes", where=str(self.path))
        return data


def read_tensor_file(path: Path) -> TensorFile:
    """Read the header of a safetensors file, and no tensor.

    Raises:
        WeightFileError: it cannot be read, is cut off, or is no such file.
    """
    try:
        with safe_open(path, framework="pt"):
            pass
        with open(path, "rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(size))
    except OSError as error:
        raise WeightFileError(f"the file cannot be read: {error.strerror or error}", where=str(path)) from error
    except (SafetensorError, ValueError) as error:
        raise WeightFileError(f"the file is cut off or no safetensors file: {error}", where=str(path)) from error
    is_said_empty = header.get(_METADATA) == {}
    metadata = header.pop(_METADATA, None) or {}
    tensors = tuple(
        StoredTensor(name, entry["dtype"], tuple(entry["shape"]), *entry["data_offsets"])
        for name, entry in header.items()
    )
    return TensorFile(path, metadata, tensors, 8 + size, is_said_empty)


class HashingWriter:
    """Writes to a file and keeps the SHA-256 of what went by."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write all of `data`."""
        self._file.write(data)
        self._digest.update(data)

    def hexdigest(self) -> str:
        """The hash of everything written so far."""
        return self._digest.hexdigest()


def write_header(
    out: HashingWriter, metadata: Mapping[str, str] | None, tensors: Mapping[str, tuple[str, Any, int]]
) -> None:
    """Write length and header; `tensors` is name -> (dtype, shape, bytes) in the order in which their bytes follow."""
    header: dict[str, Any] = {} if metadata is None else {_METADATA: dict(metadata)}
    at = 0
    for name, (dtype, shape, nbytes) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    out.write(struct.pack("<Q", len(text)))
    out.write(text)


def signature(path: Path) -> tuple[int, int, int]:
    """What changes when a file is written again: its inode, its size, its time."""
    info = os.stat(path)
    return info.st_ino, info.st_size, info.st_mtime_ns
