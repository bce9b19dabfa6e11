"""Masks over the keys that the caller gives: padding, causality, biases, whatever their maker put in.

Nothing is assumed of their content, so they are leaves of their own and become the operators' `mask` as they are; the
samples hold anything that a mask can hold. What the graph makes of positions alone is a rule and no such mask:
visibility.py knows the rules.
"""

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from k31compile.graph.dataflow import ATEN, Dataflow
from k31compile.graph.layout import Layout, layouts
from k31compile.graph.portable import portable
from k31compile.graph.region import Region
from k31compile.graph.sizes import is_float, is_integer, is_tensor, shape_of, value_of
from k31compile.graph.views import CASTS, behind_views_and_casts, is_view, same_size_base
from k31compile.kernels.visibility import masked_out
from k31compile.passes.recognise.mask_origin import NOTS, MaskOrigin, mask_origin

Sizes = tuple[int, int, int]

# How the zeros and ones of a padding mask are read; positions are compared with each other.
_READS_TRUTH = {*CASTS, ATEN.ne.Scalar, ATEN.eq.Scalar, ATEN.logical_not.default}
# How a mask that is added comes in; other readers of floats are products of queries, keys and values.
_READS_BIAS = {
    ATEN.add.Tensor,
    ATEN.sub.Tensor,
    ATEN.masked_fill.Scalar,
    ATEN.masked_fill.Tensor,
    ATEN.where.self,
    ATEN.where.ScalarSelf,
    ATEN.where.ScalarOther,
    ATEN.gather.default,
    ATEN.take_along_dim.default,
    ATEN.scaled_dot_product_attention.default,
}


@portable
@dataclass(frozen=True)
class MaskLeaf:
    """A leaf that is a mask [B, T, S], or 1 for any of these: boolean, True showing a key if `shows`, or added.

    Of numbers that are a `truth` only zero or not is read, and zero hides.
    """

    leaf: fx.Node
    layout: Layout
    shows: bool = True
    truth: bool = False

    def readings(self) -> list["MaskLeaf"]:
        """The mask and, if it is a yes or no, its contrary."""
        is_added = is_float(self.leaf) and not self.truth
        return [self] if is_added else [self, replace(self, shows=not self.shows)]

    def operand(self, values: Mapping[fx.Node, torch.Tensor]) -> torch.Tensor:
        """As the operators take it: True shows, or a float that is added."""
        mask = self.layout.canonical(values[self.leaf])
        if self.truth:
            return mask.ne(0) if self.shows else mask.eq(0)
        return mask if self.shows else mask.logical_not()

    def seen(self, values: Mapping[fx.Node, torch.Tensor], sizes: Sizes) -> torch.Tensor:
        """Which keys it shows, boolean [B, T, S]."""
        return (~masked_out(self.operand(values))).expand(sizes)

    def bias(self, values: Mapping[fx.Node, torch.Tensor], sizes: Sizes) -> torch.Tensor:
        """What it adds to the scores that it shows, [B, T, S]; zeros of a boolean one."""
        mask = self.operand(values)
        if mask.dtype == torch.bool:
            return torch.zeros(sizes, dtype=torch.float64)
        return mask.masked_fill(masked_out(mask), 0.0).expand(sizes)

    @property
    def origin(self) -> MaskOrigin:
        """What the operand is made from."""
        return mask_origin(self.leaf, self.layout.dims, not self.shows, self.truth)


def mask_source(mask: fx.Node) -> tuple[fx.Node, bool]:
    """The node that a mask was made from by views and negations, and whether it was negated."""
    negated = False
    while True:
        mask = same_size_base(mask)
        if mask.target not in NOTS or not isinstance(mask.args[0], fx.Node) or not is_boolean(mask.args[0]):
            return mask, negated
        mask, negated = mask.args[0], not negated


def mask_inputs(flow: Dataflow, core: Collection[fx.Node], sizes: Sizes, given: bool = True) -> list[fx.Node]:
    """The masks that the nodes of `core` read, behind views and negations, in the order of the graph.

    Those of the caller alone if `given`: what a graph makes of positions is a rule to most.
    """
    found: dict[fx.Node, None] = {}
    for node in flow.in_order(core):
        for source in flow.inputs[node]:
            if source in flow.constants or not is_tensor(source) or is_integer(source):
                continue
            if is_float(source) and node.target not in _READS_BIAS and not _may_be_truth(node, source):
                continue
            mask, _ = mask_source(source)
            if mask not in core and next(mask_layouts(mask, sizes), None) is not None:
                found[mask] = None
    return [mask for mask in found if not given or _is_given(flow, mask, sizes[2])]


