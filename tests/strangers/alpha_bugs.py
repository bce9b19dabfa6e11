"""Bugs in decays that are made before the heads are split, by a sigmoid or an exponential."""

import torch
import torch.nn.functional as F
from torch import nn


class WrongAlpha(nn.Module):
    def __init__(self, bug, d=20, h=3, dk=8):
        super().__init__()
        self.bug, self.h, self.dk = bug, h, dk
        self.proj = nn.Linear(d, h * (4 * dk + 1), bias=False)

    def decays(self, a):
        if self.bug.startswith("an exponential"):
            alpha = torch.exp(-F.softplus(a))
            if self.bug.endswith("channels first"):
                return alpha.unflatten(-1, (self.dk, self.h)).transpose(-1, -2)
            return alpha.unflatten(-1, (self.h, self.dk)).roll(1, dims=-2)
        alpha = torch.tanh(a) if self.bug == "decays below zero" else torch.sigmoid(a)
        return alpha.unflatten(-1, (self.h, self.dk))

    def forward(self, x, S):
        n = self.h * self.dk
        q, k, v, a, beta = self.proj(x).split([n, n, n, n, self.h], -1)
        q, k, v = (t.unflatten(-1, (self.h, -1)) for t in (q, k, v))
        q, k, alpha, out = F.normalize(q, dim=-1), F.normalize(k, dim=-1), self.decays(a), []
        for t in range(x.shape[1]):
            old, decay = S, alpha[:, 0 if self.bug == "the first token's decay for all" else t]
            S = S * (decay[..., None, :] if self.bug == "a sigmoid on the value side" else decay[..., None])
            source = old if self.bug == "a sigmoid after the prediction" else S
            seen = torch.einsum("bhk,bhkv->bhv", k[:, t], source)
            S = S + k[:, t, ..., None] * (beta[:, t].sigmoid()[..., None] * (v[:, t] - seen))[..., None, :]
            out.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S))
        return torch.stack(out, 1), S


ALPHA_BUGS = (
    "decays below zero",
    "the first token's decay for all",
    "a sigmoid on the value side",
    "a sigmoid after the prediction",
    "an exponential, channels first",
    "an exponential, heads rolled",
)
