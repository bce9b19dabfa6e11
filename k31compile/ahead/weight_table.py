"""The weights of an artefact: by reference to the checkpoint that they came from, the others written beside it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from k31compile.cache.artefact.tensors import extent
from k31compile.cache.artefact.weight_files import relative_places
from k31compile.errors import ArtefactError, StoreError
from k31compile.store import sha256_of
from k31compile.weights.checkpoint import open_checkpoint
from k31compile.weights.record import ND

SOURCE = "weights_source"
"""The attribute of a model that names the folder its weights were loaded from."""


_MARK, _MARK_SAYS = "k31compile", "weights of an artefact"
"""In the metadata of every file of weights that is written here."""


@dataclass
class WeightTable:
    """Names of tensors, and in which file each is: what the manifest has, and where the files lie."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    written: set[str] = field(default_factory=set)
    _names: dict[int, str] = field(default_factory=dict)

    def add(self, name: str, tensor: torch.Tensor, entry: str, is_written: bool) -> str:
        """Take a tensor in and return its name: its own, unless another model of the list has that."""
        known = self._names.get(id(tensor))
        if known is None:
            known = name if name not in self.tensors else f"{entry}/{name}"
            self._names[id(tensor)] = known
            self.tensors[known] = tensor
        if is_written:
            self.written.add(known)
        return known

    def file_them(self, sources: Iterable[Path], chosen: Path | None, beside: Path) -> Filed:
        """Find each tensor in a checkpoint, and write what is in none of them into one file.

        `sources` are tried as they are; what `chosen` has under the name of a tensor must be that tensor.

        Raises:
            ArtefactError: it is not, a tensor has no values, or shares memory with one that is updated; or the file to
                be written is somebody else's.
            StoreError: it cannot be written.
        """
        filed = Filed()
        self._check_values()
        self._check_apart()
        left = dict(self.tensors)
        for place in [*([chosen] if chosen is not None else []), *sources]:
            for name, path, shown in _same_in(place, left, must=place == chosen):
                filed.put(name, path, shown, left.pop(name), name in self.written)
        if left:
            _write(left, beside)
            for name, tensor in left.items():
                filed.put(name, beside, name, tensor, name in self.written)
        filed.own = len(left)
        return filed

    def _check_values(self) -> None:
        for name, tensor in self.tensors.items():
            if tensor.device.type != "cpu":
                raise ArtefactError(f"the weight {name} is on {tensor.device}", hint="load the model onto the CPU")
            if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
                raise ArtefactError(f"the weight {name} is a {type(tensor).__name__}, not a plain tensor")

    def _check_apart(self) -> None:
        """Raise where an update of one tensor would be seen in another: in the files each has memory of its own."""
        spans = sorted((*extent(tensor), name) for name, tensor in self.tensors.items())
        furthest: dict[bool, tuple[int, str]] = {True: (-1, ""), False: (-1, "")}  # written -> (end, name)
        for begin, end, name in spans:
            is_written = name in self.written
            for other_written, (other_end, other) in furthest.items():
                if begin < min(end, other_end) and (is_written or other_written):
                    what = f"{other} and {name} share memory and a call updates it"
                    raise ArtefactError(
                        what, hint="keep one of them in the model, and make the other from it in forward"
                    )
            if end > furthest[is_written][0]:
                furthest[is_written] = (end, name)


@dataclass
class Filed:
    """Files of weights, and the tensors in them as the manifest has them."""

    files: list[Path] = field(default_factory=list)
    tensors: dict[str, dict[str, Any]] = field(default_factory=dict)
    own: int = 0

    def put(self, name: str, path: Path, shown: str, tensor: torch.Tensor, written: bool) -> None:
        """Note that a tensor is in a file under a name."""
        if path not in self.files:
            self.files.append(path)
        self.tensors[name] = {
            "file": self.files.index(path),
            "name": shown,
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "strides": list(tensor.stride()),
            "written": written,
        }

    def to_data(self) -> list[dict[str, Any]]:
        """The files by name, size and hash."""
        return [{"file": path.name, "bytes": path.stat().st_size, "sha256": sha256_of(path)} for path in self.files]

    def places(self, artefact: Path) -> dict[str, list[str]]:
        """Where they lie now."""
        return {path.name: relative_places(path, artefact) for path in self.files}


def _same_in(place: Path, wanted: dict[str, torch.Tensor], must: bool) -> Iterator[tuple[str, Path, str]]:
    """Name, file and name in the file of each tensor that a checkpoint has, the same in the model's dtype."""
    found = []
    for shard, stored in open_checkpoint(place).tensors():
        tensor = wanted.get(stored.name)
        if tensor is None or shard.layout_of(stored).layout != ND:
            continue
        with safe_open(shard.file.path, framework="pt") as opened:
            if _same(opened.get_tensor(stored.name), tensor):
                found.append((stored.name, shard.file.path, stored.name))
            elif must:
                raise ArtefactError(
                    f"{stored.name} there is not the {stored.name} of the model",
                    str(shard.file.path),
                    hint="load the model from these weights, or leave --weights out",
                )
    yield from found


def _same(stored: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether a stored tensor, in the dtype of the model, is the model's bit by bit."""
    if stored.shape != tensor.shape or stored.is_floating_point() != tensor.is_floating_point():
        return False
    both = [value.detach().contiguous().reshape(-1).view(torch.uint8) for value in (stored.to(tensor.dtype), tensor)]
    return torch.equal(*both)


def refuse_foreign(path: Path) -> None:
    """Raise where a file of weights would be written over one that no artefact has brought: somebody's checkpoint.

    Raises:
        ArtefactError: there is a file of this name without our mark.
    """
    if not path.exists():
        return
    try:
        with safe_open(path, framework="pt") as opened:
            metadata = opened.metadata() or {}
    except (OSError, SafetensorError):
        metadata = {}
    if metadata.get(_MARK) != _MARK_SAYS:
        hint = f"give -o another name, or refer to it with --weights {path}, or move it away"
        raise ArtefactError("the weights of the artefact would be written over this file", str(path), hint=hint)


def _write(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write tensors row by row; a file that holds just these stays as it is, since an artefact may refer to it."""
    refuse_foreign(path)
    own = {name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}
    partial = path.with_name(f".{path.name}.partial")
    try:
        save_file(own, partial, {_MARK: _MARK_SAYS})
        if not path.is_file() or sha256_of(path) != sha256_of(partial):
            partial.chmod(0o644)
            partial.replace(path)
    except (OSError, SafetensorError) as error:
        raise StoreError(f"the weights cannot be written: {error}", str(path), hint="give -o another folder") from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
