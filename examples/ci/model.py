"""The model that this example warms: an indexer that picks keys, as an author writes it, for a batch of requests."""

import torch
from torch import Tensor, nn

import k31compile

MOST_REQUESTS = 4
HISTORY = 32


class Picker(nn.Module):
    """For each request the history's positions that its token attends to, and their scores."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.weights = nn.Linear(16, 3 * 8), nn.Linear(16, 3)

    def forward(self, token: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        query = self.query(token).unflatten(-1, (3, 8))
        dots = torch.relu(torch.einsum("bthd,bsd->bths", query, keys))
        scores = (self.weights(token).unsqueeze(-1) * dots).sum(2)
        best = scores.topk(4, dim=-1)
        return best.indices, best.values


def arguments(requests: int) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(requests)
    return torch.randn(requests, 1, 16, generator=drawn), torch.randn(requests, HISTORY, 8, generator=drawn)


def decode() -> k31compile.Entry:
    """One token for each request."""
    bound = ("batch", 1, MOST_REQUESTS)
    dynamic = {"0": {0: bound}, "1": {0: bound}}
    return k31compile.Entry("decode", Picker().eval(), arguments(MOST_REQUESTS), dynamic=dynamic)
