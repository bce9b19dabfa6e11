"""ATen operators that torchair does not convert, in terms of those that it does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from k31compile.targets.ascend.lowerings.delta_rule import softplus
from k31compile.targets.ascend.own_operators import register_converters
from k31compile.targets.ascend.plain_formulas import OURS as PLAIN
from k31compile.targets.ascend.plain_formulas import TORCHS

ATEN = torch.ops.aten
MOST_SHIFTS = 16
"""A running product or sum is written out for up to 2^16 elements."""


def decomposition_table() -> dict[Any, Callable[..., Any]]:
    """Operator -> its formula: some of torch's, torchair's own table, then ours."""
    from torch._decomp import get_decompositions
    from torchair.configs.compiler_config import CompilerConfig
    from torchair.npu_fx_compiler import _get_merged_decompositions

    register_converters()
    taken = get_decompositions([ATEN._scaled_dot_product_flash_attention_for_cpu, *TORCHS])
    return {**taken, **_get_merged_decompositions(CompilerConfig()), **OURS}


def _softplus(x: Tensor, beta: float = 1, threshold: float = 20) -> Tensor:
    scaled = x * beta
    return torch.where(scaled > threshold, x, softplus(scaled) / beta)


def _amax(x: Tensor, dim: Any = (), keepdim: bool = False) -> Tensor:
    dims = list(dim) if isinstance(dim, list | tuple) else [dim]
    for one in sorted((d % x.dim() for d in dims or range(x.dim())), reverse=True):
        x = x.max(one, keepdim=keepdim).values
    return x


def _amin(x: Tensor, dim: Any = (), keepdim: bool = False) -> Any:
    if not x.dtype.is_signed:
        return NotImplemented
    if not x.dtype.is_floating_point:
        # -1 - x turns the order around without leaving the type's range, as -x of its least value would.
        return -1 - _amax(-1 - x, dim, keepdim)
    return -_amax(-x, dim, keepdim)


def _exp2(x: Tensor) -> Tensor:
    return torch.exp(x * 0.6931471805599453)


def _add_in_place(x: Tensor, other: Any, alpha: Any = 1) -> Tensor:
    return x.copy_(x + other * alpha)


def _roll(x: Tensor, shifts: Any, dims: Any = ()) -> Tensor:
    if not dims:
        return _roll(x.reshape(-1), shifts, [0]).view(x.shape)
    rolled = x
    for shift, dim in zip(shifts, dims, strict=True):
        size = x.shape[dim]
        cut = -shift % size if size else 0
        if cut:
            rolled = torch.cat((rolled.narrow(dim, cut, size - cut), rolled.narrow(dim, 0, cut)), dim=dim)
    # Whole turns move nothing, and still the result is memory of its own: x may be a cache that is written later.
    return x.clone() if rolled is x else rolled


def _eye(rows: int, columns: Any = None, **options: Any) -> Tensor:
    device, dtype = options.get("device"), options.get("dtype") or torch.get_default_dtype()
    row = torch.arange(rows, device=device)[:, None]
    return (row == torch.arange(rows if columns is None else columns, device=device)).to(dtype)


def _index_copy(x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    return x.scatter(dim, _spread(index, dim, source), source)


def coordinates_along(shape: Sequence[int], index: Tensor) -> Tensor:
    """[N, len(shape) + 1]: each position of leading dimensions with each of an index along the next one."""
    axes = [torch.arange(size, device=index.device) for size in shape] + [index.to(torch.int64)]
    views = [axis.view([-1 if i == own else 1 for i in range(len(axes))]) for own, axis in enumerate(axes)]
    whole = [*shape, index.numel()]
    return torch.stack([view.expand(whole).reshape(-1) for view in views], dim=1)


def _spread(index: Tensor, dim: int, source: Tensor) -> Tensor:
    """An index along one dimension as `scatter` wants it: the shape of what is written."""
    shape = [1] * source.dim()
    shape[dim] = index.numel()
    return index.to(torch.int64).view(shape).expand(source.shape)


def _cumprod(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
    return _running(x if dtype is None else x.to(dtype), dim, 1.0, torch.mul)


def _logcumsumexp(x: Tensor, dim: int) -> Any:
    return _running(x, dim, -torch.inf, _log_add)


def _log_add(one: Tensor, other: Tensor) -> Tensor:
    """log(exp(one) + exp(other)), and -inf where both are."""
    top = torch.maximum(one, other)
    base = torch.where(top == -torch.inf, torch.zeros_like(top), top)
    return base + torch.log(torch.exp(one - base) + torch.exp(other - base))


def _running(x: Tensor, dim: int, neutral: float, join: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """Each element joined with all before it, in as many steps as the length has bits."""
    if x.dim() == 0 or x.shape[dim] > 1 << MOST_SHIFTS or not x.is_floating_point():
        return NotImplemented
    reach, size = 1, x.shape[dim]
    result = x.clone()
    while reach < size:
        before = torch.full_like(result.narrow(dim, 0, reach), neutral)
        shifted = torch.cat((before, result.narrow(dim, 0, size - reach)), dim=dim)
        result = join(result, shifted)
        reach *= 2
    return result


def _histc(x: Tensor, bins: int = 100, min: Any = 0, max: Any = 0) -> Any:
    if not min < max:
        return NotImplemented  # the data's own limits
    place = torch.floor((x - min) * (bins / (max - min))).clamp(0, bins - 1).to(torch.int64)
    inside = (x >= min) & (x <= max)
    hit = (place.reshape(-1, 1) == torch.arange(bins, device=x.device)) & inside.reshape(-1, 1)
    return hit.to(x.dtype).sum(0)


def _stable_sort(x: Tensor, *, stable: bool | None = None, dim: int = -1, descending: bool = False) -> Any:
    """Integers with their positions below them, so that no two are equal; other values have no such order."""
    if x.is_floating_point() or x.dim() == 0 or x.dtype == torch.bool:
        return NotImplemented if stable else ATEN.sort.default(x, dim, descending)
    dim %= x.dim()
    wide = x.to(torch.int64)
    if x.dtype != torch.int64:
        order = _order(wide, dim, descending)
        return x.gather(dim, order), order
    # With a position below it a number may have 32 bits: the lower half is sorted, and then, stably, the upper one.
    upper = torch.div(wide, 1 << 32, rounding_mode="floor")
    order = _order(wide - upper * (1 << 32), dim, descending)
    order = order.gather(dim, _order(upper.gather(dim, order), dim, descending))
    return x.gather(dim, order), order


def _order(x: Tensor, dim: int, descending: bool) -> Tensor:
    """The stable order of int64 numbers of at most 33 bits."""
    size = x.shape[dim]
    place = torch.arange(size, device=x.device).view([-1 if one == dim else 1 for one in range(x.dim())])
    ranked = ((-x if descending else x) * size + place).sort(dim=dim).values
    return torch.remainder(ranked, size)


OURS: dict[Any, Callable[..., Any]] = {
    ATEN.softplus.default: _softplus,
    ATEN.amax.default: _amax,
    ATEN.amin.default: _amin,
    ATEN.exp2.default: _exp2,
    ATEN.add_.Scalar: _add_in_place,
    ATEN.add_.Tensor: _add_in_place,
    ATEN.roll.default: _roll,
    ATEN.eye.default: _eye,
    ATEN.eye.m: _eye,
    ATEN.index_copy.default: _index_copy,
    ATEN.cumprod.default: _cumprod,
    ATEN.logcumsumexp.default: _logcumsumexp,
    ATEN.histc.default: _histc,
    ATEN.sort.stable: _stable_sort,
    **PLAIN,
}
"""Formulas of this module and of `plain_formulas`; each is held to its operator by a test.

One that is not for a call leaves the operator.
"""
