"""Index rows from the domain of whoever made them: distinct positions, the seen ones first, marks as promised."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from k31compile.graph.dataflow import Dataflow
from k31compile.graph.evaluate import run_in_float64
from k31compile.graph.region import Region
from k31compile.graph.sizes import Substitution, value_of
from k31compile.kernels.visibility import visible_lengths
from k31compile.passes.recognise.attention_anchor import is_indexer
from k31compile.passes.recognise.mask_origin import MaskOrigin, mask_origin


@dataclass(frozen=True)
class Producer:
    """What is known of the indices: all of a fused indexer's, that a top-k names no key twice, nothing of given ones.

    `marks_empty` tells whether -1 may stand in slots without a visible key; `lengths` is the region that computes a
    fused indexer's lengths from the attention's own integer leaves, where it can be. Of given indices a key named
    twice counts once for a mask (`counts_once`) and twice for a gather. `mask` is what a fused indexer's mask was made
    from.
    """

    is_known: bool
    marks_empty: bool
    hides_keys: bool
    sparse_mode: int = 0
    lengths: Region | None = None
    has_rows: bool = False
    has_lengths: bool = False
    is_given: bool = False
    is_indexer: bool = False
    counts_once: bool = False
    mask: MaskOrigin | None = None

    @property
    def must_refuse_marks(self) -> bool:
        """Whether -1 may be among the indices although the author's code does not leave it out."""
        return self.is_given and not self.marks_empty

    @property
    def fills_with_hidden_keys(self) -> bool:
        """Whether empty slots name keys that the row must not see."""
        return self.is_indexer and self.hides_keys and not self.marks_empty

    def visible(
        self,
        sample: Mapping[fx.Node, torch.Tensor],
        sizes: tuple[int, int, int],
        substitution: Substitution,
        generator: torch.Generator,
    ) -> torch.Tensor | None:
        """How many keys each row sees by the producer, [B, T]; None where nothing is known."""
        batch, rows, keys = sizes
        if not self.is_known:
            return None
        if not self.hides_keys:
            return torch.full((batch, rows), keys)
        assert self.lengths is not None
        values = run_in_float64(self.lengths, {n: sample[n] for n in self.lengths.leaves}, substitution)
        length_query = values[0] if self.has_rows else None
        length_key = values[-1] if self.has_lengths else None
        return visible_lengths((batch, rows), keys, length_query, length_key, self.sparse_mode, torch.device("cpu"))


def producers_of(flow: Dataflow, indices: fx.Node, region: Region) -> list[Producer]:
    """Who may have made the indices; of an unknown producer first the one that asks more of the attention."""
    if not is_indexer(indices):
        if indices.op != "placeholder":
            return [Producer(False, False, True)]
        return [
            Producer(False, marks, True, is_given=True, counts_once=once)
            for marks in (True, False)
            for once in (False, True)
        ]
    given: Mapping[str, Any] = indices.kwargs
    mode = given.get("sparse_mode", 3)
    rows, lengths = given.get("actual_seq_lengths_query"), given.get("actual_seq_lengths_key")
    mask = given.get("mask")
    # One row, which sees the last key, sees all of them. A symbolic number of rows is not compared: that is a guard.
    count = value_of(indices).shape[1]
    is_one_row = isinstance(count, int) and count == 1
    hides = (mode != 0 and not is_one_row) or any(part is not None for part in (rows, lengths, mask))
    outputs = [node for node in (rows, lengths) if isinstance(node, fx.Node)]
    marks = given.get("tail", "minus_one") == "minus_one"
    computed = _lengths_from(flow, [leaf for leaf in region.leaves if leaf is not indices], outputs)
    if (computed is None and hides) or mask is not None:
        # Which slots are empty cannot be told from what the attention reads: any keys may stand in any slot.
        origin = mask_origin(mask, (0, 1, 2)) if isinstance(mask, fx.Node) else None
        return [Producer(False, marks, hides, is_indexer=True, mask=origin)]
    return [Producer(True, marks, hides, mode, computed, rows is not None, lengths is not None, is_indexer=True)]


def _lengths_from(flow: Dataflow, leaves: list[fx.Node], outputs: list[fx.Node]) -> Region | None:
    """The region that computes an indexer's lengths from the attention's leaves, or None where it reads others."""
    try:
        whole = Region.between(flow, leaves, outputs)
    except ValueError:
        return None
    needed = flow.ancestors(outputs, stop=set(leaves).__contains__)
    return Region(tuple(leaf for leaf in whole.leaves if leaf in needed), whole.outputs, whole.nodes)


def index_rows(
    sizes: tuple[int, int, int, int], visible: torch.Tensor | None, producer: Producer, generator: torch.Generator
) -> torch.Tensor:
    """Indices [B, T, K], no key twice in a row unless they are given.

    Of a known producer: seen keys in any order, the last of them always chosen, then the hidden ones ascending or -1.
    Of an unknown one: any keys, seen or not, and -1 at the end of some rows where it may be there.
    """
    b, t, k, s = sizes
    place, slot = torch.arange(s), torch.arange(k)
    rank = torch.rand((b, t, s), generator=generator)
    if visible is None:
        rows = _pad(rank.argsort(-1)[..., :k], k)
        if producer.is_given:
            # Anywhere and not in every row: an author who leaves a slot out must not leave out what is named again.
            named = torch.randint(k, (2, b, t, 1), generator=generator)
            again = torch.where(torch.rand((b, t, 1), generator=generator) < 0.5, rows.gather(-1, named[0]), -1)
            rows = torch.where((slot == named[1]) & (again >= 0), again, rows)
        count = torch.randint(1, k + 1, (b, t, 1), generator=generator)
        return rows.masked_fill(slot >= count, -1) if producer.marks_empty else rows
    seen = visible[..., None]
    rank = torch.where(place == seen - 1, -1.0, torch.where(place >= seen, 2.0 + place, rank))
    rows = _pad(rank.argsort(-1)[..., :k], k)
    return rows.masked_fill(slot >= seen, -1) if producer.marks_empty else rows


def full_rows(seen: torch.Tensor, count: int) -> torch.Tensor:
    """Indices [B, T, K] without a mark where there are enough keys: those that `seen` [B, T, S] shows, then others."""
    rank = torch.rand(seen.shape, generator=torch.Generator().manual_seed(count))
    return _pad(torch.where(seen, rank, rank + 1).argsort(-1)[..., :count], count)


def edge_rows(seen: torch.Tensor, count: int) -> torch.Tensor:
    """Indices [B, T, K] of the keys nearest to where `seen` [B, T, S], a prefix, ends, on both sides."""
    far = (torch.arange(seen.shape[-1]) + 0.5 - seen.sum(-1, keepdim=True)).abs()
    return _pad(far.argsort(-1)[..., :count], count)


def each_once(indices: torch.Tensor) -> torch.Tensor:
    """Indices [B, T, K] in which a key named again is -1."""
    ordered = indices.sort(-1).values
    again = ordered[..., 1:] == ordered[..., :-1]
    return torch.cat([ordered[..., :1], ordered[..., 1:].masked_fill(again, -1)], dim=-1)


def _pad(rows: torch.Tensor, count: int) -> torch.Tensor:
    return torch.nn.functional.pad(rows, (0, count - rows.shape[-1]), value=-1)
