"""Leaves as operands: dense tensors of some layout, or pages behind a block table."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from k31compile.graph.dataflow import ATEN, Dataflow
from k31compile.graph.layout import Layout
from k31compile.graph.sizes import Substitution, is_float, is_integer, numel_of, shape_of, shape_under, value_of
from k31compile.graph.views import behind_views_and_casts, is_view, same_size_base
from k31compile.passes.recognise.contractions import operands

Values = Mapping[fx.Node, torch.Tensor]

_CACHE_WRITES = {
    ATEN.index_put.default,
    ATEN.index_copy.default,
    ATEN.slice_scatter.default,
    ATEN.select_scatter.default,
    ATEN.scatter.src,
    ATEN.copy.default,
    ATEN.cat.default,
}


@dataclass(frozen=True)
class Dense:
    """A leaf that holds the operand, its letters in some order."""

    leaf: fx.Node
    layout: Layout

    def size(self, letter: str, substitution: Substitution | None = None) -> int:
        """The size of a letter, by hints or under a substitution."""
        shape = shape_of(self.leaf) if substitution is None else shape_under(self.leaf, substitution)
        return self.layout.size(letter, shape)

    def place(self, canonical: torch.Tensor) -> dict[fx.Node, torch.Tensor]:
        """The leaf's value for a canonical operand."""
        return {self.leaf: self.layout.restore(canonical, value_of(self.leaf).dim()).contiguous()}

    def canonical(self, values: Values) -> torch.Tensor:
        """The operand with its letters in order."""
        return self.layout.canonical(values[self.leaf])


