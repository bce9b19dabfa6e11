"""Sparse attention in anyone's spelling: mask or gather, native or absorbed, softmax by name or by hand.

o[t, h] = sum_j softmax_j(scale * q[t, h] . k[idx[t, j]]) v[idx[t, j]],  over keys chosen and visible (spec 2.9)
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from k31compile.graph.confirm import TOLERANCE, Mismatch, Reading, relative_error
from k31compile.graph.constants import largest_constant
from k31compile.graph.dataflow import ATEN, Dataflow
from k31compile.graph.evaluate import run_in_float64
from k31compile.graph.layout import Layout, layouts
from k31compile.graph.region import Region
from k31compile.graph.shrink import shrunk_pool, shrunk_sizes
from k31compile.graph.sizes import (
    Substitution,
    is_float,
    is_integer,
    numel_of,
    shape_of,
    shape_under,
    symbols_of,
    value_of,
)
from k31compile.passes.recognise.attention_anchor import Attention, attentions_of, keys_selected_from
from k31compile.passes.recognise.attention_forms import Form, forms
from k31compile.passes.recognise.attention_samples import Producer, each_once, index_rows, producers_of
from k31compile.passes.recognise.engine import Demand, Recogniser, outside_users
from k31compile.passes.recognise.operands import (
    Dense,
    Paged,
    is_cache,
    is_parameter,
    paged_source,
    pages_behind,
    sample_table,
    spread,
    with_plain_integers,
)
from k31compile.passes.recognise.visibility import Visibility, hypotheses, sample_counts

_TIMES = {ATEN.mul.Tensor, ATEN.mul.Scalar}
_FACTORS = {*_TIMES, ATEN.div.Tensor, ATEN.div.Scalar}


class SparseFlashAttentionRecogniser(Recogniser):
    """Anchored on a softmax (or exp, or scaled_dot_product_attention) that an index tensor reaches."""

    name = "sparse_flash_attention"

    def anchors(self, flow: Dataflow) -> Iterable[fx.Node]:
        """The softmaxes; an `exp` inside a softmax by hand is one."""
        return [found.softmax for found in attentions_of(flow)]

    def _attention(self, flow: Dataflow, anchor: fx.Node) -> Attention:
        return next(found for found in attentions_of(flow) if found.softmax is anchor)

    def demands(self, flow: Dataflow, anchor: fx.Node) -> Iterator[Demand]:
        """Native first, the projections from the latent inside; then as it stands."""
        found = self._attention(flow, anchor)
        base = found.direct | flow.between(found.dots, [found.output])
        core = (base | {found.output}) - {found.indices}
        if any(node.op == "placeholder" for node in core):
            raise Mismatch("an input of the graph lies between the indices and the output")
        if found.projections and not found.projections & core:
            inner = flow.between(found.projections, [found.output])
            yield Demand(
                (found.output,),
                frozenset(core | inner),
                self._eligible(found, found.projection_weights),
                (found.indices,),
            )
        weights = found.projection_weights if found.projections & core else set()
        yield Demand((found.output,), frozenset(core), self._eligible(found, weights), (found.indices,))

    def _eligible(self, found: Attention, weights: set[fx.Node]) -> Callable[[fx.Node], bool]:
        sizes = list(self._rows_and_heads(found))
        keys = keys_selected_from(found.indices)
        known_keys = {} if keys is None else {"s": keys}

        @functools.cache
        def eligible(node: fx.Node) -> bool:
            if is_integer(node):
                return True
            if not is_float(node):
                return False
            if node in weights:
                return True
            if is_parameter(node):
                return False
            fits = (
                next(layouts(shape_of(node), letters, known), None)
                for b, t, h in sizes
                for letters, known in (
                    ("bthd", {"b": b, "t": t, "h": h}),
                    ("bsd", {"b": b, **known_keys}),
                    ("bshd", {"b": b, "h": h, **known_keys}),
                )
            )
            return any(fits) or is_cache(node)

        return eligible

    def _rows_and_heads(self, found: Attention) -> Iterator[tuple[int, int, int]]:
        """Requests, rows and heads, for each way to read the indices and the output."""
        shape, output = shape_of(found.indices), shape_of(found.output)
        for reading in _index_layouts(found.indices):
            b, t = reading.size("b", shape), reading.size("t", shape)
            for layout in layouts(output, "bthv", {"b": b, "t": t}):
                yield b, t, layout.size("h", output)

    def variants(self, flow: Dataflow, leaves: tuple[fx.Node, ...]) -> Iterator[tuple[fx.Node, ...]]:
        """Pages behind gathered or flattened caches, all of them; then the leaves as found."""
        found = with_plain_integers(leaf for leaf in leaves)
        better: list[fx.Node] = []
        for leaf in found:
            source = paged_source(leaf) if is_float(leaf) else None
            pages = pages_behind(leaf) if is_float(leaf) and source is None and is_cache(leaf) else None
            better += source if source is not None else [pages if pages is not None else leaf]
        if tuple(better) != found:
            yield tuple(dict.fromkeys(better))
        yield found

    def readings(self, flow: Dataflow, anchor: fx.Node, region: Region) -> Iterator[Reading]:
        """Every form that fits the shapes, under every domain of the indices."""
        found = self._attention(flow, anchor)
        integers = [n for n in region.leaves if is_integer(n) and n is not found.indices]
        if found.indices not in region.leaves:
            return
        shape = shape_of(found.indices)
        keys = keys_selected_from(found.indices)
        known_keys = {} if keys is None else {"s": keys}
        for layout, table in itertools.product(_index_layouts(found.indices), (None, *_tables(integers))):
            letters = {"b": layout.size("b", shape), "t": layout.size("t", shape), "out": numel_of(found.output)}
            letters |= known_keys
            counts = [n for n in integers if n is not table]
            for floats, weights in _latents_and_weights(found, region):
                for form in forms(floats, weights, table, letters):
                    known = {"b": letters["b"], "t": letters["t"], "h": form.queries[0].size("h")}
                    for output in layouts(shape_of(found.output), "bthv", known):
                        for producer in producers_of(flow, found.indices, region):
                            yield AttentionReading(region, found, form, layout, output, counts, producer)

    def guards(self, flow: Dataflow, region: Region, reading: Reading) -> None:
        """No probabilities leave, and no key that the row does not see is read."""
        assert isinstance(reading, AttentionReading)
        visibility: Visibility = reading.learned["visibility"]
        if visibility.everything and reading.producer.fills_with_hidden_keys:
            raise Mismatch(
                "rows with fewer visible keys than are selected would read keys of the future: the attention masks "
                "neither by position nor by -1"
            )
        pairwise = numel_of(reading.found.indices)
        for node, reader in outside_users(flow, region.nodes, region.outputs).items():
            wide = numel_of(node) >= pairwise and is_float(node)
            if wide and node in flow.descendants([reading.found.softmax]):
                raise Mismatch(f"the attention weights are also read by {reader.name}: a fused attention has none")

    def resembles(self, flow: Dataflow, anchor: fx.Node) -> bool:
        """Something in this graph selected the indices; an integer input may as well be a block table."""
        return self._attention(flow, anchor).indices.op != "placeholder"

    def hint(self, reason: str) -> str:
        """What to change."""
        if "future" in reason:
            return "mask the selected keys by position before the softmax"
        return "the recognised form is a softmax over the selected, visible keys, by mask or by gather"


def _index_layouts(indices: fx.Node) -> Iterator[Layout]:
    """[B, T, 1, K] of a fused indexer; [B, T, K], [T, K] or [B, K] of others."""
    shape = shape_of(indices)
    if len(shape) == 4 and shape[2] == 1:
        yield Layout("btk", (0, 1, 3))
        return
    last = len(shape) - 1
    for layout in layouts(shape, "btk", {"k": shape[-1]}):
        present = [d for d in layout.dims if d is not None]
        if layout.dims[2] == last and present == sorted(present):
            yield layout


def _latents_and_weights(found: Attention, region: Region) -> Iterator[tuple[list[fx.Node], list[fx.Node]]]:
    """The float leaves that are activations and those that are weights; without parameters each split is tried."""
    floats = [n for n in region.leaves if is_float(n)]
    operands = [n for n in floats if n in found.projection_weights]
    parameters = [n for n in floats if is_parameter(n)]
    splits = (
        [parameters]
        if parameters or not operands
        else [[], *map(list, itertools.chain(itertools.combinations(operands, 1), itertools.combinations(operands, 2)))]
    )
    for weights in splits:
        yield [n for n in floats if n not in weights], weights


def _tables(integers: Sequence[fx.Node]) -> list[fx.Node]:
    return [n for n in integers if len(shape_of(n)) == 2]


class AttentionReading(Reading):
    """Leaves read as queries, caches, weights, indices and lengths."""

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
    ) -> None:
        """One form, not yet confirmed."""
        self.region, self.found, self.form, self.producer = region, found, form, producer
        self.context = producer.context
        self.index_layout, self.output_layout, self.counts = indices, output, counts
        self.learned: dict[str, Any] = {}

    def begin(self, substitution: Substitution) -> None:
        """Take these sizes and forget what earlier samples taught."""
        self._sizes = substitution
        self._letters = self._letters_under(substitution)
        self._candidates: list[tuple[Visibility, float]] = []
        self._seen: list[tuple[Mapping[fx.Node, torch.Tensor], torch.Tensor]] = []
        self._compared = 0

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
        small = shrunk_sizes(letters, others, page, self._beyond())
        if symbols or not small:
            return [symbols]
        for cache in self.form.caches:
            if isinstance(cache.operand, Paged):
                small |= shrunk_pool(shape_of(cache.operand.pages), letters["b"], small, letters["s"])
        return [{**symbols, **small}, symbols]

    def _beyond(self) -> int:
        """The largest number that hides or shows keys."""
        lengths = [*shape_of(self.found.indices), self.form.key.operand.size("s")]
        return largest_constant(self.region.nodes, lengths)

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
        extreme = (1.0, 1e-6, 1e6, 1.0)[trial % 4]
        for query in self.form.queries:
            sample |= query.place(extreme * spread(self._canonical_shape(query), generator, 1, 3))
        far = (1.0, 1.0, 1.0, 1e6)[trial % 4]
        for cache in self.form.caches:
            sample |= self._sample_cache(cache.operand, generator, sample, far)
        for weight in self.form.weights:
            shape = shape_under(weight, self._sizes)
            sample[weight] = torch.randn(shape, generator=generator, dtype=torch.float64) * shape[-1] ** -0.5
        sample |= sample_counts(self.counts, lambda leaf: shape_under(leaf, self._sizes), t, s, generator, trial)
        rows = index_rows(
            (b, t, k, s), self.producer.visible(sample, (b, t, s), self._sizes, generator), self.producer, generator
        )
        restored = self.index_layout.restore(rows, value_of(self.found.indices).dim())
        sample[self.found.indices] = restored.to(value_of(self.found.indices).dtype).contiguous()
        return sample

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
        b, s, d = (operand.size(letter, self._sizes) for letter in "bsd")
        values = far * spread((b, s, d), generator, 1, 2)
        return {**operand.place(values, table, shape), operand.table: table}

    def judge(self, sample: Mapping[fx.Node, torch.Tensor], outputs: Sequence[torch.Tensor]) -> float:
        """Equal to the operator for one scale and one rule of visibility, on every row that sees a chosen key."""
        if self.producer.must_refuse_marks:
            self._require_refusal_of_marks(sample)
        got = self.output_layout.canonical(outputs[0]).to(torch.float64)
        self._seen.append((sample, got))
        if not self._candidates:
            self._candidates = list(itertools.product(self._visibilities(sample), self._scales()))
        while self._candidates:
            errors = [self._error(*seen, *self._candidates[0]) for seen in reversed(self._seen)]
            if max(errors) < TOLERANCE and not self._is_too_thin():
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
        count = ((indices >= 0) & (indices < self._visible(sample, visibility)[..., None])).sum(-1)
        live = count > 0
        expected = self._attend(sample, visibility, scale)
        error = relative_error(got[live], expected[live]) if bool(live.any()) else 0.0
        if not math.isfinite(error) or not self._says_nothing(sample, got, ~live):
            return math.inf
        self._compared = max(self._compared, int(count.max()))
        return error

    def _says_nothing(self, sample: Mapping[fx.Node, torch.Tensor], got: torch.Tensor, empty: torch.Tensor) -> bool:
        """Rows without a key are zeros, NaN, or the plain average that masking by a large number leaves."""
        if not bool(empty.any()):
            return True
        rows = got[empty]
        nothing = (rows.isnan() | (rows == 0)).flatten(1).all(-1)
        if bool(nothing.all()):
            return True
        zeroed = {**sample, **{query.leaf: torch.zeros_like(sample[query.leaf]) for query in self.form.queries}}
        everything = Visibility(None, 0, 0, everything=True)
        keys = torch.arange(self._letters["s"]).expand(*self._indices(sample).shape[:2], 1, -1)
        for indices in (self._indices(sample).clamp_min(0), keys):
            average = self._attend(zeroed, everything, 1.0, indices)[empty]
            nothing |= ((rows - average).abs() <= TOLERANCE * average.abs().amax()).flatten(1).all(-1)
        return bool(nothing.all())

    def _visible(self, sample: Mapping[fx.Node, torch.Tensor], visibility: Visibility) -> torch.Tensor:
        b, t, s = (self._letters[x] for x in "bts")
        return visibility.visible(sample, b, t, s)

    def _require_refusal_of_marks(self, sample: Mapping[fx.Node, torch.Tensor]) -> None:
        """Given indices may hold -1: where the author does not leave it out, running into an error is all he may do."""
        marked = {**sample, self.found.indices: torch.full_like(sample[self.found.indices], -1)}
        try:
            run_in_float64(self.region, marked, self._sizes)
        except (RuntimeError, IndexError):
            return
        raise Mismatch("an index of -1 would read the last key instead of none: clamp it and mask its slot")

    def _drop_equal_candidates(self, sample: Mapping[fx.Node, torch.Tensor]) -> None:
        """Drop the first candidate; on the first sample also those that say the same of every row."""
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
        produced = self.producer.visible(sample, (b, t, s), self._sizes, torch.Generator().manual_seed(0))
        if produced is None or self.producer.lengths is None:
            return found
        return sorted(found, key=lambda form: not torch.equal(form.visible(sample, b, t, s), produced))

    def _scales(self) -> list[float]:
        """The default, the constants that the author multiplies or divides by, none, and all of them together."""
        width = sum(query.size("d", self._sizes) for query in self.form.queries)
        factors: list[float] = []
        for node in self.region.nodes:
            constant = next((a for a in node.args[1:2] if isinstance(a, float)), None)
            if constant is not None and node.target in _FACTORS and 1e-6 < abs(constant) < 1e6:
                factors.append(constant if node.target in _TIMES else 1.0 / constant)
            given = node.kwargs.get("scale")
            if isinstance(given, float):
                factors.append(given)
        return list(dict.fromkeys([*factors, width**-0.5, 1.0, math.prod(factors)]))

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
        )

    def build(self, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The operator in the author's layout and dtype."""
        values = dict(zip(self.region.leaves, leaves, strict=True))
        result = self._attend(values, self.learned["visibility"], self.learned["scale"])
        output = value_of(self.found.output)
        return (self.output_layout.restore(result, output.dim()).to(output.dtype),)
