"""Which keys a row sees, as a hypothesis that a run keeps or drops (K3.1 spec 2.8).

A row sees a prefix of the keys. How long it is comes from an integer leaf (a position or a length), from the row's
own number, or from both; rows at or beyond a second integer leaf may be padding that sees nothing. A mask may hide
more.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from k31compile.graph.layout import Layout, layouts
from k31compile.graph.portable import portable
from k31compile.graph.sizes import shape_of
from k31compile.passes.recognise.masks import MaskLeaf

_FORCED = 3

ByLeaf = Mapping[fx.Node, torch.Tensor]


@portable
@dataclass(frozen=True)
class Count:
    """An integer leaf and which letters of (batch, row) it has."""

    leaf: fx.Node
    layout: Layout

    @property
    def per_row(self) -> bool:
        """Whether each query row has a value of its own."""
        return self.layout.dims[1] is not None

    def canonical(self, values: ByLeaf) -> torch.Tensor:
        """[B or 1, T or 1], int64."""
        return self.layout.canonical(values[self.leaf]).to(torch.int64)


@portable
@dataclass(frozen=True)
class Visibility:
    """Row i of request b sees `start + slope * i + offset + per_rows * T` keys; `rows` marks where padding begins.

    Without `start`: `right_aligned` puts the last row at the last key (start = S - T), else start is 0.
    """

    start: Count | None
    slope: int
    offset: int
    minus_rows: bool = False
    right_aligned: bool = False
    everything: bool = False
    rows: Count | None = None
    mask: MaskLeaf | None = None

    def visible(self, values: ByLeaf, batch: int, rows: int, keys: int) -> torch.Tensor:
        """The number of visible keys, int64 [B, T]."""
        row = torch.arange(rows)[None, :]
        if self.everything:
            seen = torch.full((batch, rows), keys)
        else:
            base = self.start.canonical(values) if self.start else torch.tensor([[self._constant_start(rows, keys)]])
            seen = base + self.slope * row + self.offset - (rows if self.minus_rows else 0)
        seen = seen.clamp(0, keys).expand(batch, rows)
        if self.rows is not None:
            seen = torch.where(row < self.rows.canonical(values), seen, 0)
        return seen

    def seen(self, values: ByLeaf, sizes: tuple[int, int, int]) -> torch.Tensor:
        """Which keys each row sees, boolean [B, T, S] for `sizes` = (B, T, S)."""
        seen = torch.arange(sizes[2]) < self.visible(values, *sizes)[..., None]
        return seen if self.mask is None else seen & self.mask.seen(values, sizes)

    def operand(self, values: ByLeaf) -> torch.Tensor | None:
        """The operators' mask."""
        return None if self.mask is None else self.mask.operand(values)

    def _constant_start(self, rows: int, keys: int) -> int:
        return keys - rows if self.right_aligned else 0

    def lengths(self, values: ByLeaf, query: torch.Tensor) -> tuple[int, torch.Tensor | None, torch.Tensor | None]:
        """`(sparse_mode, actual_seq_lengths_query, actual key lengths)` of an operator on `query` [B, T, H, D]."""
        batch, rows = query.shape[0], query.shape[1]
        # A request may be said to have more rows than there are; its last row is the last one here all the same.
        valid = self.rows.canonical(values).clamp(max=rows).expand(batch, 1).reshape(batch) if self.rows else None
        if self.everything:
            return 0, valid, None
        if self.start is None:
            if self.right_aligned and self.rows is None:
                return 3, None, None
            return (
                3,
                valid,
                torch.full((batch,), self.offset - 1, device=query.device) + (rows if valid is None else valid),
            )
        base = self.start.canonical(values) + (self.offset - (rows if self.minus_rows else 0))
        if self.start.per_row:
            row = torch.arange(rows, device=query.device)[None, :]
            seen = base + row if self.slope else base
            if self.rows is not None:
                seen = torch.where(row < self.rows.canonical(values), seen, 0)
            return 0, None, seen.expand(batch, rows)
        per_request = base.expand(batch, 1).reshape(batch)
        if self.slope == 0:
            return 0, valid, per_request
        return 3, valid, per_request + ((rows if valid is None else valid) - 1)


