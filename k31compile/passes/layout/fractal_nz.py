"""Matrices in the order in which an Ascend cube reads them: FRACTAL_NZ, blocks of 16 rows and 32 bytes.

    stored[..., j, i, r, c] = matrix[..., 16 i + r, C j + c],    C = 32 bytes of columns

with zeros where a block reaches beyond the matrix (CANN documentation, data formats).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from k31compile.errors import OperatorError

BLOCK_ROWS = 16
_BLOCK_BYTES = 32


def block_columns(dtype: torch.dtype) -> int:
    """Columns of one block: 16 for two-byte dtypes, 32 for one-byte ones, 8 for float32."""
    return _BLOCK_BYTES // dtype.itemsize


def nz_shape(shape: Sequence[int], dtype: torch.dtype) -> tuple[int, ...]:
    """The shape of a matrix [..., M, N] as it is stored: [..., ceil(N / C), ceil(M / 16), 16, C].

    Raises:
        OperatorError: it has fewer than two dimensions.
    """
    if len(shape) < 2:
        raise OperatorError(f"FRACTAL_NZ stores matrices [..., M, N], not {list(shape)}")
    *batch, rows, columns = shape
    width = block_columns(dtype)
    return (*batch, -(-columns // width), -(-rows // BLOCK_ROWS), BLOCK_ROWS, width)


def to_fractal_nz(matrix: Tensor) -> Tensor:
    """Matrix [..., M, N] -> its blocks, contiguous, in the same dtype; any bits survive.

    Raises:
        OperatorError: it has fewer than two dimensions.
    """
    *batch, blocks_across, blocks_down, _, width = nz_shape(matrix.shape, matrix.dtype)
    filled = (*batch, blocks_down * BLOCK_ROWS, blocks_across * width)
    padded = matrix
    if tuple(matrix.shape) != filled or not matrix.is_contiguous():
        padded = matrix.new_zeros(filled)
        padded[..., : matrix.shape[-2], : matrix.shape[-1]] = matrix
    tiles = padded.view(*batch, blocks_down, BLOCK_ROWS, blocks_across, width)
    return tiles.movedim(-2, -4).contiguous()


def from_fractal_nz(stored: Tensor, shape: Sequence[int]) -> Tensor:
    """Blocks -> the matrix of `shape` that they store, contiguous: the inverse of `to_fractal_nz`.

    Raises:
        OperatorError: they cannot store a matrix of that shape.
    """
    expected = nz_shape(shape, stored.dtype)
    if tuple(stored.shape) != expected:
        raise OperatorError(f"a matrix {list(shape)} is stored as {list(expected)}, not {list(stored.shape)}")
    *batch, blocks_across, blocks_down, _, width = expected
    padded = stored.movedim(-4, -2).reshape(*batch, blocks_down * BLOCK_ROWS, blocks_across * width)
    return padded[..., : shape[-2], : shape[-1]].contiguous()
