"""A checkpoint on disk: one safetensors file, or a folder with its shards and an index that says which has what."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k31compile.errors import WeightFileError
from k31compile.weights.journal import JOURNAL
from k31compile.weights.record import ND, FileRecord, TensorRecord, read_record
from k31compile.weights.tensor_file import StoredTensor, TensorFile, read_tensor_file

INDEX_FILE = "model.safetensors.index.json"
_SUFFIX = ".safetensors"


@dataclass(frozen=True)
class Shard:
    """One file of a checkpoint, and what it says about the layout of its tensors."""

    file: TensorFile
    record: FileRecord | None

    @property
    def name(self) -> str:
        """The name of the file."""
        return self.file.path.name

    def layout_of(self, tensor: StoredTensor) -> TensorRecord:
        """How a tensor is stored; a file without a record holds plain tensors."""
        if self.record is None:
            return TensorRecord(ND, tensor.shape, tensor.dtype)
        return self.record.tensors[tensor.name]


@dataclass(frozen=True)
class Checkpoint:
    """All shards of a checkpoint, and its index where it has one."""

    path: Path
    shards: tuple[Shard, ...]
    index: dict[str, Any] | None

    def tensors(self) -> Iterator[tuple[Shard, StoredTensor]]:
        """Every tensor with its shard."""
        for shard in self.shards:
            for tensor in shard.file.tensors:
                yield shard, tensor


def open_checkpoint(path: Path) -> Checkpoint:
    """Read the headers of a file, or of all shards of a folder; no tensor is read.

    Raises:
        WeightFileError: it is not there, not whole, or its files contradict each other.
    """
    try:
        is_there = path.is_file() or path.is_dir()
    except OSError as error:
        raise WeightFileError(f"it cannot be read: {error.strerror}", where=str(path)) from error
    if not is_there:
        raise WeightFileError(
            "there is no such file or folder", where=str(path), hint="give a .safetensors or a folder"
        )
    if path.is_file():
        return Checkpoint(path, (_shard(path),), None)
    if (path / JOURNAL).exists():
        raise WeightFileError(
            "the folder holds an interrupted conversion, and not all of its shards",
            where=str(path),
            hint="repeat the call that was interrupted",
        )
    index = _read_index(path / INDEX_FILE)
    names = _names_in(index, path) if index is not None else sorted(found.name for found in path.glob("*" + _SUFFIX))
    if not names:
        raise WeightFileError(
            f"the folder holds no {_SUFFIX} file", where=str(path), hint="give a .safetensors or its folder"
        )
    missing = "the index names it" if index is not None else "the folder has that name"
    checkpoint = Checkpoint(path, tuple(_shard(path / name, missing) for name in names), index)
    _check_names(checkpoint)
    return checkpoint


def _shard(path: Path, missing: str = "") -> Shard:
    if not path.is_file():
        raise WeightFileError(f"{missing}, and there is no such file", where=str(path))
    file = read_tensor_file(path)
    return Shard(file, read_record(file))


def _read_index(path: Path) -> dict[str, Any] | None:
    try:
        index: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise WeightFileError(f"the index cannot be read: {error}", where=str(path)) from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise WeightFileError("the index has no weight_map from tensor names to file names", where=str(path))
    return index


def _names_in(index: dict[str, Any], folder: Path) -> list[str]:
    names = list(dict.fromkeys(index["weight_map"].values()))
    for name in names:
        # A file name with a path in it could reach outside of the folder.
        if Path(name).name != name or not name.endswith(_SUFFIX):
            raise WeightFileError(
                f"the index names {name!r}, which is no file of its folder", where=str(folder / INDEX_FILE)
            )
    return names


def _check_names(checkpoint: Checkpoint) -> None:
    """Each tensor is in one file, and in the one that the index says."""
    found: dict[str, str] = {}
    for shard, tensor in checkpoint.tensors():
        if tensor.name in found:
            raise WeightFileError(
                f"{tensor.name} is in {found[tensor.name]} and in {shard.name}", where=str(checkpoint.path)
            )
        found[tensor.name] = shard.name
    if checkpoint.index is None:
        return
    expected = checkpoint.index["weight_map"]
    for name in sorted(set(expected) ^ set(found)):
        place = f"names {name}, which no shard holds" if name in expected else f"does not name {name}"
        raise WeightFileError(f"the index {place}", where=str(checkpoint.path / INDEX_FILE))
    for name, file in found.items():
        if expected[name] != file:
            raise WeightFileError(
                f"the index has {name} in {expected[name]}, it is in {file}", where=str(checkpoint.path)
            )
