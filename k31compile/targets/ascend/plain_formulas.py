"""Small ATEN operators that torchair lacks, by those that it has, and which of torch's own formulas are taken."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from k31compile.targets.ascend.index_puts import index_put, masked_scatter

ATEN = torch.ops.aten


def _matmul(x: Tensor, y: Tensor) -> Any:
    """A product with a vector on either side: torch's own writes the shape of a result in place."""
    if x.dim() == 1 and y.dim() == 1:
        return _dot(x, y)
    if x.dim() == 1:
        return torch.matmul(x.unsqueeze(0), y).squeeze(-2)
    return torch.matmul(x, y.unsqueeze(1)).squeeze(-1) if y.dim() == 1 and x.dim() == 2 else NotImplemented


def _mv(x: Tensor, y: Tensor) -> Tensor:
    return torch.mm(x, y.unsqueeze(1)).squeeze(1)


def _dot(x: Tensor, y: Tensor) -> Tensor:
    return torch.mm(x.unsqueeze(0), y.unsqueeze(1)).reshape([])


def _addmv(x: Tensor, matrix: Tensor, vector: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    product = _mv(matrix, vector) * alpha
    whole: Tensor = product if beta == 0 else x * beta + product
    return whole


def _addbmm(x: Tensor, left: Tensor, right: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    product = torch.bmm(left, right).sum(0) * alpha
    whole: Tensor = product if beta == 0 else x * beta + product
    return whole


def _all(x: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    other = torch.logical_not(x.to(torch.bool))
    dims = range(x.dim()) if dim is None else dim if isinstance(dim, list | tuple) else [dim]
    for one in sorted((d % max(x.dim(), 1) for d in dims), reverse=True):
        other = other.any(one, keepdim=keepdim) if x.dim() else other
    return torch.logical_not(other)


def _isnan(x: Tensor) -> Tensor:
    return torch.ne(x, x)


def _any(x: Tensor, dim: Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
    return torch.logical_not(_all(torch.logical_not(x.to(torch.bool)), dim, keepdim))


def _xor(x: Tensor, y: Any) -> Tensor:
    if not isinstance(y, Tensor):
        y = torch.full_like(x, y)
    if x.dtype == torch.bool and y.dtype == torch.bool:
        return torch.ne(x, y)
    return torch.bitwise_or(x, y) - torch.bitwise_and(x, y)


def _and_in_place(x: Tensor, y: Tensor) -> Tensor:
    return x.copy_(torch.bitwise_and(x, y))


def _or_in_place(x: Tensor, y: Tensor) -> Tensor:
    return x.copy_(torch.bitwise_or(x, y))


def _shift_left(x: Tensor, bits: Any) -> Any:
    return x * (1 << bits) if _is_shift(x, bits) else NotImplemented


def _shift_right(x: Tensor, bits: Any) -> Any:
    return torch.div(x, 1 << bits, rounding_mode="floor") if _is_shift(x, bits) else NotImplemented


def _is_shift(x: Tensor, bits: Any) -> bool:
    signed = x.dtype in (torch.int8, torch.int16, torch.int32, torch.int64)
    return signed and isinstance(bits, int) and 0 <= bits < 8 * x.element_size() - 1


def _trunc(x: Tensor) -> Any:
    if not x.is_floating_point():
        return x.clone()
    return torch.where(x < 0, torch.ceil(x), torch.floor(x))


def _frac(x: Tensor) -> Tensor:
    rest: Tensor = x - _trunc(x)
    return rest


def _fmod(x: Tensor, y: Any) -> Tensor:
    if not torch.result_type(x, y).is_floating_point:
        left: Tensor = x - torch.div(x, y, rounding_mode="trunc") * y
        return left
    size = torch.abs(y) if isinstance(y, Tensor) else abs(y)
    rest = torch.remainder(torch.abs(x), size)
    return torch.where(x < 0, -rest, rest)


def _nan_to_num(x: Tensor, nan: Any = None, posinf: Any = None, neginf: Any = None) -> Tensor:
    if not x.is_floating_point():
        return x.clone()
    limits = torch.finfo(x.dtype)
    found = torch.where(torch.ne(x, x), torch.full_like(x, nan or 0.0), x)
    found = torch.where(torch.eq(x, torch.inf), torch.full_like(x, limits.max if posinf is None else posinf), found)
    return torch.where(torch.eq(x, -torch.inf), torch.full_like(x, limits.min if neginf is None else neginf), found)


def _prod(x: Tensor, dim: int, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """Halves multiplied with each other until one value is left."""
    x = x.to(dtype or (x.dtype if x.is_floating_point() else torch.int64))
    if x.dim() == 0:
        return x.clone()
    while x.shape[dim] > 1:
        half = x.shape[dim] // 2
        joined = x.narrow(dim, 0, half) * x.narrow(dim, half, half)
        x = torch.cat((joined, x.narrow(dim, 2 * half, 1)), dim) if x.shape[dim] % 2 else joined
    if x.shape[dim] == 0:
        return torch.ones_like(x.sum(dim, keepdim=keepdim))
    return x.clone() if keepdim else x.select(dim, 0).clone()


def _cosine_similarity(x: Tensor, y: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    units = [v / torch.linalg.vector_norm(v, dim=dim, keepdim=True).clamp_min(eps) for v in (x, y)]
    cosine: Tensor = (units[0] * units[1]).sum(dim)
    return cosine


def _min(x: Tensor) -> Any:
    return NotImplemented if not x.dtype.is_signed else _turn(_turn(x).max())


def _min_along(x: Tensor, dim: int, keepdim: bool = False) -> Any:
    if not x.dtype.is_signed:
        return NotImplemented
    values, indices = _turn(x).max(dim, keepdim=keepdim)
    return _turn(values), indices


def _turn(x: Tensor) -> Tensor:
    """The order turned around; -1 - x of an integer stays in its range, as -x of the least would not."""
    return -x if x.dtype.is_floating_point else -1 - x


def _var(x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Tensor:
    return _var_mean(x, dim, correction=correction, keepdim=keepdim)[0]


def _std_mean(x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    wide = _wide(x)
    variance, mean = _var_mean(wide, dim, correction=correction, keepdim=keepdim)
    return torch.sqrt(variance).to(x.dtype), mean.to(x.dtype)


def _var_mean(x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Squares about the mean, in float32 for narrower values, divided by their number less the correction."""
    dims = list(range(x.dim())) if not dim else [d % x.dim() for d in dim]
    wide = _wide(x)
    mean = wide.mean(dims, keepdim=True)
    apart = wide - mean
    count = math.prod(x.shape[d] for d in dims)
    left = count - (1 if correction is None else correction)
    total = (apart * apart).sum(dims, keepdim=keepdim)
    # Nothing is left of one value by itself: 0 / 0, as in torch.
    variance = total / left if left > 0 else total / torch.zeros_like(total)
    return variance.to(x.dtype), (mean if keepdim else mean.reshape(variance.shape)).to(x.dtype)


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _index_fill(x: Tensor, dim: int, index: Tensor, value: Any) -> Tensor:
    dim %= x.dim()
    size = x.shape[dim]
    places = torch.remainder(index.reshape(-1, 1), size)
    hit = (places == torch.arange(size, device=x.device)).any(0)
    shape = [size if one == dim else 1 for one in range(x.dim())]
    filled = value.to(x.dtype) if isinstance(value, Tensor) else torch.full_like(x, value)
    return torch.where(hit.view(shape), filled, x)


def _diagonal_places(rows: int, columns: int, offset: int, device: Any) -> Tensor:
    """int64 [N]: where a diagonal lies in a matrix that is written row by row."""
    first = offset if offset >= 0 else -offset * columns
    count = max(min(rows, columns - offset) if offset >= 0 else min(rows + offset, columns), 0)
    return torch.arange(count, device=device) * (columns + 1) + first


def _diagonal(x: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    moved = x.movedim((dim1, dim2), (-2, -1))
    places = _diagonal_places(moved.shape[-2], moved.shape[-1], offset, x.device)
    return moved.flatten(-2).index_select(-1, places)


def _diagonal_scatter(x: Tensor, source: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    moved = x.movedim((dim1, dim2), (-2, -1))
    places = _diagonal_places(moved.shape[-2], moved.shape[-1], offset, x.device)
    put = moved.flatten(-2).scatter(-1, places.expand(source.shape), source)
    return put.view(moved.shape).movedim((-2, -1), (dim1, dim2)).contiguous()


def _diag_embed(x: Tensor, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Tensor:
    size = x.shape[-1] + abs(offset)
    zeros = x.new_zeros((*x.shape[:-1], size, size))
    return _diagonal_scatter(zeros, x, offset, -2, -1).movedim((-2, -1), (dim1, dim2)).contiguous()


def _trace(x: Tensor) -> Tensor:
    return _diagonal(x).sum()


def _bucketize(x: Tensor, limits: Tensor, *, out_int32: bool = False, right: bool = False) -> Tensor:
    return torch.searchsorted(limits, x, out_int32=out_int32, right=right)


def _repeat_interleave(counts: Tensor, *, output_size: int | None = None) -> Any:
    """The positions of a row, each as often as its count says, where the length of the result is known."""
    if output_size is None:
        return NotImplemented
    place = torch.arange(output_size, device=counts.device)
    return torch.searchsorted(counts.cumsum(0), place, right=True).to(counts.dtype)


OURS: dict[Any, Callable[..., Any]] = {
    ATEN.mv.default: _mv,
    ATEN.dot.default: _dot,
    ATEN.addmv.default: _addmv,
    ATEN.addbmm.default: _addbmm,
    ATEN.all.dim: _all,
    ATEN.all.dims: _all,
    ATEN.any.dims: _any,
    ATEN.isnan.default: _isnan,
    ATEN.bitwise_xor.Tensor: _xor,
    ATEN.bitwise_xor.Scalar: _xor,
    ATEN.bitwise_and_.Tensor: _and_in_place,
    ATEN.bitwise_or_.Tensor: _or_in_place,
    ATEN.__lshift__.Scalar: _shift_left,
    ATEN.__rshift__.Scalar: _shift_right,
    ATEN.trunc.default: _trunc,
    ATEN.frac.default: _frac,
    ATEN.fmod.Scalar: _fmod,
    ATEN.fmod.Tensor: _fmod,
    ATEN.nan_to_num.default: _nan_to_num,
    ATEN.prod.dim_int: _prod,
    ATEN.min.default: _min,
    ATEN.min.dim: _min_along,
    ATEN.var.correction: _var,
    ATEN.var_mean.correction: _var_mean,
    ATEN.std_mean.correction: _std_mean,
    ATEN.index_fill.int_Scalar: _index_fill,
    ATEN.index_fill.int_Tensor: _index_fill,
    ATEN.diagonal.default: _diagonal,
    ATEN.diagonal_scatter.default: _diagonal_scatter,
    ATEN.diag_embed.default: _diag_embed,
    ATEN.trace.default: _trace,
    ATEN.bucketize.Tensor: _bucketize,
    ATEN.repeat_interleave.Tensor: _repeat_interleave,
    ATEN.index_put.default: index_put,
    ATEN.masked_scatter.default: masked_scatter,
}
"""Formulas of this module and of `index_puts`; each is held to its operator by a test in float64."""

COMPOSITES: dict[Any, Callable[..., Any]] = {
    ATEN.matmul.default: _matmul,
    ATEN.cosine_similarity.default: _cosine_similarity,
}
"""Operators that torch itself writes by others of which one has no converter."""

TORCHS: Sequence[Any] = (
    ATEN.addr.default, ATEN.celu.default, ATEN.logaddexp.default, ATEN.xlogy.Tensor, ATEN.sinc.default,
    ATEN.heaviside.default, ATEN.smooth_l1_loss.default, ATEN.binary_cross_entropy_with_logits.default,
    ATEN.linalg_cross.default, ATEN.rot90.default, ATEN.upsample_nearest1d.default, ATEN.hardshrink.default,
    ATEN.softshrink.default, ATEN.lerp.Tensor, ATEN.count_nonzero.default,
    ATEN.reflection_pad1d.default, ATEN.pixel_shuffle.default, ATEN.isin.Tensor_Tensor,
)  # fmt: skip
"""Operators that torch's own decompositions write by operators that convert."""
