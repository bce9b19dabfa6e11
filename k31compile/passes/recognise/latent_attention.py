"""Attention over all of a latent cache whose keys and values are projected anew for every token (K3.1 spec 2.7, 3.2).

For a few rows the projections of the whole cache are nearly all of the work; absorbed into the query and the output
they are a row's. What nothing selected is an attention over every position: the operator is that of sparse attention.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from k31compile.graph.confirm import TOLERANCE, Mismatch, Reading, Sample, relative_error
from k31compile.graph.dataflow import Dataflow
from k31compile.graph.layout import Layout, distinct_layouts, layouts
from k31compile.graph.region import Region
from k31compile.graph.shrink import shrunk_sizes
from k31compile.graph.sizes import Substitution, is_float, is_tensor, shape_of, shape_under, symbols_of, value_of
from k31compile.passes.recognise.attention_anchor import SDPA, SOFTMAXES, output_of, parts_of
from k31compile.passes.recognise.attention_forms import Form, forms
from k31compile.passes.recognise.attention_reading import scales_in
from k31compile.passes.recognise.contractions import operands
from k31compile.passes.recognise.engine import Demand, Recogniser, outside_users
from k31compile.passes.recognise.masks import MaskLeaf, mask_inputs, masks_among, sample_mask
from k31compile.passes.recognise.operands import Dense, is_cache, is_parameter, spread

_WORTH = 2.0
"""How many times fewer multiplications the absorbed form must have."""


@dataclass(frozen=True)
class LatentAttention:
    """A softmax over all keys, what leaves it, and the projections of keys and values from one latent.

    `sizes` are requests, rows and keys.
    """

    softmax: fx.Node
    output: fx.Node
    dots: frozenset[fx.Node]
    projections: frozenset[fx.Node]
    sizes: tuple[int, int, int]

    @property
    def weights(self) -> set[fx.Node]:
        """What the projections multiply the latent with."""
        return {operand for node in self.projections for operand in operands(node) if is_parameter(operand)}


class LatentAttentionRecogniser(Recogniser):
    """Anchored on a softmax whose keys and values are projections of one latent, for few rows."""

    name = "sparse_flash_attention"

    def anchors(self, flow: Dataflow) -> Iterable[fx.Node]:
        """The softmaxes."""
        return [found.softmax for found in _attentions_of(flow)]

    def _attention(self, flow: Dataflow, anchor: fx.Node) -> LatentAttention:
        return next(found for found in _attentions_of(flow) if found.softmax is anchor)

    def demands(self, flow: Dataflow, anchor: fx.Node) -> Iterator[Demand]:
        """The projections inside, each mask that it reads as a leaf, then none."""
        found = self._attention(flow, anchor)
        core = flow.between(found.projections, [found.output]) | flow.between(found.dots, [found.output])
        core |= {anchor, found.output, *found.projections}
        masks = mask_inputs(flow, core, found.sizes, given=False)
        for kept in ((mask,) for mask in masks):
            yield Demand((found.output,), frozenset(core), self._eligible(found), kept)
        yield Demand((found.output,), frozenset(core), self._eligible(found))

    def _eligible(self, found: LatentAttention) -> Any:
        b, t, s = found.sizes
        weights = found.weights

        def eligible(node: fx.Node) -> bool:
            if not is_float(node) or node in weights or is_parameter(node):
                return node in weights
            known = ({"b": b, "t": t}, {"b": b, "s": s})
            fits = (next(layouts(shape_of(node), x, k), None) for x, k in zip(("bthd", "bsd"), known, strict=True))
            return any(fits) or is_cache(node)

        return eligible

    def variants(self, flow: Dataflow, leaves: tuple[fx.Node, ...]) -> Iterator[tuple[fx.Node, ...]]:
        """The leaves as found."""
        yield leaves

    def readings(self, flow: Dataflow, anchor: fx.Node, region: Region) -> Iterator[Reading]:
        """Every form with weights to absorb that fits the shapes, under every reading of the mask."""
        found = self._attention(flow, anchor)
        b, t, s = found.sizes
        output = shape_of(found.output)
        letters = {"b": b, "t": t, "s": s, "out": value_of(found.output).numel()}
        floats = [leaf for leaf in region.leaves if is_float(leaf) and leaf not in found.weights]
        weights = [leaf for leaf in region.leaves if leaf in found.weights]
        for mask in _mask_readings(flow, region, found.sizes):
            rest = [leaf for leaf in floats if mask is None or leaf is not mask.leaf]
            for form in forms(rest, weights, None, letters) if weights else ():
                known = {"b": b, "t": t, "h": form.queries[0].size("h")}
                for layout in distinct_layouts(output, "bthv", known):
                    if is_worth_it(form, found.sizes):
                        yield LatentAttentionReading(region, found.output, form, layout, mask)

    def guards(self, flow: Dataflow, region: Region, reading: Reading) -> None:
        """No probabilities leave."""
        softmax = next(node for node in region.nodes if node.target in SOFTMAXES)
        weighted = flow.descendants([softmax])
        for node, reader in outside_users(flow, region.nodes, region.outputs).items():
            if is_float(node) and node in weighted:
                raise Mismatch(f"the attention weights are also read by {reader.name}: a fused attention has none")

    def resembles(self, flow: Dataflow, anchor: fx.Node) -> bool:
        """Nobody expects an attention without a selection to be one with."""
        return False


class LatentAttentionReading(Reading):
    """Leaves read as queries, latent, its rope part, weights to be absorbed, and a mask."""

    name = "sparse_flash_attention"

    def __init__(self, region: Region, output: fx.Node, form: Form, layout: Layout, mask: MaskLeaf | None) -> None:
        """One form, not yet confirmed."""
        self.region, self.output, self.form, self.layout, self.mask = region, output, form, layout, mask
        self.learned: dict[str, Any] = {}

    def begin(self, substitution: Substitution) -> None:
        """Take these sizes and forget what earlier samples taught."""
        self._sizes = substitution
        self._scales = scales_in(self.region, sum(query.size("d", substitution) for query in self.form.queries))
        self._seen: list[tuple[Sample, torch.Tensor]] = []

    def substitutions(self) -> list[Substitution]:
        """Symbols made small, and the cache too where it is large."""
        leaves = [size for leaf in self.region.leaves for size in value_of(leaf).shape]
        symbols: dict[sympy.Symbol | int, int] = {symbol: 5 + 2 * i for i, symbol in enumerate(symbols_of(leaves))}
        letters = self._letters(symbols)
        widths = [*(o.size("d") for o in self._operands()), *(s for w in self.form.weights for s in shape_of(w))]
        small = {} if symbols else shrunk_sizes({**letters, "k": letters["s"]}, [letters["h"], *widths])
        return [{**symbols, **small}, symbols] if small else [symbols]

    def _operands(self) -> list[Any]:
        return [*self.form.queries, *(cache.operand for cache in self.form.caches)]

    def _letters(self, substitution: Substitution) -> dict[str, int]:
        query = self.form.queries[0]
        letters = {letter: query.size(letter, substitution) for letter in "bth"}
        return {**letters, "s": self.form.key.operand.size("s", substitution)}

    def sizes(self) -> Mapping[str, int]:
        """B, T, S, H."""
        return {letter.upper(): size for letter, size in self._letters(self._sizes).items()}

    def sample(self, generator: torch.Generator, trial: int) -> Sample:
        """Queries over decades and at extremes, caches, weights, and a mask with any content."""
        sample: dict[fx.Node, torch.Tensor] = {}
        extreme = (1.0, 1e-6, 1e4, 1.0)[trial % 4]
        for operand in self._operands():
            assert isinstance(operand, Dense)
            shape = tuple(operand.size(letter, self._sizes) for letter in operand.layout.letters)
            factor = extreme if operand in self.form.queries else 1.0
            sample |= operand.place(factor * spread(shape, generator, 1, 2))
        for weight in self.form.weights:
            shape = shape_under(weight, self._sizes)
            sample[weight] = torch.randn(shape, generator=generator, dtype=torch.float64) * shape[-1] ** -0.5
        if self.mask is not None:
            sample |= sample_mask(self.mask, shape_under(self.mask.leaf, self._sizes), generator, trial)
        return sample

    def judge(self, sample: Sample, outputs: Sequence[torch.Tensor]) -> float:
        """Equal to the operator over all keys for one scale, on every row that sees one; other rows say nothing."""
        self._seen.append((sample, self.layout.canonical(outputs[0]).to(torch.float64)))
        while self._scales:
            worst = max(self._error(*seen, self._scales[0]) for seen in reversed(self._seen))
            if worst < TOLERANCE:
                self.learned = {"scale": self._scales[0]}
                return worst
            self._scales.pop(0)
        raise Mismatch("it is not a softmax over all keys that the mask shows")

    def _error(self, sample: Sample, got: torch.Tensor, scale: float) -> float:
        expected = self._attend(sample, scale)
        letters = self._letters(self._sizes)
        rows = letters["b"], letters["t"], letters["s"]
        live = torch.ones(rows[:2], dtype=torch.bool) if self.mask is None else self.mask.seen(sample, rows).any(-1)
        if not self._says_nothing(sample, got, ~live):
            return math.inf
        return relative_error(got[live], expected[live]) if bool(live.any()) else 0.0

    def _says_nothing(self, sample: Sample, got: torch.Tensor, empty: torch.Tensor) -> bool:
        """Rows without a key are zeros, as the operator's, NaN, or a plain average as large numbers leave it."""
        rows = got[empty]
        zeroed = {**sample, **{query.leaf: torch.zeros_like(sample[query.leaf]) for query in self.form.queries}}
        average = self._attend(zeroed, 1.0, is_masked=False)[empty]
        is_average = (rows - average).abs() <= TOLERANCE * average.abs().amax(-1, keepdim=True)
        return bool((rows.isnan() | (rows == 0) | is_average).all())

    def _attend(self, values: Sample, scale: float, is_masked: bool = True) -> torch.Tensor:
        query, keys = self.form.queries[0].canonical(values), self.form.key.tensor(values)
        positions = torch.arange(keys.shape[1], dtype=torch.int32, device=query.device)
        indices = positions.expand(query.shape[0], query.shape[1], 1, -1)
        mask = None if self.mask is None or not is_masked else self.mask.operand(values)
        return self.form.attend(values, indices, scale, sparse_mode=0, mask=mask)

    def build(self, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The operator in the author's layout and dtype."""
        result = self._attend(dict(zip(self.region.leaves, leaves, strict=True)), self.learned["scale"])
        output = value_of(self.output)
        return (self.layout.restore(result, output.dim()).to(output.dtype),)


def is_worth_it(form: Form, sizes: tuple[int, int, int]) -> bool:
    """Whether projecting one query and one output a row is far less than projecting all keys and values."""
    _, rows, keys = sizes
    latent = form.joint or form.key.operand.size("d")
    rope = form.key.operand.size("d") - latent if form.joint else form.rope.operand.size("d") if form.rope else 0
    nope = form.queries[0].size("d") - (rope if len(form.queries) == 1 else 0)
    native = keys * latent * (nope + form.width) + rows * keys * (nope + rope + form.width)
    return native >= _WORTH * (rows * latent * (nope + form.width) + rows * keys * (2 * latent + rope))


def _attentions_of(flow: Dataflow) -> list[LatentAttention]:
    return flow.remember("latent attentions", lambda: list(_attentions(flow)))


def _attentions(flow: Dataflow) -> Iterator[LatentAttention]:
    for node in flow.nodes:
        if node.target not in SOFTMAXES or node in flow.constants or node not in flow.live or not is_tensor(node):
            continue
        output = output_of(flow, node)
        if output is None or len(shape_of(node)) != 4:
            continue
        dots, projections = parts_of(flow, node, None, output)
        keys = shape_of(node.args[1])[-2] if node.target is SDPA else shape_of(node)[-1]
        batch, rows = shape_of(node)[0], shape_of(node)[2]
        if projections and 2 * rows <= keys:
            yield LatentAttention(node, output, dots, projections, (batch, rows, keys))


def _mask_readings(flow: Dataflow, region: Region, sizes: tuple[int, int, int]) -> Iterator[MaskLeaf | None]:
    masks = masks_among(flow, region, sizes, given=False)
    yield from itertools.chain.from_iterable(mask.readings() for mask in masks)
    yield None
