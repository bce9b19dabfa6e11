"""Small models with all that a call can hold: containers, classes, constants, state that is updated in place."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from k31compile.entry import Entry


class Pages(NamedTuple):
    """A cache of one layer; the second may be missing."""

    keys: Tensor
    extra: Tensor | None


@dataclass
class Store:
    """Caches of all layers."""

    layers: list[Pages]
    room: int


@dataclass(frozen=True)
class Answer:
    """What the model gives back."""

    scores: Tensor
    first: Tensor
    store: Store
    parts: dict[str, Any]


class Rich(nn.Module):
    """Writes into its caches and its own buffer, and returns everything that an answer may hold."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)
        self.tied = self.linear.weight
        self.register_buffer("seen", torch.zeros(1, 8))
        self.register_buffer("table", torch.arange(8.0), persistent=False)
        self.plain = torch.full((8,), 0.5)

    def forward(self, x: Tensor, store: Store, mask: Tensor | None = None, *, scale: float = 2.0, name: str = "a"):
        """x [2, 3, 8]; the keys of the first layer [2, 16, 8] get it at their begin."""
        keys = store.layers[0].keys
        keys[:, : x.shape[1]] += x
        self.seen.add_(x.mean((0, 1))[None])
        scores = (self.linear(x) @ self.tied).relu().sum(1) * scale + self.plain + self.table + self.seen
        if mask is not None:
            scores = scores.masked_fill(mask, 0)
        parts = {"same": x, "none": None, "name": name, "pair": (scores + 1, 3), "dtype": x.dtype}
        return Answer(scores, keys[0], store, parts)


class Many(nn.Module):
    """Takes any length."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        """x [2, T, 4], weights [T, 2] -> [2, 4]."""
        return (self.linear(x) * weights.t()[..., None]).sum(1)


def rich_arguments(seed: int = 0) -> tuple[Tensor, Store]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 3, 8, generator=generator)
    return x, Store([Pages(torch.randn(2, 16, 8, generator=generator), None)], 16)


def many_arguments(length: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, length, 4, generator=generator), torch.randn(length, 2, generator=generator)


DYNAMIC = {"0": {1: ("T", 1, 9)}, "weights": {0: ("T", 1, 9)}}


def rich() -> Entry:
    return Entry("rich", Rich().eval(), rich_arguments())


def many() -> Entry:
    x, weights = many_arguments(5)
    return Entry("many", Many().eval(), (x,), {"weights": weights}, dynamic=DYNAMIC)
