"""A stored tensor to blocks and back as bytes, one matrix at a time: a stack of experts is never whole in memory.

Bytes are moved and never interpreted: an integer of the element's size stands for it, and any bits survive.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import torch

from k31compile.passes.layout.fractal_nz import from_fractal_nz, nz_shape, to_fractal_nz
from k31compile.weights.tensor_file import StoredTensor, TensorFile

ITEM_SIZES = {"F32": 4, "F16": 2, "BF16": 2, "I8": 1, "U8": 1, "F8_E4M3": 1, "F8_E5M2": 1}
"""The dtypes of safetensors that can be stored in blocks, and the bytes of one element."""

_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def has_blocks(shape: Sequence[int], dtype: str) -> bool:
    """Whether a tensor can be stored in blocks at all: matrices and stacks of them, of some dtypes."""
    return len(shape) >= 2 and dtype in ITEM_SIZES


def stored_shape(shape: Sequence[int], dtype: str) -> tuple[int, ...]:
    """The shape of a tensor in blocks; for the shape itself where no blocks are possible, see `rules`."""
    if not has_blocks(shape, dtype):
        return tuple(shape)
    return nz_shape(shape, _CARRIERS[ITEM_SIZES[dtype]])


def stored_bytes(shape: Sequence[int], dtype: str) -> int:
    """The bytes of a tensor in blocks, with their padding."""
    return math.prod(stored_shape(shape, dtype)) * ITEM_SIZES[dtype]


def blocks_of(file: TensorFile, tensor: StoredTensor) -> Iterator[memoryview]:
    """The bytes of an ND tensor in blocks, matrix by matrix."""
    carrier, shape = _CARRIERS[ITEM_SIZES[tensor.dtype]], tensor.shape[-2:]
    return _each(_matrices(file, tensor, shape, carrier), to_fractal_nz)


def matrices_of(file: TensorFile, tensor: StoredTensor, shape: Sequence[int]) -> Iterator[memoryview]:
    """The bytes of the ND tensor of `shape` that is stored in blocks, matrix by matrix."""
    carrier = _CARRIERS[ITEM_SIZES[tensor.dtype]]
    return _each(
        _matrices(file, tensor, tensor.shape[-4:], carrier), lambda stored: from_fractal_nz(stored, shape[-2:])
    )


def _each(matrices: Iterator[torch.Tensor], change: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[memoryview]:
    """The bytes of each changed matrix; none of it is held on to while the next one is read."""
    for matrix in matrices:
        changed = change(matrix)
        del matrix
        yield _bytes_of(changed)
        del changed


def _matrices(
    file: TensorFile, tensor: StoredTensor, shape: Sequence[int], carrier: torch.dtype
) -> Iterator[torch.Tensor]:
    size = math.prod(shape) * carrier.itemsize
    for at in range(0, tensor.nbytes, size) if size else ():
        yield torch.frombuffer(file.read(tensor, at, size), dtype=carrier).view(*shape)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data
