"""The model that the contracts of these tests are about, and what people do to it; also a target of the command."""

import torch
from torch import nn

from k31compile import Entry

WIDTH, HEADS, INDEX, LATENT, TOPK = 24, 3, 16, 16, 5


class Indexer(nn.Module):
    """Scores of all keys and the best of them."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, 8 * INDEX)
        self.key = nn.Linear(WIDTH, INDEX)
        self.weight = nn.Linear(WIDTH, 8)

    def activate(self, dots: torch.Tensor) -> torch.Tensor:
        return dots.relu()

    def forward(self, x: torch.Tensor, future: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        dots = torch.einsum("bthd,bsd->bths", self.query(x).view(batch, length, 8, INDEX), self.key(x))
        scores = (self.weight(x).unsqueeze(-1) * self.activate(dots)).sum(2)
        return scores.masked_fill(future, float("-inf")).topk(TOPK, dim=-1).indices


class SmoothIndexer(Indexer):
    """The refactoring that looks harmless."""

    def activate(self, dots: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(dots)


class Layer(nn.Module):
    """An attention over the chosen keys."""

    def __init__(self) -> None:
        super().__init__()
        self.indexer = Indexer()
        self.query, self.key, self.value = (nn.Linear(WIDTH, size) for size in (HEADS * LATENT, LATENT, WIDTH))
        self.out = nn.Linear(HEADS * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        chosen = self.indexer(x, future)
        mask = torch.zeros_like(future).expand(batch, -1, -1).scatter(-1, chosen, True) & ~future
        logits = torch.einsum("bthd,bsd->bths", self.query(x).view(batch, length, HEADS, LATENT), self.key(x)) * 0.25
        logits = logits.masked_fill(~mask.unsqueeze(2), float("-inf"))
        return x + self.out(torch.einsum("bths,bsd->bthd", logits.softmax(-1), self.value(x)).flatten(2))


class Stack(nn.Module):
    """Four layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.broken = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        if self.broken:
            torch._dynamo.graph_break()
        return x.cos()


def tokens(length: int = 19) -> torch.Tensor:
    return torch.randn(2, length, WIDTH, generator=torch.Generator().manual_seed(1))


def entry() -> Entry:
    return Entry("stack", Stack().eval(), (tokens(),))


def smooth() -> Entry:
    made = entry()
    made.model.layers[3].indexer.__class__ = SmoothIndexer
    return made


def split() -> Entry:
    made = entry()
    made.model.broken = True
    return made


def other() -> Entry:
    return Entry("another", Stack().eval(), (tokens(),))
