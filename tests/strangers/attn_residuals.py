"""Attention over depth, as two people write it."""

import torch
import torch.nn.functional as F
from stranger import Stranger
from torch import nn


# 1. A kernel library: sources stacked in front, rms_norm, einsum, softmax over axis 0.
def naive_attnres(sources, query, weight, eps=1e-5):
    values = torch.stack(sources, dim=0)
    keys = F.rms_norm(values.float(), (values.shape[-1],), weight, eps)
    logits = torch.einsum("n b t d, d -> n b t", keys, query)
    return torch.einsum("n b t, n b t d -> b t d", logits.softmax(dim=0), values.float()).to(values.dtype)


class TwoLayers(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.queries = nn.ParameterList([torch.randn(d) for _ in range(2)])
        self.weights = nn.ParameterList([torch.rand(d) + 0.5 for _ in range(2)])
        self.mix = nn.ModuleList([nn.Linear(d, d) for _ in range(2)])

    def forward(self, x, older):
        partial = x
        for query, weight, mix in zip(self.queries, self.weights, self.mix, strict=True):
            partial = partial + mix(naive_attnres([*older, partial], query, weight))
        return partial


# 2. A serving engine: a bank [T, N, D], the valid part sliced, logits by a bias-free linear.
class BankLayer(nn.Module):
    def __init__(self, hidden=20, valid=3):
        super().__init__()
        self.norm = nn.RMSNorm(hidden, eps=1e-5)
        self.proj = nn.Linear(hidden, 1, bias=False)
        self.mlp = nn.Sequential(nn.Linear(hidden, 12), nn.GELU(), nn.Linear(12, hidden))
        self.valid = valid

    def forward(self, prefix, bank):
        rows = torch.cat([bank[:, : self.valid], prefix.unsqueeze(1)], dim=1)
        logits = self.proj(self.norm(rows)).squeeze(-1)
        probs = torch.softmax(logits.float(), dim=-1)
        mixed = (probs.unsqueeze(-1) * rows.float()).sum(1).to(prefix.dtype)
        return prefix + self.mlp(mixed)


STRANGERS = [
    Stranger(
        "stacked_list",
        lambda: (TwoLayers(), (torch.randn(2, 3, 16), [torch.randn(2, 3, 16), torch.randn(2, 3, 16)])),
        {"attn_res_prepare": 1, "attn_res_update": 2},
    ),
    Stranger(
        "sliced_bank",
        lambda: (BankLayer(), (torch.randn(5, 20), torch.randn(5, 4, 20))),
        {"attn_res_prepare": 1, "attn_res_update": 1},
    ),
]
