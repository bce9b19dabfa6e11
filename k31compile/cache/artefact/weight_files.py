"""Weights of an artefact: safetensors files by their hashes, found, verified and mapped into memory."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from k31compile import signatures
from k31compile.errors import ArtefactError, StoreError
from k31compile.store import atomic_write, cache_dir, check_private, sha256_of

_RECORD = "hashes.json"
_KEPT = 1000


def find_files(
    wanted: Sequence[Mapping[str, Any]], artefact: Path, places: Mapping[str, Sequence[str]], given: Path | None
) -> list[Path]:
    """The files with the names, sizes and hashes that an artefact needs.

    `given` is a file or folder of the caller's; else they lie beside the artefact or where they lay at compile.

    Raises:
        ArtefactError: one is missing or is another file.
    """
    hashes, only = Hashes(), len(wanted) == 1
    found = [_find(entry, list(_candidates(entry["file"], artefact, places, given, only)), hashes) for entry in wanted]
    hashes.keep()
    return found


def _find(entry: Mapping[str, Any], candidates: Sequence[Path], hashes: Hashes) -> Path:
    """The first candidate that is there decides: another one could be a copy that nobody means any more."""
    for path in candidates:
        if path.is_file():
            if path.stat().st_size == entry["bytes"] and hashes.of(path) == entry["sha256"]:
                return path
            raise ArtefactError("the weights are not those that it was made with", str(path), hint=_GIVE)
    looked = ", ".join(str(path) for path in dict.fromkeys(candidates))
    raise ArtefactError(f"its weights {entry['file']} are not there; looked at {looked}", hint=_GIVE)


_GIVE = "say where they are with k31compile.load(F, weights=FILE_OR_DIR) or k31 run --weights FILE_OR_DIR"


def _candidates(
    name: str, artefact: Path, places: Mapping[str, Sequence[str]], given: Path | None, only: bool
) -> Iterable[Path]:
    beside = artefact.absolute().parent
    if given is not None:
        chosen = given / name if given.is_dir() else given
        yield chosen
        # A checkpoint has not what was written beside the artefact; what it has is the caller's choice.
        if not only and not (chosen.is_file() and chosen.name == name):
            yield beside / name
        return
    relative, *absolute = places.get(name, [name])
    yield beside / relative
    yield beside / name
    for place in absolute:
        yield beside / place


class Hashes:
    """SHA-256 of files, recorded under a signature with size, time and inode: gigabytes are not read at each start."""

    def __init__(self) -> None:
        self._path = _record_path()
        self._known = _read_record(self._path) if self._path is not None else {}
        self._changed = False

    def of(self, path: Path) -> str:
        """The hash of a file as it is now."""
        path = path.resolve()
        info = path.stat()
        facts = [info.st_size, info.st_mtime_ns, info.st_ino, info.st_dev, info.st_ctime_ns]
        known = self._known.get(str(path))
        if known is not None and known[:-1] == facts:
            return str(known[-1])
        digest = sha256_of(path)
        after = path.stat()
        if [after.st_size, after.st_mtime_ns, after.st_ino, after.st_dev, after.st_ctime_ns] == facts:
            self._known[str(path)] = [*facts, digest]
            self._changed = True
        return digest

    def keep(self) -> None:
        """Write the record where something was added to it; where that cannot be, the next start hashes again."""
        if not self._changed or self._path is None:
            return
        known = dict(list(self._known.items())[-_KEPT:])
        text = json.dumps(known, sort_keys=True).encode()
        try:
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
            atomic_write(self._path, signatures.sign(text, signatures.local_key()).encode() + b"\n" + text)
        except (OSError, StoreError):
            return


def _record_path() -> Path | None:
    try:
        return cache_dir() / "artefacts" / _RECORD
    except StoreError:
        return None


def _read_record(path: Path) -> dict[str, list[Any]]:
    try:
        check_private(path)
        signature, _, text = path.read_bytes().partition(b"\n")
        if signatures.is_signed(text, signature.decode(), signatures.local_key()):
            found: dict[str, list[Any]] = json.loads(text)
            return found
    except (OSError, StoreError, ValueError):
        pass
    return {}


def load_tensors(files: Sequence[Path], tensors: Mapping[str, Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """The tensors of an artefact by name, mapped from their files; what the graphs write to has memory of its own.

    Raises:
        ArtefactError: a file does not hold what its hash says that it holds.
    """
    found: dict[str, torch.Tensor] = {}
    try:
        for number, path in enumerate(files):
            with safe_open(path, framework="pt") as opened:
                for name, entry in tensors.items():
                    if entry["file"] == number:
                        found[name] = _as_it_was(opened.get_tensor(entry["name"]), entry)
    except (OSError, SafetensorError) as error:
        raise ArtefactError(f"its weights cannot be read: {error}", where=str(path)) from error
    return found


def _as_it_was(tensor: torch.Tensor, entry: Mapping[str, Any]) -> torch.Tensor:
    tensor, stride = tensor.to(getattr(torch, entry["dtype"])), tuple(entry["strides"])
    if tensor.stride() != stride:
        return torch.empty_strided(tuple(tensor.shape), stride, dtype=tensor.dtype).copy_(tensor)
    return tensor.clone() if entry["written"] else tensor


def digest_of(tensor: torch.Tensor) -> str:
    """SHA-256 of the bytes of a tensor, row by row."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().data).hexdigest()


def relative_places(path: Path, artefact: Path) -> list[str]:
    """Where a file lies as seen from the artefact, and from anywhere."""
    return [os.path.relpath(path.resolve(), artefact.resolve().parent), str(path.resolve())]
