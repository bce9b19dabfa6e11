"""Loading: the record of a file is checked against the model, blocks become the original tensor, bit for bit."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from k31compile.errors import WeightFileError
from k31compile.targets.ascend.cast_weights import cast_weights
from k31compile.weights.blocks import ITEM_SIZES, matrices_of, stored_shape
from k31compile.weights.checkpoint import Shard, open_checkpoint
from k31compile.weights.record import NZ
from k31compile.weights.tensor_file import StoredTensor

_TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "BOOL": torch.bool,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64, "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64,
}  # fmt: skip
_SHOWN = 5
_OVERLAPS = 1
"""What torch answers where two elements of a tensor are one place in memory."""


@dataclass(frozen=True)
class _Stored:
    shard: Shard
    tensor: StoredTensor

    @property
    def is_nz(self) -> bool:
        return self.shard.layout_of(self.tensor).layout == NZ


def load(path: str | Path, model: nn.Module, cast: Callable[[Tensor, int], Tensor] | None = None) -> list[str]:
    """Copy the weights of a file or folder into a model, and return the names that are in blocks on an Ascend device.

    Parameters keep their identity and `state_dict()` holds plain tensors, those of the unconverted checkpoint bit for
    bit, whatever the file's layout. Where the model is on an NPU, each weight that the file records as "nz" is cast
    once (`torch_npu.npu_format_cast`, format 29); `cast` takes the place of that function. Everything is checked
    before the first value is copied.

    Raises:
        WeightFileError: a file is damaged, or its names, shapes, dtypes or recorded layouts do not fit the model.
        MissingDependencyError: the model is on an NPU, and torch_npu is not installed.
    """
    stored = {tensor.name: _Stored(shard, tensor) for shard, tensor in open_checkpoint(Path(path)).tensors()}
    targets = dict(model.state_dict(keep_vars=True))
    problems = [*_name_problems(stored, targets), *_problems(stored, targets)] or list(_tie_problems(stored, targets))
    if problems:
        more = f" (and {len(problems) - _SHOWN} more)" if len(problems) > _SHOWN else ""
        raise WeightFileError("; ".join(problems[:_SHOWN]) + more + "; nothing was loaded", where=str(path))
    filled: set[int] = set()
    with torch.no_grad():
        for name, entry in stored.items():
            if id(targets[name]) not in filled:
                targets[name].copy_(_plain(entry))
                filled.add(id(targets[name]))
    blocks = [name for name, entry in stored.items() if entry.is_nz]
    on_device = [name for name in blocks if cast is not None or targets[name].device.type == "npu"]
    cast_weights({name: targets[name] for name in on_device}, cast)
    return on_device


def _name_problems(stored: dict[str, _Stored], targets: dict[str, Tensor]) -> Iterable[str]:
    found = {id(targets[name]) for name in stored if name in targets}
    for name, target in targets.items():
        if name not in stored and id(target) not in found:
            yield f"the model needs {name}, and there is none"
    for name in stored:
        if name not in targets:
            yield f"the model has no {name}"


def _problems(stored: dict[str, _Stored], targets: Mapping[str, object]) -> Iterable[str]:
    for name, entry in stored.items():
        if name not in targets:
            continue
        record, target = entry.shard.layout_of(entry.tensor), targets[name]
        dtype = _TYPES.get(record.dtype)
        if not isinstance(target, Tensor):
            yield f"{name} of the model is no tensor"
        elif target.is_inference() and not torch.is_inference_mode_enabled():
            yield f"{name} of the model was made in inference mode; call load inside of torch.inference_mode()"
        elif torch._debug_has_internal_overlap(target) == _OVERLAPS:
            yield f"{name} of the model is an expanded tensor, whose elements share memory; give it one of its own"
        elif target.device.type == "meta":
            yield f"{name} of the model is on the meta device; use model.to_empty first"
        elif dtype is None or not _may_become(dtype, target.dtype):
            yield f"{name} is {record.dtype}, the model has {str(target.dtype).removeprefix('torch.')}"
        elif record.shape != tuple(target.shape):
            yield _wrong_shape(name, entry, tuple(target.shape))


def _may_become(found: torch.dtype, wanted: torch.dtype) -> bool:
    return found == wanted or (found.is_floating_point and wanted.is_floating_point and found.itemsize > 1)


def _wrong_shape(name: str, entry: _Stored, wanted: tuple[int, ...]) -> str:
    record = entry.shard.layout_of(entry.tensor)
    said = f"{name} is {list(record.shape)}, the model has {list(wanted)}"
    lost = entry.shard.record is None and record.dtype in ITEM_SIZES and len(wanted) >= 2
    if lost and stored_shape(wanted, record.dtype) == record.shape:
        return f"{said}: that is the shape of its blocks, and the file's record of layouts is gone"
    return said


def _tie_problems(stored: dict[str, _Stored], targets: dict[str, Tensor]) -> Iterable[str]:
    """Two names of one parameter may both be in the file, with the same values."""
    first: dict[int, str] = {}
    for name, entry in stored.items():
        other = first.setdefault(id(targets[name]), name)
        if other != name and not _same(_plain(entry), _plain(stored[other])):
            yield f"{other} and {name} are one parameter of the model and two different tensors here"


def _same(left: Tensor, right: Tensor) -> bool:
    both = [value.contiguous().reshape(-1).view(torch.uint8) for value in (left, right)]
    return left.dtype == right.dtype and torch.equal(*both)


def _plain(entry: _Stored) -> Tensor:
    """A tensor of the file as it was before any conversion."""
    record, file = entry.shard.layout_of(entry.tensor), entry.shard.file
    dtype = _TYPES[record.dtype]
    if 0 in record.shape:
        return torch.empty(record.shape, dtype=dtype)
    if not entry.is_nz:
        return torch.frombuffer(file.read(entry.tensor), dtype=dtype).view(record.shape)
    data = bytearray().join(matrices_of(file, entry.tensor, record.shape))
    return torch.frombuffer(data, dtype=dtype).view(record.shape)
