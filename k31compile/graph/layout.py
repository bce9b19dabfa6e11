"""Which dimension of a tensor is which letter of an operator, and the views between the two."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from k31compile.graph.portable import portable


@portable
@dataclass(frozen=True)
class Layout:
    """`dims[j]` is the tensor's dimension that holds letter `letters[j]`, or None where that letter has size one."""

    letters: str
    dims: tuple[int | None, ...]

    def size(self, letter: str, shape: Sequence[int]) -> int:
        """The size of a letter in a tensor of this shape."""
        dim = self.dims[self.letters.index(letter)]
        return 1 if dim is None else shape[dim]

    def canonical(self, tensor: torch.Tensor) -> torch.Tensor:
        """View a tensor of this layout with its letters in order, one dimension each."""
        present = [d for d in self.dims if d is not None]
        rest = [d for d in range(tensor.dim()) if d not in present]
        moved = tensor.permute(*present, *rest) if present + rest != list(range(tensor.dim())) else tensor
        for _ in rest:
            moved = moved.squeeze(-1)
        for j, dim in enumerate(self.dims):
            if dim is None:
                moved = moved.unsqueeze(j)
        return moved

    def restore(self, canonical: torch.Tensor, rank: int) -> torch.Tensor:
        """The inverse of `canonical` for a tensor of `rank` dimensions."""
        moved = canonical
        for j in reversed(range(len(self.letters))):
            if self.dims[j] is None:
                moved = moved.squeeze(j)
        present = [d for d in self.dims if d is not None]
        rest = [d for d in range(rank) if d not in present]
        for _ in rest:
            moved = moved.unsqueeze(-1)
        order = present + rest
        inverse = [order.index(d) for d in range(rank)]
        return moved.permute(*inverse) if inverse != list(range(rank)) else moved


def layouts(shape: Sequence[int], letters: str, known: Mapping[str, int]) -> Iterator[Layout]:
    """Every layout that gives `shape` these letters; letters in `known` must have their size, others any.

    Dimensions of size one may be left over; a letter may be absent only where its size is (or may be) one.
    The order that the author most likely wrote, letters ascending through the dimensions, comes first.
    """

    def assign(j: int, taken: tuple[int | None, ...]) -> Iterator[tuple[int | None, ...]]:
        if j == len(letters):
            if all(shape[d] == 1 for d in range(len(shape)) if d not in taken):
                yield taken
            return
        want = known.get(letters[j])
        for dim in range(len(shape)):
            if dim not in taken and (want is None or shape[dim] == want) and (want is not None or shape[dim] != 1):
                yield from assign(j + 1, (*taken, dim))
        if want is None or want == 1:
            yield from assign(j + 1, (*taken, None))

    def disorder(layout: Layout) -> tuple[int, int]:
        present = [d for d in layout.dims if d is not None]
        swaps = sum(a > b for i, a in enumerate(present) for b in present[i + 1 :])
        return (sum(d is None for d in layout.dims), swaps)

    yield from sorted((Layout(letters, dims) for dims in assign(0, ())), key=disorder)


def distinct_layouts(shape: Sequence[int], letters: str, known: Mapping[str, int]) -> Iterator[Layout]:
    """Those of `layouts` that give different views: which dimension of size one is which letter makes no difference."""
    seen: set[tuple[int | None, ...]] = set()
    for layout in layouts(shape, letters, known):
        wide = tuple(None if dim is None or shape[dim] == 1 else dim for dim in layout.dims)
        if wide not in seen:
            seen.add(wide)
            yield layout
