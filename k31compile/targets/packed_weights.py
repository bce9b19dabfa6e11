"""Copies of weights in the order in which oneDNN reads them, made once outside of every graph.

A copy belongs to memory, place, shape and version of its parameter: whatever changes the values in a way that torch
counts makes a new one. Writes that torch does not count (`.data.copy_`, numpy) are seen where they change one of some
80 elements that are looked at on each call.
"""

import functools
import threading
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

_SAMPLES = 8

_Place = tuple[int, Any, tuple[int, ...], tuple[int, ...], torch.dtype, bool]


class _Packed(NamedTuple):
    storage: StorageWeakRef
    pointer: int
    version: int
    sample: Tensor
    matrix: Tensor


class PackedWeights:
    """A table of packed copies; an entry goes when the memory of its weight is gone and another one is made."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[_Place, _Packed] = {}
        self.made = 0
        """How many copies were made since the process began."""

    def matrix(self, weight: Tensor, transposed: bool) -> Tensor | None:
        """The copy of a weight [N, K], or [K, N] if `transposed`; None for one whose changes torch does not count."""
        if weight.is_inference():
            return None
        storage = weight.untyped_storage()
        place = (
            storage._cdata,
            weight.storage_offset(),
            tuple(weight.shape),
            weight.stride(),
            weight.dtype,
            transposed,
        )
        with self._lock:
            entry = self._entries.get(place)
            if entry is None or not _is_current(entry, weight):
                self._drop_gone()
                matrix = pack(weight.t() if transposed else weight)
                sample = _sample(weight).clone()
                entry = _Packed(StorageWeakRef(storage), weight.data_ptr(), weight._version, sample, matrix)
                self._entries[place] = entry
                self.made += 1
            return entry.matrix

    def nbytes(self) -> int:
        """Bytes of all copies of weights that are still there."""
        with self._lock:
            self._drop_gone()
            return sum(int(torch.ops.mkldnn._nbytes(entry.matrix)) for entry in self._entries.values())

    def clear(self) -> None:
        """Forget all copies; the next call of each product makes its own again."""
        with self._lock:
            self._entries.clear()

    def _drop_gone(self) -> None:
        for place in [place for place, entry in self._entries.items() if entry.storage.expired()]:
            del self._entries[place]


def _is_current(entry: _Packed, weight: Tensor) -> bool:
    return (
        not entry.storage.expired()
        and entry.pointer == weight.data_ptr()
        and entry.version == weight._version
        and torch.equal(entry.sample, _sample(weight))
    )


def _sample(weight: Tensor) -> Tensor:
    rows, columns = (max(1, side // _SAMPLES) for side in weight.shape)
    return weight.detach()[::rows, ::columns]


def pack(weight: Tensor) -> Tensor:
    """A weight [N, K] in oneDNN's own order, in the dtype in which it multiplies here."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach().to(packed_dtype(weight.dtype)))  # type: ignore[no-any-return]


@functools.cache
def packed_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a packed copy: the weight's own where oneDNN multiplies in it on this machine, else float32."""
    if dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return dtype
    if dtype == torch.float16 and torch.ops.mkldnn._is_mkldnn_fp16_supported():
        return dtype
    return torch.float32


PACKED = PackedWeights()
"""The table of this process."""
