"""Tensors whose axes may hold two letters at once, [B, T, H * K] or [B * T, H, K], as operands of a layer."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import fx

from k31compile.graph.layout import Layout
from k31compile.graph.sizes import shape_of, value_of
from k31compile.passes.recognise.delta_reading import plain_layouts

_PAIRS = (("b", "t"), ("h", "k"), ("h", "v"))


@dataclass(frozen=True)
class Form:
    """How a tensor holds some letters: axes to split, each into two of which the second has a size; then a layout."""

    splits: tuple[tuple[int, int], ...]
    layout: Layout

    def canonical(self, tensor: torch.Tensor) -> torch.Tensor:
        """View a tensor of this form with its letters in order, one dimension each."""
        sizes: list[Any] = list(tensor.shape)
        for dim, inner in reversed(self.splits):
            sizes[dim : dim + 1] = [sizes[dim] // inner, inner]
        present = [dim for dim in self.layout.dims if dim is not None]
        if present == sorted(present):  # one view where the letters are in order
            sizes = [1 if dim is None else sizes[dim] for dim in self.layout.dims]
            return tensor if len(sizes) == tensor.dim() and not self.splits else tensor.reshape(sizes)
        return self.layout.canonical(tensor.reshape(sizes))

    def restore(self, canonical: torch.Tensor, rank: int) -> torch.Tensor:
        """The inverse of `canonical` for a tensor of `rank` dimensions."""
        tensor = self.layout.restore(canonical, rank + len(self.splits))
        for dim, _ in self.splits:
            tensor = tensor.flatten(dim, dim + 1)
        return tensor


def forms(node: fx.Node, letters: str, known: Mapping[str, int]) -> Iterator[Form]:
    """Every form in which a tensor may hold these letters, whose sizes are known; those without splits first."""
    shape = shape_of(node)
    pairs = [pair for pair in _PAIRS if set(pair) <= set(letters)]
    for count in range(len(pairs) + 1):
        found = False
        for chosen in combinations(pairs, count):
            for dims in _placed(shape, [known[a] * known[b] for a, b in chosen]):
                splits = tuple(sorted((dim, known[pair[1]]) for dim, pair in zip(dims, chosen, strict=True)))
                for layout in plain_layouts(_split(shape, splits), letters, known):
                    found = True
                    yield Form(splits, layout)
        if found:
            return


def _placed(shape: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Distinct dimensions that have these sizes, in order."""
    if not sizes:
        yield ()
        return
    for dim, size in enumerate(shape):
        if size == sizes[0]:
            for rest in _placed(shape, sizes[1:]):
                if dim not in rest:
                    yield (dim, *rest)


def _split(shape: Sequence[int], splits: tuple[tuple[int, int], ...]) -> list[int]:
    sizes = list(shape)
    for dim, inner in reversed(splits):
        sizes[dim : dim + 1] = [sizes[dim] // inner, inner]
    return sizes


@dataclass(frozen=True)
class Held:
    """A node that holds an operand or a result in some form."""

    node: fx.Node
    form: Form

    def canonical(self, values: Mapping[fx.Node, torch.Tensor]) -> torch.Tensor:
        """The operand with its letters in order."""
        return self.form.canonical(values[self.node])

    def canonical_of(self, value: torch.Tensor) -> torch.Tensor:
        """A value of the node with its letters in order."""
        return self.form.canonical(value)

    def restore(self, canonical: torch.Tensor) -> torch.Tensor:
        """The node's value for a canonical operand."""
        return self.form.restore(canonical, value_of(self.node).dim())