@dataclass(frozen=True)
class FlatHeads(Dense):
    """Heads side by side in one dimension, which is cut into them: its layout has the letter f for h and d."""

    heads: int

    def size(self, letter: str, substitution: Substitution | None = None) -> int:
        """The size of b, t, h or d."""
        if letter == "h":
            return self.heads
        return super().size("f", substitution) // self.heads if letter == "d" else super().size(letter, substitution)

    def place(self, canonical: torch.Tensor) -> dict[fx.Node, torch.Tensor]:
        """The leaf's value for a canonical operand [B, T, H, D]."""
        return super().place(canonical.flatten(2))

    def canonical(self, values: Values) -> torch.Tensor:
        """The operand with its heads split, [B, T, H, D]."""
        flat = super().canonical(values)
        return flat.reshape(*flat.shape[:2], self.heads, flat.shape[2] // self.heads)


@dataclass(frozen=True)
class Paged:
    """Pages [blocks, page, (1,) d] and a block table [B, n] that names the block of each page of positions.

    With `requests` the table has a row a request, and these integers [B] say whose row each of the batch reads. A table
    [B] has one block for each of the batch.
    """

    pages: fx.Node
    table: fx.Node
    requests: fx.Node | None = None

    def size(self, letter: str, substitution: Substitution | None = None) -> int:
        """The size of letter b, s or d, or of r for the rows of the table."""
        of = shape_of if substitution is None else lambda node: shape_under(node, substitution)
        rows, blocks = rows_and_blocks(of(self.table))
        pages = of(self.pages)
        batch = rows if self.requests is None else math.prod(of(self.requests))
        return {"b": batch, "s": blocks * pages[1], "d": pages[-1], "r": rows}[letter]

    @property
    def is_by_request(self) -> bool:
        """Whether the batch may be tokens of which several belong to one request."""
        return self.requests is not None or len(shape_of(self.table)) != 2

    def place(self, canonical: torch.Tensor, table: torch.Tensor, shape: Sequence[int]) -> dict[fx.Node, torch.Tensor]:
        """Pages that hold a canonical operand [B, S, d] behind `table`, or blocks [n, page, d]; others are NaN."""
        pages = torch.full(tuple(shape), torch.nan, dtype=canonical.dtype)
        pages.view(shape[0], shape[1], -1)[table.reshape(-1)] = canonical.reshape(-1, shape[1], canonical.shape[-1])
        return {self.pages: pages}

    def cache(self, values: Values) -> torch.Tensor:
        """[blocks, page, 1, d], as the operators take it."""
        pages = values[self.pages]
        return pages.unsqueeze(2) if pages.dim() == 3 else pages

    def block_table(self, values: Values) -> torch.Tensor:
        """[B, n], as the operators take it."""
        table = values[self.table]
        table = table if table.dim() == 2 else table.reshape(-1, 1)
        return table if self.requests is None else table.index_select(0, values[self.requests].reshape(-1))


def rows_and_blocks(table: Sequence[int]) -> tuple[int, int]:
    """How many rows a block table of this shape has, and how many blocks each names."""
    return (table[0], table[1]) if len(table) == 2 else (math.prod(table), 1)


def sample_table(table: fx.Node, blocks: int, substitution: Substitution, generator: torch.Generator) -> torch.Tensor:
    """A block table of distinct blocks, block 0 left out where there are enough.

    A table has room for the longest requests and a pool need not hold all of them at once: rows then share blocks.
    """
    shape = shape_under(table, substitution)
    batch, columns = rows_and_blocks(shape)
    if blocks < batch * columns:
        chosen = torch.rand((batch, blocks), generator=generator).argsort(-1)[:, torch.arange(columns) % blocks]
    else:
        first = 1 if blocks > batch * columns else 0
        chosen = torch.randperm(blocks - first, generator=generator)[: batch * columns] + first
    return chosen.reshape(shape).to(value_of(table).dtype)


def sample_requests(
    leaf: fx.Node, requests: int, substitution: Substitution, generator: torch.Generator
) -> dict[fx.Node, torch.Tensor]:
    """Whose token each is: any request, the last among them."""
    drawn = torch.randint(0, requests, tuple(shape_under(leaf, substitution)), generator=generator)
    drawn.view(-1)[-1:] = requests - 1
    return {leaf: drawn.to(value_of(leaf).dtype)}


def paged_source(leaf: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """`(pages, block table)` where the leaf is a gather of whole pages, `pages[table]` with any views around."""
    gather = same_size_base(_without_casts(leaf))
    if gather.target is ATEN.index.Tensor:
        pages, indices = gather.args[0], gather.args[1]
        if not isinstance(indices, list | tuple) or len(indices) != 1:
            return None
        index = indices[0]
    elif gather.target is ATEN.index_select.default and gather.args[1] == 0:
        pages, index = gather.args[0], gather.args[2]
    elif gather.target is ATEN.embedding.default:
        pages, index = gather.args[0], gather.args[1]
    else:
        return None
    if not isinstance(pages, fx.Node) or not isinstance(index, fx.Node):
        return None
    table = same_size_base(_without_casts(index))
    return (pages, table) if is_pool(pages) and len(shape_of(table)) == 2 and is_integer(table) else None


def is_pool(node: fx.Node) -> bool:
    """Whether the node has the shape of pages, [blocks, page, d] or [blocks, page, 1, d]."""
    shape = shape_of(node)
    return len(shape) == 3 or (len(shape) == 4 and shape[2] == 1)


def pages_behind(leaf: fx.Node) -> fx.Node | None:
    """The pages that a flat view [slots, d] of a cache was made from."""
    node = leaf
    while not is_pool(node):
        if not is_view(node) or numel_of(node) != numel_of(leaf) or not isinstance(node.args[0], fx.Node):
            return None
        node = node.args[0]
    return node if shape_of(node)[-1] == shape_of(leaf)[-1] and is_cache(node) else None


def with_plain_integers(leaves: Iterable[fx.Node]) -> tuple[fx.Node, ...]:
    """The leaves, integer ones as they were before views and casts: two views of one position are one position."""

    def plain(leaf: fx.Node) -> fx.Node:
        base = _without_casts(leaf) if is_integer(leaf) else leaf
        return base if is_integer(base) == is_integer(leaf) else leaf

    return tuple(dict.fromkeys(plain(leaf) for leaf in leaves))


def _without_casts(node: fx.Node) -> fx.Node:
    while True:
        base = same_size_base(node)
        if base.target is not ATEN._to_copy.default:
            return base
        node = base.args[0]  # type: ignore[assignment]


def is_cache(node: fx.Node) -> bool:
    """Whether the node is a buffer of the caller, as given or after writes: what keys and pages live in."""
    while True:
        node = same_size_base(node)
        if node.op == "placeholder":
            return is_float(node) and not node.meta.get("is_parameter", False)
        if node.target not in _CACHE_WRITES or not isinstance(node.args[0], fx.Node):
            return False
        node = node.args[0]


def is_parameter(node: fx.Node) -> bool:
    """Whether the node is a weight of the model, or a view of one."""
    while node.op != "placeholder":
        following = same_size_base(node)
        if following is node:
            source = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
            if source is None or node.target not in (ATEN._to_copy.default, ATEN.select.int, ATEN.slice.Tensor):
                return False
            following = source
        node = following
    return bool(node.meta.get("is_parameter", False))


def weight_operands(flow: Dataflow) -> set[fx.Node]:
    """Nodes that are no leaf of an operator on activations: parameters, and what `linear` takes as its weight."""

    def find() -> set[fx.Node]:
        found = {node for node in flow.nodes if is_float(node) and is_parameter(node)}
        linears = [node for node in flow.nodes if node.target is ATEN.linear.default]
        return found | {node.args[1] for node in linears if isinstance(node.args[1], fx.Node)}

    return flow.remember("weight operands", find)


def matrix_operands(flow: Dataflow) -> set[fx.Node]:
    """The weight operands, and what looks like one where an author passes his weights as plain arguments.

    That is an input of the graph, possibly transposed or with its heads merged, which is multiplied with a computed
    value and is the same for all of its rows. A matrix of keys may look so too: who asks must not depend on it.
    """

    def find() -> set[fx.Node]:
        guessed = {
            operand
            for node in flow.nodes
            if node.target in (ATEN.matmul.default, ATEN.einsum.default)
            for operand in operands(node)[-1:]
            if _is_given(operand) and not any(_is_given(other) for other in operands(node)[:-1])
            if _serves_all_rows(node, operand)
        }
        return weight_operands(flow) | guessed

    return flow.remember("matrix operands", find)


def _is_given(node: fx.Node) -> bool:
    return behind_views_and_casts(node).op == "placeholder"


def _serves_all_rows(product: fx.Node, last: fx.Node) -> bool:
    """Whether the last operand has no dimension for the rows, or requests, of the first: those of keys have one."""
    if product.target is ATEN.matmul.default:
        return len(shape_of(last)) == 2 and len(shape_of(product)) > 2
    inputs, _, output = str(product.args[0]).replace(" ", "").partition("->")
    *others, mine = inputs.split(",")
    return len(others) == 1 and "." not in inputs and others[0][0] in output and others[0][0] not in mine


def spread(shape: Sequence[int], generator: torch.Generator, decades: float, dims: int) -> torch.Tensor:
    """Normal values whose magnitude varies over decades along the first `dims` dimensions, in float64."""
    values = torch.randn(tuple(shape), generator=generator, dtype=torch.float64)
    lead = (*shape[:dims], *[1] * (len(shape) - dims))
    powers = (torch.rand(lead, generator=generator, dtype=torch.float64) * 2 - 1) * decades
    return values * 10**powers


def in_dtype(result: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The result in the author's dtype, without a cast that would change nothing."""
    return result if result.dtype == dtype else result.to(dtype)
