"""Writes into a cache, or into any view of one, as one scatter in place on the cache itself: GE has no views.

What a view is in torch is a copy in a GE graph: an `Assign` to a slice writes into that copy, and the cache stays as it
was. A scatter names places of the cache, whatever part of it in whatever order the model's line had before it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from k31compile.errors import TargetError
from k31compile.graph.source import source_line
from k31compile.passes.schedule.graph_tasks import written_by
from k31compile.targets.ascend.decompositions import coordinates_along


def write_rows(base: Tensor, written: Tensor, indices: Sequence[Any], values: Tensor) -> Tensor | None:
    """An `index_put_` into a view of a cache [.., rest] as a scatter; returns the cache, None where it is none.

    Whole leading dimensions may stand before the indices. A mask, which uint8 is too, names no places.
    """
    while len(indices) > 1 and indices[-1] is None:
        indices = indices[:-1]
    whole = next((i for i, index in enumerate(indices) if index is not None), len(indices))
    named = indices[whole:]
    if not named or any(index is None or index.dtype not in (torch.int32, torch.int64) for index in named):
        return None
    named = torch.broadcast_tensors(*named)
    columns = list(named)
    if whole:
        # Each position of the leading dimensions with each place that the indices name.
        columns = _with_leading(written.shape[:whole], named)
    values = values.expand(*columns[0].shape, *written.shape[len(columns) :])
    return _write(base, written, columns, values)


def write_along(base: Tensor, written: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor | None:
    """An `index_copy_` along one dimension of a view of a cache as a scatter; None where it is none."""
    dim %= written.dim()
    columns = list(coordinates_along(written.shape[:dim], index).unbind(1))
    return _write(base, written, columns, source.reshape(columns[0].numel(), *written.shape[dim + 1 :]))


def write_part(base: Tensor, written: Tensor, source: Tensor) -> Tensor | None:
    """A `copy_` into a view of a cache as a scatter; None where it is none."""
    if written.numel() == 0:
        return base
    source = source.expand(written.shape)
    if is_all_of(written, base) and base.dim() > 0:
        # Row by row: a copy into an input is there only when a GE graph ends, behind other writes to it.
        places = torch.arange(base.shape[0], device=base.device)[:, None]
        whole: Tensor = torch.ops.npu.npu_scatter_nd_update_(base, places, source.reshape(base.shape).to(base.dtype))
        return whole
    return _write(base, written, [], source)


def refuse_writes_into_views(graph: fx.Graph) -> None:
    """Check that all that is written in place are inputs: in GE a write into a view of one would be lost.

    Raises:
        TargetError: something else is.
    """
    for node in graph.nodes:
        for written in written_by(node):
            target = written
            while list(written_by(target)):
                target = next(iter(written_by(target)))
            if target.op != "placeholder":
                raise TargetError(
                    f"{node.target} writes into a part of a tensor that GE cannot write into",
                    source_line(node),
                    "let the cache be contiguous, or compile for npugraph_ex, where views are views",
                )


def _with_leading(sizes: Sequence[int], named: Sequence[Tensor]) -> list[Tensor]:
    """Columns of the shape [*sizes, *places]: positions of leading dimensions, then what the indices name."""
    places = named[0].shape
    whole = [*sizes, *places]
    axes = [
        torch.arange(size, device=named[0].device).view([-1 if one == i else 1 for one in range(len(whole))])
        for i, size in enumerate(sizes)
    ]
    return [axis.expand(whole) for axis in (*axes, *named)]


def _write(base: Tensor, view: Tensor, columns: list[Tensor], values: Tensor) -> Tensor | None:
    """Scatter values [*places, rest of the view] to what the columns, one for each first dimension, name in a view."""
    places = _places_in(base, view, columns) if columns else None
    if places is None:
        found = _places_of_part(base, view, columns)
        if found is None:
            return None
        places = found
    rows = values.reshape(places.shape[0], *base.shape[places.shape[1] :])
    written: Tensor = torch.ops.npu.npu_scatter_nd_update_(base, places, rows.to(base.dtype))
    return written


def _places_in(base: Tensor, view: Tensor, columns: Sequence[Tensor]) -> Tensor | None:
    """[N, dims]: where in a cache the places lie that are named by the first dimensions of a view of it.

    None where the view is not the whole cache in its order, or a place in it is no row of the cache.
    """
    count, size = len(columns), view.shape
    dims = base.dim() - len(size) + count
    if dims < 1 or base.shape[dims:] != size[count:] or not is_all_of(view, base):
        return None
    if count == 1:
        return unravel(columns[0].reshape(-1), base.shape[:dims])
    counted = [torch.remainder(column.reshape(-1), size[i]) for i, column in enumerate(columns)]
    if size == base.shape:
        return torch.stack(counted, dim=1)
    flat = counted[0]
    for i, column in enumerate(counted[1:], start=1):
        flat = flat * size[i] + column
    return unravel(flat, base.shape[:dims])


def _places_of_part(base: Tensor, view: Tensor, columns: Sequence[Tensor]) -> Tensor | None:
    """[N, dims]: the same for a part of a cache, or one in another order; None where the cache has gaps itself.

    A place's address is the view's offset and its steps times the view's strides; what the view has in common with the
    end of the cache is one row.
    """
    if not base.is_contiguous() or base.dim() == 0:
        return None
    count, strides = len(columns), view.stride()
    start = view.storage_offset() - base.storage_offset()
    common = _common_end(base, view, min(view.dim() - count, base.dim() - 1))
    while common and any(
        step % math.prod(base.shape[base.dim() - common :]) for step in (start, *_moving(view, common))
    ):
        common -= 1
    unit = math.prod(base.shape[base.dim() - common :])
    lead = view.shape[: view.dim() - common]
    places = list(columns[0].shape) if columns else []
    grid = [*places, *lead[count:]]
    address: Any = start // unit
    for i, size in enumerate(lead):
        if i < count:
            column = torch.remainder(columns[i], size).reshape(places + [1] * (len(grid) - len(places)))
        else:
            axis = len(places) + i - count
            column = torch.arange(size, device=base.device).view([-1 if one == axis else 1 for one in range(len(grid))])
        address = column * (strides[i] // unit) + address
    if not isinstance(address, Tensor):
        address = torch.full((1,), address, dtype=torch.int64, device=base.device)
    return unravel(address.expand(grid or [1]).reshape(-1), base.shape[: base.dim() - common])


def _common_end(base: Tensor, view: Tensor, most: int) -> int:
    """How many last dimensions two tensors have in common, sizes and strides."""
    common = 0
    while common < most:
        at = -1 - common
        if base.shape[at] != view.shape[at] or (base.shape[at] > 1 and base.stride(at) != view.stride(at)):
            break
        common += 1
    return common


def _moving(view: Tensor, common: int) -> list[int]:
    """The strides of the first dimensions along which there is anywhere to go."""
    lead = view.dim() - common
    return [view.stride(i) for i in range(lead) if view.shape[i] > 1]


def is_all_of(view: Tensor, base: Tensor) -> bool:
    """Whether a view is all of its base in the same order: no part of it, and nothing transposed."""
    same = view.shape == base.shape and view.stride() == base.stride()
    return view.numel() == base.numel() and (same or (view.is_contiguous() and base.is_contiguous()))


def unravel(flat: Tensor, shape: Sequence[int]) -> Tensor:
    """[N, len(shape)]: the coordinates of flat positions; one below 0 counts from the end, as an index does."""
    flat = torch.remainder(flat, math.prod(shape))
    columns = []
    for size in reversed(shape[1:]):
        columns.append(torch.remainder(flat, size))
        flat = torch.div(flat, size, rounding_mode="floor")
    return torch.stack([flat, *reversed(columns)], dim=1)
