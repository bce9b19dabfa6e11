"""The lightning indexer in anyone's spelling: score every key, keep the best (K3.1 spec 2.8, 3.1).

score[b, t, s] = sum_h w[b, t, h] relu(q[b, t, h] . k[b, s]),  hidden keys -inf,  then top-k over s
"""

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from torch import fx

from k31compile.graph.confirm import Mismatch, Reading
from k31compile.graph.dataflow import Dataflow
from k31compile.graph.layout import Layout, layouts
from k31compile.graph.region import Region
from k31compile.graph.sizes import (
    is_float,
    is_integer,
    numel_of,
    shape_of,
)
from k31compile.passes.recognise.contractions import contracted_sizes, contractions_at_depth, operands
from k31compile.passes.recognise.engine import Demand, Recogniser, outside_users
from k31compile.passes.recognise.indexer_reading import IndexerReading
from k31compile.passes.recognise.masks import Sizes, is_boolean, mask_inputs, masks_among
from k31compile.passes.recognise.operands import (
    Dense,
    FlatHeads,
    Paged,
    matrix_operands,
    paged_source,
    weight_operands,
    with_plain_integers,
)
from k31compile.passes.recognise.selection import Selection, require_indices_only, selection_of


class LightningIndexerRecogniser(Recogniser):
    """Anchored on a top-k, a sort or an argsort; the score above it must be the indexer's."""

    name = "lightning_indexer"

    def anchors(self, flow: Dataflow) -> Iterable[fx.Node]:
        """Every selection of the best along a dimension."""
        return [node for node in flow.nodes if selection_of(flow, node) is not None]

    def demands(self, flow: Dataflow, anchor: fx.Node) -> Iterator[Demand]:
        """The score with one or two levels of contractions inside: heads reduced by one, dots made by the other.

        First without and then with a mask as a leaf: keys hidden by position need none.
        """
        selection = selection_of(flow, anchor)
        assert selection is not None
        require_indices_only(flow, selection)
        if not list(_readings_of_scores(selection)):
            raise Mismatch(
                f"the selection runs over dimension {selection.dim} of a tensor {list(shape_of(selection.scores))}: "
                "the heads are not summed before it"
            )
        plain = list(self._plain_demands(flow, selection, weight_operands(flow)))
        if matrix_operands(flow) != weight_operands(flow):
            plain += self._plain_demands(flow, selection, matrix_operands(flow))
        yield from plain
        for demand in plain:
            sizes = [_sizes(scores, selection) for scores in _readings_of_scores(selection)]
            for mask in dict.fromkeys(mask for size in sizes for mask in mask_inputs(flow, demand.core, size)):
                yield replace(demand, kept=(mask,))

    def _plain_demands(self, flow: Dataflow, selection: Selection, weights: set[fx.Node]) -> Iterator[Demand]:
        # What marks empty slots may read positions by another way than what hides keys does.
        marks = flow.between([selection.anchor], [selection.final]) | {selection.anchor, selection.final}
        for depth in (1, 2, 3):
            dots = contractions_at_depth(flow, selection.scores, depth)
            # What has a weight is a projection of q, k or w: it makes an operand and is never inside.
            dots = {node for node in dots if not weights.intersection(operands(node))}
            if not dots:
                return
            core = flow.between(dots, [selection.scores]) | {selection.scores} | marks
            for heads, width in _heads_and_widths(dots, selection):
                roles = list(self._roles(selection, heads, width))
                eligible = functools.cache(functools.partial(_may_be_leaf, selection, weights, roles))
                yield Demand((selection.scores, selection.final), frozenset(core), eligible)

    def _roles(self, selection: Selection, heads: int, width: int) -> Iterator[tuple[str, dict[str, int]]]:
        """The letters and sizes of each operand, for each way to read the scores."""
        for scores in _readings_of_scores(selection):
            b, t, s = _sizes(scores, selection)
            yield "bthd", {"b": b, "t": t, "h": heads, "d": width}
            yield "btf", {"b": b, "t": t, "f": heads * width}
            yield "bsd", {"b": b, "s": s, "d": width}
            yield "bth", {"b": b, "t": t, "h": heads}

    def variants(self, flow: Dataflow, leaves: tuple[fx.Node, ...]) -> Iterator[tuple[fx.Node, ...]]:
        """The pages behind a gathered key first: then no contiguous copy of the keys is ever made."""
        found = with_plain_integers(leaves)
        for leaf in found:
            source = paged_source(leaf) if is_float(leaf) else None
            if source is not None:
                yield (*(other for other in found if other is not leaf), *source)
        yield found

    def readings(self, flow: Dataflow, anchor: fx.Node, region: Region) -> Iterator[Reading]:
        """q, k and w by shape: dimensions of size one dropped, the rest in any order."""
        selection = selection_of(flow, anchor)
        assert selection is not None
        floats = [leaf for leaf in region.leaves if is_float(leaf)]
        integers = [leaf for leaf in region.leaves if is_integer(leaf)]
        booleans = [leaf for leaf in region.leaves if is_boolean(leaf)]
        if len(floats) + len(integers) + len(booleans) != len(region.leaves):
            return
        for scores in _readings_of_scores(selection):
            for mask in (None, *masks_among(flow, region, _sizes(scores, selection))):
                masking = None if mask is None else mask.leaf
                rest = [leaf for leaf in floats if leaf is not masking]
                if len(rest) != 3 or any(leaf is not masking for leaf in booleans):
                    continue
                for query, key, weights, counts in _assignments(rest, integers, scores, shape_of(selection.scores)):
                    yield IndexerReading(region, selection, scores, query, key, weights, counts, mask)

    def guards(self, flow: Dataflow, region: Region, reading: Reading) -> None:
        """The scores belong to the selection alone."""
        assert isinstance(reading, IndexerReading)
        pairwise = numel_of(reading.selection.scores)
        scored = flow.descendants(operand.leaf for operand in (reading.query, reading.weights))
        for node, reader in outside_users(flow, region.nodes, region.outputs[-1:]).items():
            if numel_of(node) >= pairwise and is_float(node) and node in scored:
                raise Mismatch(
                    f"the scores are also read by {reader.name}"
                    f"{' (returned)' if reader.op == 'output' else ''}: a fused indexer has none to give"
                )

    def resembles(self, flow: Dataflow, anchor: fx.Node) -> bool:
        """Activations are contracted with each other in the last step above the selection: a router has weights there.

        The weights of the heads, which come from a projection, are as near.
        """
        selection = selection_of(flow, anchor)
        assert selection is not None
        weights = matrix_operands(flow)
        near = contractions_at_depth(flow, selection.scores, 1)
        return any(not weights.intersection(operands(node)) for node in near)

    def hint(self, reason: str) -> str:
        """What to change."""
        if "also read" in reason or "values" in reason:
            return "use only the indices of the top-k"
        return "the recognised form is topk(sum_h w * relu(q . k)) with future keys at -inf"


