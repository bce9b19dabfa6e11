"""Values put where indices or a mask say, as one scatter or one choice: GE converts `scatter` and `where` alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_PLACES = (torch.int32, torch.int64)


def index_put(x: Tensor, indices: Sequence[Any], values: Tensor, accumulate: bool = False) -> Any:
    """`x.index_put(indices, values, accumulate)` as a new tensor; NotImplemented for masks beside other indices."""
    named = [dim for dim, index in enumerate(indices) if index is not None]
    if not named:
        return NotImplemented
    if any(indices[dim].dtype not in _PLACES for dim in named):
        return NotImplemented if len(named) > 1 else _put_by_mask(x, indices[named[0]], named[0], values, accumulate)
    found = torch.broadcast_tensors(*(indices[dim].to(torch.int64) for dim in named))
    rest = [dim for dim in range(x.dim()) if dim not in named]
    order = [*named, *rest]
    width = math.prod(x.shape[dim] for dim in rest)
    flat = torch.zeros_like(found[0])
    for dim, index in zip(named, found, strict=True):
        flat = flat * x.shape[dim] + torch.remainder(index, x.shape[dim])
    moved = x.permute(order)
    cells = moved.reshape(math.prod(x.shape[dim] for dim in named), width)
    rows = _places_first(x, values, named, rest, found[0].shape).reshape(flat.numel(), width)
    at = flat.reshape(-1, 1).expand(rows.shape)
    put = cells.scatter_add(0, at, rows) if accumulate else cells.scatter(0, at, rows)
    return put.reshape(moved.shape).permute(sorted(range(x.dim()), key=order.__getitem__)).contiguous()


def masked_scatter(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """`x.masked_scatter(mask, source)`: the first elements of a source, one for each that the mask names."""
    shape = torch.broadcast_shapes(x.shape, mask.shape)
    mask = mask.expand(shape)
    return torch.where(mask, _in_order(mask, source.reshape(-1), 0), x)


def _places_first(x: Tensor, values: Tensor, named: list[int], rest: list[int], places: Sequence[int]) -> Tensor:
    """Values [*places, *rest of x]: an index expression has its places first, or where its neighbouring indices are."""
    is_together = named == list(range(named[0], named[-1] + 1))
    lead = named[0] if is_together else 0
    whole = [*(x.shape[dim] for dim in rest[:lead]), *places, *(x.shape[dim] for dim in rest[lead:])]
    return values.expand(whole).movedim(list(range(lead, lead + len(places))), list(range(len(places))))


def _put_by_mask(x: Tensor, mask: Tensor, first: int, values: Tensor, accumulate: bool) -> Tensor:
    """Where a mask over the dimensions of x from `first` on is set: one value for all, or the next in its order."""
    mask = mask.to(torch.bool)
    behind = x.dim() - first - mask.dim()
    spread = mask.reshape(*mask.shape, *[1] * behind)
    axis = values.dim() - behind - 1
    if axis >= 0:
        if values.shape[axis] == 1:
            values = values.reshape(*values.shape[:axis], *[1] * mask.dim(), *values.shape[axis + 1 :])
        else:
            values = _in_order(mask, values, axis)
    return torch.where(spread, x + values if accumulate else values.to(x.dtype), x)


def _in_order(mask: Tensor, values: Tensor, axis: int) -> Tensor:
    """[.., *mask's shape, ..]: along one dimension of values, the first for the first place that is set, and so on."""
    if values.shape[axis] == 0:
        # Nothing is set, or eager would refuse the call.
        shape = [*values.shape[:axis], *mask.shape, *values.shape[axis + 1 :]]
        return values.new_zeros(shape)
    place = torch.cumsum(mask.reshape(-1).to(torch.int64), 0) - 1
    taken = values.index_select(axis, place.clamp(0, values.shape[axis] - 1))
    return taken.reshape(*values.shape[:axis], *mask.shape, *values.shape[axis + 1 :])
