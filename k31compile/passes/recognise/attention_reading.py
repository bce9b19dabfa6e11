"""One form of a sparse attention against its region: samples, the comparison, what was learned (K3.1 spec 2.9)."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from k31compile.graph.confirm import TOLERANCE, Mismatch, Reading, relative_error
from k31compile.graph.constants import largest_constant
from k31compile.graph.dataflow import ATEN
from k31compile.graph.evaluate import run_in_float64
from k31compile.graph.layout import Layout
from k31compile.graph.region import Region
from k31compile.graph.shrink import shrunk_pool, shrunk_sizes
from k31compile.graph.sizes import (
    Substitution,
    is_float,
    shape_of,
    shape_under,
    symbols_of,
    value_of,
)
from k31compile.passes.recognise.attention_anchor import Attention
from k31compile.passes.recognise.attention_forms import Form
from k31compile.passes.recognise.attention_samples import Producer, each_once, edge_rows, full_rows, index_rows
from k31compile.passes.recognise.masks import MaskLeaf, sample_mask
from k31compile.passes.recognise.operands import (
    Dense,
    Paged,
    sample_requests,
    sample_table,
    spread,
)
from k31compile.passes.recognise.visibility import Visibility, hypotheses, masked_hypotheses, sample_counts

_MOST_EDGES = 8
_TIMES = {ATEN.mul.Tensor, ATEN.mul.Scalar}
_FACTORS = {*_TIMES, ATEN.div.Tensor, ATEN.div.Scalar}


class AttentionReading(Reading):
    """Leaves read as queries, caches, weights, indices, lengths and a mask."""

    name = "sparse_flash_attention"

    def __init__(
        self,
        region: Region,
        found: Attention,
        form: Form,
        indices: Layout,
        output: Layout,
        counts: list[fx.Node],
        producer: Producer,
        mask: MaskLeaf | None = None,
    ) -> None:
        """One form, not yet confirmed."""
        self.region, self.found, self.form, self.producer, self.mask = region, found, form, producer, mask
        self.index_layout, self.output_layout, self.counts = indices, output, counts
        self.learned: dict[str, Any] = {}

    def begin(self, substitution: Substitution) -> None:
        """Take these sizes and forget what earlier samples taught."""
        self._sizes = substitution
        self._letters = self._letters_under(substitution)
        self._candidates: list[tuple[Visibility, float]] = []
        self._seen: list[tuple[Mapping[fx.Node, torch.Tensor], torch.Tensor]] = []
        self._compared = 0
        self._checked = 0  # how many of the samples seen the first candidate has passed

    def _letters_under(self, substitution: Substitution) -> dict[str, int]:
        index_shape = shape_under(self.found.indices, substitution)
        letters = {x: self.index_layout.size(x, index_shape) for x in "btk"}
        letters["s"] = self.form.key.operand.size("s", substitution)
        letters["h"] = self.form.queries[0].size("h", substitution)
        return letters

    def substitutions(self) -> list[Substitution]:
        """Symbols made small, and lengths too where they are large."""
        symbols = self._choose_symbols()
        letters = self._letters_under(symbols)
        key = self.form.key.operand
        others = [letters["h"], *self._widths()]
        page = shape_of(key.pages)[1] if isinstance(key, Paged) else 0
        page = 0 if page == letters["s"] else page
        # A batch of single tokens, each with the number of its request, is one list of rows.
        is_flat = isinstance(key, Paged) and key.is_by_request and letters["t"] == 1
        lengths = {**letters, "b": 1, "t": letters["b"]} if is_flat else letters
        small = shrunk_sizes(lengths, others, page, self._beyond())
        if symbols or not small:
            return [symbols]
        for cache in self.form.caches:
            if isinstance(cache.operand, Paged) and page:
                small |= shrunk_pool(shape_of(cache.operand.pages), cache.operand.size("r"), small, letters["s"])
        return [{**symbols, **small}, symbols]

    def _beyond(self) -> int:
        """The largest number that hides or shows keys."""
        lengths = [*shape_of(self.found.indices), self.form.key.operand.size("s")]
        return largest_constant([node for node in self.region.nodes if not self._cuts_features(node)], lengths)

    def _cuts_features(self, node: fx.Node) -> bool:
        """Whether the node takes a part of each row of the cache: its numbers are widths."""
        source = node.args[0] if node.target is ATEN.slice.Tensor else None
        if not isinstance(source, fx.Node) or not is_float(source):
            return False
        shape, dim = shape_of(source), node.args[1] if len(node.args) > 1 else 0
        return dim in (-1, len(shape) - 1) and shape[-1] == self.form.key.operand.size("d")

    def _widths(self) -> list[int]:
        operands = [*self.form.queries, *(cache.operand for cache in self.form.caches)]
        return [*(operand.size("d") for operand in operands), *(s for w in self.form.weights for s in shape_of(w))]

    def _choose_symbols(self) -> dict[sympy.Symbol | int, int]:
        shape = value_of(self.found.indices).shape
        sizes = [size for leaf in self.region.leaves for size in value_of(leaf).shape]
        chosen: dict[sympy.Symbol | int, int] = {symbol: 5 + 2 * i for i, symbol in enumerate(symbols_of(shape))}
        for i, symbol in enumerate(s for s in symbols_of(sizes) if s not in chosen):
            chosen[symbol] = max(3 * shape_of(self.found.indices)[-1] + 7, 2 * self._beyond() + 3) + 2 * i
        return chosen

    def sizes(self) -> Mapping[str, int]:
        """B, T, S, H, K."""
        return {letter.upper(): size for letter, size in self._letters.items()}

    def sample(self, generator: torch.Generator, trial: int) -> dict[fx.Node, torch.Tensor]:
        """Queries over decades and at extremes, normal caches and weights, indices as their producer gives them."""
        b, t, k, s = (self._letters[x] for x in "btks")
        sample: dict[fx.Node, torch.Tensor] = {}
        # Extremes show what clamps or caps: the largest logits make the softmax a choice of one key.
        extreme = (1.0, 1e-6, self._largest_queries(), 1.0)[trial % 4]
        for query in self.form.queries:
            sample |= query.place(extreme * spread(self._canonical_shape(query), generator, 1, 3))
        far = (1.0, 1.0, 1.0, 1e6)[trial % 4]
        for cache in self.form.caches:
            sample |= self._sample_cache(cache.operand, generator, sample, far)
        for weight in self.form.weights:
            shape = shape_under(weight, self._sizes)
            sample[weight] = torch.randn(shape, generator=generator, dtype=torch.float64) * shape[-1] ** -0.5
        sample |= sample_counts(self.counts, lambda leaf: shape_under(leaf, self._sizes), t, s, generator, trial)
        if self.mask is not None:
            sample |= sample_mask(self.mask, shape_under(self.mask.leaf, self._sizes), generator, trial)
        rows = index_rows(
            (b, t, k, s), self.producer.visible(sample, (b, t, s), self._sizes, generator), self.producer, generator
        )
        restored = self.index_layout.restore(rows, value_of(self.found.indices).dim())
        sample[self.found.indices] = restored.to(value_of(self.found.indices).dtype).contiguous()
        return sample

    def _largest_queries(self) -> float:
        """exp(x - logsumexp(x)) loses digits as x grows: its logits stay where more are left than are compared."""
        return 1e5 if any(node.target is ATEN.logsumexp.default for node in self.region.nodes) else 1e6

    def _canonical_shape(self, operand: Dense) -> tuple[int, ...]:
        return tuple(operand.size(letter, self._sizes) for letter in operand.layout.letters)

    def _sample_cache(
        self, operand: Dense | Paged, generator: torch.Generator, sample: Mapping[fx.Node, torch.Tensor], far: float
    ) -> dict[fx.Node, torch.Tensor]:
        if not isinstance(operand, Paged):
            values = far * spread(self._canonical_shape(operand), generator, 1, 2)
            return operand.place(values)
        shape = shape_under(operand.pages, self._sizes)
        table = sample.get(operand.table)
        if table is None:
            table = sample_table(operand.table, shape[0], self._sizes, generator)
        blocks = table.unique()
        values = far * spread((len(blocks), shape[1], shape[-1]), generator, 1, 2)
        placed = {**operand.place(values, blocks, shape), operand.table: table}
        if operand.requests is not None and operand.requests not in sample:
            placed |= sample_requests(operand.requests, operand.size("r", self._sizes), self._sizes, generator)
        return placed

    def judge(self, sample: Mapping[fx.Node, torch.Tensor], outputs: Sequence[torch.Tensor]) -> float:
        """Equal to the operator for one scale and one rule of visibility, on every row that sees a chosen key."""
        if self.producer.must_refuse_marks:
            self._require_refusal_of_marks(sample)
        got = self.output_layout.canonical(outputs[0]).to(torch.float64)
        self._seen.append((sample, got))
        if not self._candidates:
            self._candidates = list(itertools.product(self._visibilities(sample), self._scales()))
        while self._candidates:
            errors = [self._error(*seen, *self._candidates[0]) for seen in reversed(self._seen[self._checked :])]
            if max(errors) < TOLERANCE and not self._is_too_thin() and self._holds_at_edges():
                self._checked = len(self._seen)
                self.learned = dict(zip(("visibility", "scale"), self._candidates[0], strict=True))
                return max(errors)
            self._drop_equal_candidates(sample)
        raise Mismatch("it is not a softmax over the selected and visible keys")

    def _is_too_thin(self) -> bool:
        """Whether no row of all samples saw two keys: with one, every softmax is 1."""
        return len(self._seen) == self.samples() and self._compared < 2 and self._letters["k"] > 1

    def _error(
        self, sample: Mapping[fx.Node, torch.Tensor], got: torch.Tensor, visibility: Visibility, scale: float
    ) -> float:
        indices = self._indices(sample)[:, :, 0]
        seen = self._visible(sample, visibility).gather(-1, indices.clamp_min(0).to(torch.int64))
        count = ((indices >= 0) & seen).sum(-1)
        live = count > 0
        expected = self._attend(sample, visibility, scale)
        error = relative_error(got[live], expected[live]) if bool(live.any()) else 0.0
        if not math.isfinite(error) or not self._says_nothing(sample, got, ~live):
            return math.inf
        self._compared = max(self._compared, int(count.max()))
        return error

    def _says_nothing(self, sample: Mapping[fx.Node, torch.Tensor], got: torch.Tensor, empty: torch.Tensor) -> bool:
        """Rows without a key are zeros, NaN, or a plain average as masking by a large number leaves it: of the chosen
        keys, of all, or of those that were not chosen.
        """
        if not bool(empty.any()):
            return True
        rows = got[empty]
        nothing = (rows.isnan() | (rows == 0)).flatten(1).all(-1)
        if bool(nothing.all()):
            return True
        zeroed = {**sample, **{query.leaf: torch.zeros_like(sample[query.leaf]) for query in self.form.queries}}
        everything = Visibility(None, 0, 0, everything=True)
        chosen = self._indices(sample)
        keys = torch.arange(self._letters["s"]).expand(*chosen.shape[:2], 1, -1)
        others = keys.masked_fill((keys.unsqueeze(-1) == chosen.unsqueeze(-2)).any(-1), -1)
        for indices in (chosen.clamp_min(0), keys, others):
            average = self._attend(zeroed, everything, 1.0, indices.contiguous())[empty]
            nothing |= ((rows - average).abs() <= TOLERANCE * average.abs().amax()).flatten(1).all(-1)
        return bool(nothing.all())

    def _visible(self, sample: Mapping[fx.Node, torch.Tensor], visibility: Visibility) -> torch.Tensor:
        return visibility.seen(sample, self._bts())

    def _require_refusal_of_marks(self, sample: Mapping[fx.Node, torch.Tensor]) -> None:
        """Given indices may hold -1: where the author does not leave it out, running into an error is all he may do."""
        marked = {**sample, self.found.indices: torch.full_like(sample[self.found.indices], -1)}
        try:
            run_in_float64(self.region, marked, self._sizes)
        except (RuntimeError, IndexError):
            return
        raise Mismatch("an index of -1 would read the last key instead of none: clamp it and mask its slot")

    def _holds_at_edges(self) -> bool:
        """Whether, after the last sample, each slot counts and each row ends where it is said to.

        Of few rows a slot may never have held a key that is seen, and no index may have met the end of what is seen.
        """
        first = self._seen[0][0]
        is_known = self.producer.visible(first, self._bts(), self._sizes, torch.Generator()) is not None
        if len(self._seen) < self.samples() or is_known:
            return True
        count = self._letters["k"]
        full = full_rows(self._visible(first, self._candidates[0][0]), count)
        edges = [(sample, self._visible(sample, self._candidates[0][0])) for sample, _ in self._seen[1:_MOST_EDGES]]
        rows = [(first, full), (first, full.flip(-1)), *((sample, edge_rows(seen, count)) for sample, seen in edges)]
        return all(self._holds_on(sample, indices) for sample, indices in rows)

    def _holds_on(self, sample: Mapping[fx.Node, torch.Tensor], indices: torch.Tensor) -> bool:
        """Whether the first candidate gives the region's results for these indices [B, T, K], all keys alike."""
        queries = {query.leaf: torch.zeros_like(sample[query.leaf]) for query in self.form.queries}
        restored = self.index_layout.restore(indices, value_of(self.found.indices).dim())
        named = {self.found.indices: restored.to(sample[self.found.indices].dtype).contiguous()}
        values = {**sample, **queries, **named}
        got = self.output_layout.canonical(run_in_float64(self.region, values, self._sizes)[0]).to(torch.float64)
        return self._error(values, got, *self._candidates[0]) < TOLERANCE

    def _bts(self) -> tuple[int, int, int]:
        b, t, s = (self._letters[x] for x in "bts")
        return b, t, s

    def _drop_equal_candidates(self, sample: Mapping[fx.Node, torch.Tensor]) -> None:
        """Drop the first candidate; on the first sample also those that say the same of every row."""
        self._checked = 0
        visibility, scale = self._candidates[0]
        seen = self._visible(sample, visibility)
        only = len(self._seen) == 1
        self._candidates = [
            other
            for other in self._candidates[1:]
            if not (only and other[1] == scale and torch.equal(seen, self._visible(sample, other[0])))
        ]

    def _visibilities(self, sample: Mapping[fx.Node, torch.Tensor]) -> list[Visibility]:
        """All hypotheses, those first that agree with what the producer of the indices saw."""
        b, t, s = (self._letters[x] for x in "bts")
        shape = shape_of(self.found.indices)
        found = hypotheses(self.counts, self.index_layout.size("b", shape), self.index_layout.size("t", shape))
        if self.counts:
            found.append(Visibility(None, 0, 0, everything=True))
        found = masked_hypotheses(found, self.mask)
        produced = self.producer.visible(sample, (b, t, s), self._sizes, torch.Generator().manual_seed(0))
        if produced is None or self.producer.lengths is None:
            return found
        return sorted(found, key=lambda form: not torch.equal(form.visible(sample, b, t, s), produced))

    def _scales(self) -> list[float]:
        return scales_in(self.region, sum(query.size("d", self._sizes) for query in self.form.queries))

    def _indices(self, values: Mapping[fx.Node, torch.Tensor]) -> torch.Tensor:
        indices = values[self.found.indices]
        if self.index_layout.dims == (0, 1, 3):
            return indices
        indices = self.index_layout.canonical(indices)
        return (each_once(indices) if self.producer.counts_once else indices).unsqueeze(2)

    def _attend(
        self,
        values: Mapping[fx.Node, torch.Tensor],
        visibility: Visibility,
        scale: float,
        indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        mode, rows, lengths = visibility.lengths(values, self.form.queries[0].canonical(values))
        return self.form.attend(
            values,
            self._indices(values) if indices is None else indices,
            scale,
            sparse_mode=mode,
            actual_seq_lengths_query=rows,
            actual_seq_lengths_kv=lengths,
            mask=visibility.operand(values),
        )

    def build(self, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The operator in the author's layout and dtype."""
        values = dict(zip(self.region.leaves, leaves, strict=True))
        result = self._attend(values, self.learned["visibility"], self.learned["scale"])
        output = value_of(self.found.output)
        return (self.output_layout.restore(result, output.dim()).to(output.dtype),)


def scales_in(region: Region, width: int) -> list[float]:
    """The constants that the author multiplies or divides by, a width's default, none, and all of them together."""
    factors: list[float] = []
    for node in region.nodes:
        constant = next((a for a in node.args[1:2] if isinstance(a, float)), None)
        if constant is not None and node.target in _FACTORS and 1e-6 < abs(constant) < 1e6:
            factors.append(constant if node.target in _TIMES else 1.0 / constant)
        given = node.kwargs.get("scale")
        if isinstance(given, float):
            factors.append(given)
    return list(dict.fromkeys([*factors, width**-0.5, 1.0, math.prod(factors)]))