def counts(leaf: fx.Node, batch: int, rows: int) -> Iterator[Count]:
    """The ways to read an integer leaf as one number, one per request, one per row, or both."""
    for layout in layouts(shape_of(leaf), "bt", {"b": batch, "t": rows}):
        yield Count(leaf, layout)
    for layout in layouts(shape_of(leaf), "bt", {"b": 1, "t": 1}):
        if (batch, rows) != (1, 1):
            yield Count(leaf, layout)
    if rows != 1:
        for layout in layouts(shape_of(leaf), "bt", {"b": batch, "t": 1}):
            yield Count(leaf, layout)
    if batch != 1:
        for layout in layouts(shape_of(leaf), "bt", {"b": 1, "t": rows}):
            yield Count(leaf, layout)


def hypotheses(integers: Sequence[fx.Node], batch: int, rows: int) -> list[Visibility]:
    """All visibilities that these integer leaves can mean, the usual ones first."""
    found: list[Visibility] = []
    if not integers:
        found += [
            Visibility(None, 1, 1, right_aligned=True),
            Visibility(None, 1, 1),
            Visibility(None, 0, 0, everything=True),
        ]
    for leaf in integers:
        for count in counts(leaf, batch, rows):
            others = [other for other in integers if other is not leaf]
            if not others:
                found += list(_forms(count, None))
            for other in others:
                found += [
                    form for tail in counts(other, batch, rows) if not tail.per_row for form in _forms(count, tail)
                ]
    for leaf in integers:
        if len(integers) == 1:
            found += [
                base
                for tail in counts(leaf, batch, rows)
                if not tail.per_row
                for base in (
                    Visibility(None, 1, 1, rows=tail),
                    Visibility(None, 0, 0, everything=True, rows=tail),
                )
            ]
    return found


def masked_hypotheses(found: Sequence[Visibility], mask: MaskLeaf | None) -> list[Visibility]:
    """The same visibilities, each also hidden by the mask; a mask that hides all that is hidden comes first."""
    if mask is None:
        return list(found)
    return sorted(
        (replace(form, mask=reading) for reading in mask.readings() for form in found),
        key=lambda form: not form.everything,
    )


def _forms(start: Count, rows: Count | None) -> Iterator[Visibility]:
    yield Visibility(start, 1, 1, rows=rows)
    yield Visibility(start, 0, 1, rows=rows)
    yield Visibility(start, 0, 0, rows=rows)
    yield Visibility(start, 1, 1, minus_rows=True, rows=rows)
    yield Visibility(start, 1, 0, rows=rows)


def sample_counts(
    integers: Sequence[fx.Node],
    shapes: Callable[[fx.Node], Sequence[int]],
    rows: int,
    keys: int,
    generator: torch.Generator,
    trial: int,
) -> dict[fx.Node, torch.Tensor]:
    """Values for the integer leaves: positions that leave room for all rows, the first and the last one forced."""
    room = max(keys - rows, keys // 2)
    sample: dict[fx.Node, torch.Tensor] = {}
    for leaf in integers:
        shape = tuple(shapes(leaf))
        # With two leaves, which is the position and which the number of rows is not known yet: every combination of a
        # long and a short range comes up. The first sample shows every key, so that little else than the form matters.
        is_long = len(integers) == 1 or trial == 0 or bool(trial >> integers.index(leaf) & 1)
        most = room if is_long else min(room, rows)
        value = torch.randint(0, most + 1, shape, generator=generator)
        flat = value.view(-1)
        if trial == 0:
            flat.fill_(room)
        elif flat.numel() > 1 or (flat.numel() and trial < _FORCED):
            # A single number is forced in two samples only, or it would never be anything but first or last.
            flat[0 if trial % 2 else -1] = 0 if trial % 2 else most
        sample[leaf] = value.to(leaf.meta["val"].dtype)
    return sample
