"""What a file says about the layout of its tensors: one JSON text under one key of the safetensors metadata."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from k31compile.errors import WeightFileError
from k31compile.weights.blocks import has_blocks, stored_shape
from k31compile.weights.tensor_file import TensorFile

KEY = "k31.layout"
VERSION = 1
ND, NZ = "nd", "nz"


@dataclass(frozen=True)
class TensorRecord:
    """How one tensor is stored: "nd" or "nz", and the shape and dtype that a model has."""

    layout: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class FileRecord:
    """Who wrote a file, from the bytes of which source (SHA-256), and how its tensors are stored.

    `is_said_empty`: the source had metadata without an entry, and gets it back.
    """

    tool: str
    source_sha256: str
    tensors: Mapping[str, TensorRecord] = field(default_factory=dict)
    is_said_empty: bool = False

    def to_text(self) -> str:
        """The record as the metadata holds it: the same text for the same facts."""
        facts = {"version": VERSION, **asdict(self)}
        if not self.is_said_empty:
            del facts["is_said_empty"]
        return json.dumps(facts, separators=(",", ":"), sort_keys=True)


def read_record(file: TensorFile) -> FileRecord | None:
    """The record of a file, or None where it has none.

    Raises:
        WeightFileError: it is damaged, of a later version, or does not fit the file's tensors.
    """
    text = file.metadata.get(KEY)
    if text is None:
        return None
    try:
        data: dict[str, Any] = json.loads(text)
        version = data["version"]
        tensors = {
            name: TensorRecord(str(entry["layout"]), _shape_of(entry["shape"]), str(entry["dtype"]))
            for name, entry in data["tensors"].items()
        }
        is_said_empty = data.get("is_said_empty", False) is True
        record = FileRecord(str(data["tool"]), str(data["source_sha256"]), tensors, is_said_empty)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WeightFileError(f"its record of layouts is damaged: {error!r}", where=str(file.path)) from error
    if version != VERSION:
        raise WeightFileError(
            f"its record of layouts has version {version!r}, this k31compile reads {VERSION}", where=str(file.path)
        )
    _check_fits(file, record)
    return record


def _shape_of(sides: Any) -> tuple[int, ...]:
    if not isinstance(sides, list) or not all(type(side) is int and side >= 0 for side in sides):
        raise ValueError(f"{sides!r} is no shape")
    return tuple(sides)


def _check_fits(file: TensorFile, record: FileRecord) -> None:
    stored = {tensor.name: tensor for tensor in file.tensors}
    if set(record.tensors) != set(stored):
        odd = sorted(set(record.tensors) ^ set(stored))[0]
        raise WeightFileError(f"its record of layouts and its tensors differ, first in {odd!r}", where=str(file.path))
    for name, entry in record.tensors.items():
        tensor = stored[name]
        if entry.layout not in (ND, NZ):
            raise WeightFileError(f"{name} is recorded as {entry.layout!r}, not nd or nz", where=str(file.path))
        if entry.layout == NZ and not has_blocks(entry.shape, entry.dtype):
            raise WeightFileError(
                f"{name} is recorded as nz, and {entry.dtype} {list(entry.shape)} has no blocks", where=str(file.path)
            )
        expected = stored_shape(entry.shape, entry.dtype) if entry.layout == NZ else entry.shape
        if tensor.dtype != entry.dtype or tensor.shape != expected:
            raise WeightFileError(
                f"{name} is recorded as {entry.layout} of {entry.dtype} {list(entry.shape)}, which would be stored as "
                f"{list(expected)}, and the file has {tensor.dtype} {list(tensor.shape)}",
                where=str(file.path),
            )