def _is_given(flow: Dataflow, mask: fx.Node, keys: int) -> bool:
    """Whether the caller's own yes and no for each key is in a mask, and not positions alone."""
    for node in flow.ancestors([mask]):
        if node.op == "placeholder" and not is_integer(node) and is_tensor(node):
            return True
        source = same_size_base(node.args[0]) if node.args and isinstance(node.args[0], fx.Node) else None
        if node.target in _READS_TRUTH and source is not None and source.op == "placeholder" and is_integer(source):
            shape = shape_of(source)
            # A padding mask may be as long as the history so far, and be padded up to the cache in the graph.
            if len(shape) > 1 and (is_boolean(node) or shape[-1] == keys):
                return True
    return False


def masks_among(flow: Dataflow, region: Region, sizes: Sizes, given: bool = True) -> Iterator[MaskLeaf]:
    """The leaf that the region reads as its one mask, or any that it could be, in every layout that shapes allow."""
    for leaf in mask_inputs(flow, set(region.nodes), sizes, given):
        if leaf in region.leaves and all(other is leaf or not is_boolean(other) for other in region.leaves):
            for layout, truth in itertools.product(mask_layouts(leaf, sizes), _truths(flow, region, leaf)):
                yield MaskLeaf(leaf, layout, truth=truth)


def _truths(flow: Dataflow, region: Region, leaf: fx.Node) -> list[bool]:
    """Whether a leaf may be numbers of which only zero or not is read: those are multiplied with, not added."""
    readers = [
        node
        for node in region.nodes
        if not is_view(node) and any(mask_source(source)[0] is leaf for source in flow.inputs[node])
    ]
    return [is_float(leaf) and bool(readers) and all(_may_be_truth(node, leaf) for node in readers)]


def _may_be_truth(reader: fx.Node, source: fx.Node) -> bool:
    """Whether a product with what is given, as `chosen * causal` is one before it is compared with zero."""
    given = behind_views_and_casts(source)
    return reader.target is ATEN.mul.Tensor and given.op == "placeholder" and not given.meta.get("is_parameter", False)


def is_boolean(node: fx.Node) -> bool:
    """Whether the node's value is a boolean tensor."""
    value = value_of(node)
    return isinstance(value, torch.Tensor) and value.dtype == torch.bool


def mask_layouts(node: fx.Node, sizes: Sizes) -> Iterator[Layout]:
    """The ways to read a node as a mask of sizes (b, t, s): for all keys, for each request and row or all of them."""
    b, t, s = sizes
    if is_integer(node) or not is_tensor(node):
        return
    seen: set[Layout] = set()
    for known_b, known_t in itertools.product(dict.fromkeys((b, 1)), dict.fromkeys((t, 1))):
        for layout in layouts(shape_of(node), "bts", {"b": known_b, "t": known_t, "s": s}):
            if layout not in seen:
                seen.add(layout)
                yield layout


def sample_mask(
    mask: MaskLeaf, shape: Sequence[int], generator: torch.Generator, trial: int
) -> dict[fx.Node, torch.Tensor]:
    """Any content: rows that show few, half or most keys, one that shows all or none, biases over six decades."""
    rows = torch.rand((*shape[:-1], 1), generator=generator)
    density = torch.where(rows < 1 / 3, 0.08, torch.where(rows < 2 / 3, 0.5, 0.92))
    drawn = torch.rand(tuple(shape), generator=generator) < density
    by_row = drawn.view(-1, shape[-1])
    if trial and (len(by_row) > 1 or trial % 4 > 1):
        by_row[0] = bool(trial % 2)
    if not is_float(mask.leaf):
        return {mask.leaf: drawn}
    sign = torch.randn(tuple(shape), generator=generator, dtype=torch.float64)
    bias = sign * 10 ** (6 * torch.rand(tuple(shape), generator=generator, dtype=torch.float64) - 3)
    if mask.truth:
        return {mask.leaf: torch.where(drawn, torch.where(sign > 1, 1.0, bias), 0.0)}
    bias = bias.masked_fill(torch.rand(tuple(shape), generator=generator) < 0.5, 0.0)
    low = -torch.inf if trial % 2 else torch.finfo(value_of(mask.leaf).dtype).min
    return {mask.leaf: torch.where(drawn, bias, low)}
