"""Sparse attention in anyone's spelling: mask or gather, native or absorbed, softmax by name or by hand.

o[t, h] = sum_j softmax_j(scale * q[t, h] . k[idx[t, j]]) v[idx[t, j]],  over keys chosen and visible (spec 2.9)
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from torch import fx

from k31compile.graph.confirm import Mismatch, Reading
from k31compile.graph.dataflow import Dataflow
from k31compile.graph.layout import Layout, distinct_layouts, layouts
from k31compile.graph.region import Region
from k31compile.graph.sizes import (
    is_float,
    is_integer,
    numel_of,
    shape_of,
)
from k31compile.passes.recognise.attention_anchor import Attention, attentions_of
from k31compile.passes.recognise.attention_forms import Table, forms
from k31compile.passes.recognise.attention_near import almost_attentions
from k31compile.passes.recognise.attention_reading import AttentionReading
from k31compile.passes.recognise.attention_samples import producers_of
from k31compile.passes.recognise.engine import Demand, Recogniser, outside_users
from k31compile.passes.recognise.masks import MaskLeaf, is_boolean, mask_inputs, masks_among
from k31compile.passes.recognise.operands import (
    is_cache,
    is_parameter,
    paged_source,
    pages_behind,
    with_plain_integers,
)
from k31compile.passes.recognise.visibility import Visibility


class SparseFlashAttentionRecogniser(Recogniser):
    """Anchored on a softmax (or exp, or scaled_dot_product_attention) that an index tensor reaches."""

    name = "sparse_flash_attention"

    def anchors(self, flow: Dataflow) -> Iterable[fx.Node]:
        """The softmaxes; an `exp` inside a softmax by hand is one. Then what is almost one."""
        return [*(found.softmax for found in attentions_of(flow)), *almost_attentions(flow)]

    def _attention(self, flow: Dataflow, anchor: fx.Node) -> Attention:
        return next(found for found in attentions_of(flow) if found.softmax is anchor)

    def demands(self, flow: Dataflow, anchor: fx.Node) -> Iterator[Demand]:
        """Native first, the projections from the latent inside; then as it stands; then both with a mask as a leaf."""
        if anchor in almost_attentions(flow):
            raise Mismatch(almost_attentions(flow)[anchor])
        found = self._attention(flow, anchor)
        plain = list(self._plain_demands(flow, found))
        yield from plain
        for demand in plain:
            sizes = [(b, t, s) for b, t, _ in self._rows_and_heads(found) for s in found.known_keys.values()]
            for mask in dict.fromkeys(mask for size in sizes for mask in mask_inputs(flow, demand.core, size)):
                if mask is not found.indices:
                    yield replace(demand, kept=(*demand.kept, mask))

    def _plain_demands(self, flow: Dataflow, found: Attention) -> Iterator[Demand]:
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
        known_keys = found.known_keys

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
        found = with_plain_integers(leaves)
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
        for layout, table in itertools.product(_index_layouts(found.indices), _tables(integers)):
            letters = {"b": layout.size("b", shape), "t": layout.size("t", shape), "out": numel_of(found.output)}
            letters |= found.known_keys
            counts = [n for n in integers if n not in (table or ())]
            for mask, (floats, weights) in itertools.product(
                _masks(flow, region, letters), _latents_and_weights(found, region)
            ):
                floats = [leaf for leaf in floats if mask is None or leaf is not mask.leaf]
                for form in forms(floats, weights, table, letters):
                    known = {"b": letters["b"], "t": letters["t"], "h": form.queries[0].size("h")}
                    for output in distinct_layouts(shape_of(found.output), "bthv", known):
                        for producer in producers_of(flow, found.indices, region):
                            yield AttentionReading(region, found, form, layout, output, counts, producer, mask)

    def guards(self, flow: Dataflow, region: Region, reading: Reading) -> None:
        """No probabilities leave, and no key that the row does not see is read."""
        assert isinstance(reading, AttentionReading)
        visibility: Visibility = reading.learned["visibility"]
        hides = visibility.mask is not None or not visibility.everything
        if not hides and reading.producer.fills_with_hidden_keys:
            raise Mismatch(
                "rows with fewer visible keys than are selected would read keys of the future: the attention masks "
                "neither by position nor by -1"
            )
        mask = None if visibility.mask is None else visibility.mask.origin
        if reading.producer.fills_with_hidden_keys and reading.producer.mask != mask:
            raise Mismatch(
                "rows with fewer visible keys than are selected may read keys that the indexer hides: the attention "
                "has another mask than the indexer"
            )
        pairwise = numel_of(reading.found.indices)
        weighted = flow.descendants([reading.found.softmax])
        for node, reader in outside_users(flow, region.nodes, region.outputs).items():
            if numel_of(node) >= pairwise and is_float(node) and node in weighted:
                raise Mismatch(f"the attention weights are also read by {reader.name}: a fused attention has none")

    def resembles(self, flow: Dataflow, anchor: fx.Node) -> bool:
        """Something in this graph selected the indices; an integer input may as well be a block table."""
        return anchor in almost_attentions(flow) or self._attention(flow, anchor).indices.op != "placeholder"

    def hint(self, reason: str) -> str:
        """What to change."""
        if "another mask" in reason:
            return "give the indexer and the attention the same mask"
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


def _tables(integers: Sequence[fx.Node]) -> Iterator[Table | None]:
    """No block table, or one with a row for each of the batch, or with a row a request and whose token each is.

    Where a request has one block, whose token each is serves as a table.
    """
    yield None
    tables = [n for n in integers if len(shape_of(n)) == 2]
    lists = [n for n in integers if sum(size != 1 for size in shape_of(n)) <= 1]
    yield from ((table, None) for table in tables)
    yield from ((table, requests) for table in tables for requests in lists if table is not requests)
    yield from ((requests, None) for requests in lists if len(shape_of(requests)) == 1)


def _masks(flow: Dataflow, region: Region, letters: Mapping[str, int]) -> Iterator[MaskLeaf | None]:
    """No mask, or what the region reads as one."""
    if not any(is_boolean(leaf) for leaf in region.leaves):
        yield None
    if "s" in letters:
        yield from masks_among(flow, region, (letters["b"], letters["t"], letters["s"]))