def _readings_of_scores(selection: Selection) -> Iterator[Layout]:
    """The ways to read the scores as [B, T, S], the selection running over S."""
    shape = shape_of(selection.scores)
    for scores in layouts(shape, "bts", {"s": shape[selection.dim]}):
        if scores.dims[2] == selection.dim:
            yield scores


def _sizes(scores: Layout, selection: Selection) -> Sizes:
    b, t, s = (scores.size(letter, shape_of(selection.scores)) for letter in "bts")
    return b, t, s


def _heads_and_widths(dots: Iterable[fx.Node], selection: Selection) -> Iterator[tuple[int, int]]:
    """How many heads the dots have together, and over how many features each runs."""
    dots = list(dots)
    heads = sum(numel_of(node) for node in dots) // max(1, numel_of(selection.scores))
    for width in dict.fromkeys(width for node in dots for width in contracted_sizes(node)):
        yield heads, width


def _may_be_leaf(
    selection: Selection, weights: set[fx.Node], roles: Sequence[tuple[str, dict[str, int]]], node: fx.Node
) -> bool:
    if is_integer(node):
        return numel_of(node) <= numel_of(selection.scores)
    if not is_float(node) or node in weights:
        return False
    return any(next(layouts(shape_of(node), letters, known), None) for letters, known in roles)


def _assignments(
    floats: Sequence[fx.Node], integers: Sequence[fx.Node], scores: Layout, shape: Sequence[int]
) -> Iterator[tuple[Dense, Dense | Paged, Dense, list[fx.Node]]]:
    known = {letter: scores.size(letter, shape) for letter in "bts"}
    for weights_leaf in floats:
        for weights_layout in layouts(shape_of(weights_leaf), "bth", {x: known[x] for x in "bt"}):
            heads = weights_layout.size("h", shape_of(weights_leaf))
            for query_leaf in floats:
                if query_leaf is weights_leaf:
                    continue
                key_leaf = next(leaf for leaf in floats if leaf not in (query_leaf, weights_leaf))
                weights = Dense(weights_leaf, weights_layout)
                for query in _queries(query_leaf, {"b": known["b"], "t": known["t"]}, heads):
                    width = query.size("d")
                    for table in integers:
                        paged = _paged_key(key_leaf, table, known, width)
                        if paged is not None:
                            yield query, paged, weights, [leaf for leaf in integers if leaf is not table]
                    for key_layout in layouts(shape_of(key_leaf), "bsd", {**known, "d": width}):
                        yield query, Dense(key_leaf, key_layout), weights, list(integers)


def _queries(leaf: fx.Node, rows: Mapping[str, int], heads: int) -> Iterator[Dense]:
    """A leaf as queries of some heads: in a dimension of their own, or else side by side in one."""
    shape, found = shape_of(leaf), False
    for layout in layouts(shape, "bthd", {**rows, "h": heads}):
        found = True
        yield Dense(leaf, layout)
    for flat in () if found else layouts(shape, "btf", rows):
        if flat.size("f", shape) % heads == 0:
            yield FlatHeads(leaf, flat, heads)


def _paged_key(pages: fx.Node, table: fx.Node, known: Mapping[str, int], width: int) -> Paged | None:
    shape, columns = shape_of(pages), shape_of(table)
    if len(shape) not in (3, 4) or len(columns) != 2 or shape[-1] != width or (len(shape) == 4 and shape[2] != 1):
        return None
    fits = columns[0] == known["b"] and columns[1] * shape[1] == known["s"]
    return Paged(pages, table) if fits else None
