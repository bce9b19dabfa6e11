"""Bugs that people really make, one a function: whatever is fused of them must keep the bug."""

import torch
import torch.nn.functional as F
from alpha_bugs import ALPHA_BUGS, WrongAlpha
from stranger import Stranger, sorted_choice
from torch import nn


# KDA, one token. `bug` is the order that somebody got wrong.
class WrongStep(nn.Module):
    def __init__(self, bug, d=20, h=3, dk=8, dv=8):
        super().__init__()
        self.bug, self.h, self.dk, self.dv = bug, h, dk, dv
        self.proj = nn.Linear(d, h * (3 * dk + dv + 1), bias=False)

    def forward(self, x, S):
        n = self.h * self.dk
        q, k, g, v, beta = self.proj(x).split([n, n, n, self.h * self.dv, self.h], -1)
        q, k, g, v = (t.unflatten(-1, (self.h, -1)) for t in (q, k, g, v))
        q, k, beta = F.normalize(q, dim=-1), F.normalize(k, dim=-1), beta.sigmoid()[..., None]
        decay = (-5.0 * g.sigmoid()).exp()
        old = S
        if self.bug == "decay on the value side":
            S = S * decay[..., None, :]
        elif self.bug != "decay after the write":
            S = S * decay[..., None]
        source = old if self.bug == "prediction from the undecayed state" else S
        seen = torch.einsum("bhk,bhkv->bhv", k, source)
        u = beta * v - seen if self.bug == "beta only on the value" else beta * (v - seen)
        if self.bug == "beta missing":
            u = v - seen
        new = S + k[..., None] * u[..., None, :]
        if self.bug == "decay after the write":
            new = new * decay[..., None]
        read = S if self.bug == "read before the write" else new
        return torch.einsum("bhk,bhkv->bhv", q, read) * self.dk**-0.5, new


STEP_BUGS = (
    "decay on the value side",
    "decay after the write",
    "prediction from the undecayed state",
    "beta only on the value",
    "beta missing",
    "read before the write",
)


# KDA, 16 tokens a chunk.
def wrong_chunk(bug, q, k, v, g, beta):
    b, t, h, dk = q.shape
    C, pad = 16, -t % 16
    q, k, v, g, beta = (x.transpose(1, 2) for x in (q, k, v, g, beta[..., None]))
    q, k, v, beta = (F.pad(x, (0, 0, 0, pad)) for x in (q, k, v, beta))
    g = F.pad(g, (0, 0, 0, pad), value=-1.0 if bug == "padding decays the state" else 0.0)
    q, k, v, g, beta = (x.unflatten(2, (-1, C)) for x in (q, k, v, g, beta))
    G = g.cumsum(-2)
    if bug == "the sum leaves its own gate out":
        G = G - g
    keep = torch.ones(C, C).tril().bool()
    D = (G[..., :, None, :] - G[..., None, :, :]).masked_fill(~keep[..., None], -torch.inf).exp()
    A = torch.einsum("...id,...jd,...ijd->...ij", k, k, D) * beta
    A = A.tril(0 if bug == "the diagonal is kept" else -1)
    T = torch.linalg.inv(torch.eye(C) + A)
    W, U = T @ (beta * k * G.exp()), T @ (beta * v)
    S = q.new_zeros(b, h, dk, v.shape[-1])
    scale, outs = dk**-0.5, []
    for i in range(q.shape[2]):
        new = U[:, :, i] - W[:, :, i] @ S
        inter = (q[:, :, i] * G[:, :, i].exp()) @ S
        intra = torch.einsum("bhid,bhjd,bhijd->bhij", q[:, :, i], k[:, :, i], D[:, :, i]) @ new
        outs.append(inter + intra * scale if bug == "scale on one half" else (inter + intra) * scale)
        end = G[:, :, i, -1:]
        S = S * end.exp().mT + (k[:, :, i] * (end - G[:, :, i]).exp()).mT @ new
    return torch.cat(outs, 2)[:, :, :t].transpose(1, 2), S


class WrongChunk(nn.Module):
    def __init__(self, bug, d=16, h=2, dk=6, dv=9):
        super().__init__()
        self.bug, self.h, self.dk, self.dv = bug, h, dk, dv
        self.proj = nn.Linear(d, h * (3 * dk + dv + 1), bias=False)

    def forward(self, x):
        n = self.h * self.dk
        q, k, g, v, beta = self.proj(x).split([n, n, n, self.h * self.dv, self.h], -1)
        q, k, g, v = (t.unflatten(-1, (self.h, -1)) for t in (q, k, g, v))
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        return wrong_chunk(self.bug, q, k, v, F.logsigmoid(g), beta.sigmoid())


CHUNK_BUGS = (
    "padding decays the state",
    "the sum leaves its own gate out",
    "the diagonal is kept",
    "scale on one half",
)


class WrongConv(nn.Module):
    def __init__(self, bug, c=14, width=4):
        super().__init__()
        self.bug, self.width = bug, width
        self.weight, self.bias = nn.Parameter(torch.randn(c, 1, width)), nn.Parameter(torch.randn(c))

    def forward(self, x, state):
        c, t = x.shape[1:]
        if self.bug == "one step ahead":
            return F.silu(F.conv1d(x, self.weight, self.bias, padding=self.width - 1, groups=c)[..., 1 : t + 1]), x
        if self.bug == "state read before it is written":
            out = F.silu((state * self.weight[:, 0]).sum(-1) + self.bias)
            return out, torch.cat([state[..., 1:], x[..., :1]], -1)
        window = torch.cat([state[..., 1:], x], -1)
        if self.bug == "bias behind the activation":
            return F.silu(F.conv1d(window, self.weight, groups=c)) + self.bias[:, None], window[..., -3:]
        out = F.silu(F.conv1d(window, self.weight, self.bias, groups=c))
        return out, window[..., -4:-1]  # "the stale state"


CONV_BUGS = (
    "one step ahead",
    "state read before it is written",
    "bias behind the activation",
    "the stale state",
)


class WrongRoll(nn.Module):
    def __init__(self, bug, c=14, width=4):
        super().__init__()
        self.bug, self.weight = bug, nn.Parameter(torch.randn(c, width))

    def forward(self, x, state):
        if self.bug == "summed before the cache is rolled":
            out = F.silu((state * self.weight).sum(-1))
        state.copy_(
            state if self.bug == "never rolled" else torch.roll(state, 1 if "other way" in self.bug else -1, -1)
        )
        state[:, :, 0 if self.bug == "written at the first place" else -1] = x
        if self.bug == "an older input is overwritten too":
            state[:, :, 0] = 0
        if self.bug != "summed before the cache is rolled":
            out = F.silu((state * self.weight).sum(-1))
        return out, state.sum(-1)


ROLL_BUGS = (
    "summed before the cache is rolled",
    "never rolled",
    "rolled the other way",
    "written at the first place",
    "an older input is overwritten too",
)


class WrongNorm(nn.Module):
    def __init__(self, bug, d=8):
        super().__init__()
        self.bug, self.weight = bug, nn.Parameter(torch.rand(d) + 0.5)

    def forward(self, x, gate):
        axis = 1 if self.bug == "over the heads" else -1
        mean = x.square().mean(axis, keepdim=True)
        root = {
            "eps outside the root": lambda: 1 / (mean.sqrt() + 1e-2),
            "eps as a floor": lambda: mean.clamp_min(1e-2).rsqrt(),
            "variance about the mean": lambda: torch.rsqrt(x.var(-1, keepdim=True, correction=0) + 1e-5),
        }.get(self.bug, lambda: torch.rsqrt(mean + 1e-5))()
        opened = torch.tanh(gate) if self.bug == "tanh for the gate" else torch.sigmoid(gate)
        return x * root * self.weight * opened


NORM_BUGS = (
    "over the heads",
    "eps outside the root",
    "eps as a floor",
    "variance about the mean",
    "tanh for the gate",
)


class WrongRouter(nn.Module):
    def __init__(self, bug, d=16, n=12, k=3):
        super().__init__()
        self.bug, self.k, self.n = bug, k, n
        self.gate = nn.Linear(d, n, bias=False)
        self.register_buffer("bias", torch.randn(n) * 0.3)

    def forward(self, x):
        logits = self.gate(x)
        scores = logits.softmax(-1) if self.bug == "weights of another score" else logits.sigmoid()
        choice = scores + self.bias
        if self.bug == "groups by their mean":
            groups = choice.view(-1, 3, self.n // 3)
            kept = torch.zeros(groups.shape[:2]).scatter(1, groups.mean(-1).topk(2)[1], 1.0)
            choice = groups.masked_fill(kept[..., None] == 0, -torch.inf).flatten(1)
        weights, index = choice.topk(self.k)
        if self.bug == "weights of another score":
            weights = logits.sigmoid().gather(1, index)
        elif self.bug != "bias in the weights":
            weights = scores.gather(1, index)
        if "one-hot" in self.bug:
            rows = F.one_hot(index, self.n).float()
            rows = rows.cumsum(1) if self.bug == "one-hot rows that add up" else rows
            weights = torch.einsum("nke,ne->nk", rows, choice if "biased" in self.bug else scores)
        axis = 0 if self.bug == "renormalised over the tokens" else -1
        return weights / weights.sum(axis, keepdim=True), index


ROUTER_BUGS = (
    "weights of another score",
    "groups by their mean",
    "bias in the weights",
    "renormalised over the tokens",
    "one-hot rows of biased scores",
    "one-hot rows that add up",
)


class WrongIndexer(nn.Module):
    def __init__(self, bug, d=18, h=3, size=6, k=4):
        super().__init__()
        self.bug, self.h, self.size, self.k = bug, h, size, k
        self.q, self.key = nn.Linear(d, h * size, bias=False), nn.Linear(d, size, bias=False)
        self.w = nn.Linear(d, h, bias=False)
        self.register_buffer("cache", torch.randn(2, 24, size))

    def forward(self, x):
        t = x.shape[1]
        q, k, w = self.q(x).unflatten(-1, (self.h, -1)), self.key(x), self.w(x)
        if self.bug == "cache read before it is written":
            keys = self.cache.clone()
            self.cache[:, 12 : 12 + t] = k
        else:
            self.cache[:, 12 : 12 + t] = k
            keys = self.cache
        dots = torch.einsum("bthd,bsd->bths", q, keys)
        if self.bug == "relu behind the sum":
            scores = (dots * w[..., None]).sum(2).relu()
        elif self.bug == "a leaky relu":
            scores = (F.leaky_relu(dots) * w[..., None]).sum(2)
        else:
            scores = (dots.relu() * w[..., None]).sum(2)
        last = 12 + torch.arange(t)[:, None]
        seen = torch.arange(24) < last if self.bug == "its own key is hidden" else torch.arange(24) <= last
        if self.bug == "a window":
            seen = seen & (torch.arange(24) > last - 9)
        return scores.masked_fill(~seen, -torch.inf).topk(self.k)[1]


INDEXER_BUGS = (
    "cache read before it is written",
    "relu behind the sum",
    "a leaky relu",
    "its own key is hidden",
    "a window",
)


class WrongAttention(nn.Module):
    def __init__(self, bug, h=4, c=10):
        super().__init__()
        self.bug, self.h, self.c = bug, h, c

    def forward(self, q, latent, index):
        rows = latent[torch.arange(len(q))[:, None], index.clamp(min=0)]
        logits = torch.einsum("bhc,bkc->bhk", q, rows) * self.c**-0.5
        empty = (index < 0)[:, None]
        if self.bug == "empty slots read key 0":
            return torch.einsum("bhk,bkc->bhc", logits.softmax(-1), rows)
        if self.bug == "softmax over the heads":
            return torch.einsum("bhk,bkc->bhc", logits.softmax(1).masked_fill(empty, 0), rows)
        if self.bug == "empty slots masked behind the softmax":
            return torch.einsum("bhk,bkc->bhc", logits.softmax(-1).masked_fill(empty, 0), rows)
        if self.bug == "empty slots have logit 0":
            return torch.einsum("bhk,bkc->bhc", logits.masked_fill(empty, 0).softmax(-1), rows)
        masked = logits.masked_fill(empty, -torch.inf)
        if self.bug == "a logsumexp before the mask":
            return torch.exp(masked - logits.logsumexp(-1, keepdim=True)) @ rows
        if self.bug == "a logsumexp over the heads":
            return torch.exp(masked - masked.logsumexp(1, keepdim=True)).nan_to_num() @ rows
        capped = 5 * torch.tanh(logits / 5)  # "a soft cap"
        return torch.einsum("bhk,bkc->bhc", capped.masked_fill(empty, -torch.inf).softmax(-1), rows)


ATTENTION_BUGS = (
    "empty slots read key 0",
    "softmax over the heads",
    "empty slots masked behind the softmax",
    "empty slots have logit 0",
    "a soft cap",
    "a logsumexp before the mask",
    "a logsumexp over the heads",
)


class WrongExperts(nn.Module):
    def __init__(self, bug, d=12, f=8, n=5, k=2):
        super().__init__()
        self.bug, self.k, self.n = bug, k, n
        self.gate = nn.Linear(d, n, bias=False)
        self.w1 = nn.Parameter(torch.randn(n, 2 * f, d) * 0.3)
        self.w2 = nn.Parameter(torch.randn(n, d, f) * 0.3)

    def forward(self, x):
        p, i = self.gate(x).softmax(-1).topk(self.k)
        rows = x[:, None].expand(-1, self.k, -1)
        if self.bug == "weights on the input":
            rows = rows * p[..., None]
        g, u = torch.einsum("nkd,nkfd->nkf", rows, self.w1[i]).chunk(2, -1)
        h = (F.gelu(g) if self.bug == "gelu" else F.silu(g)) * u
        out = torch.einsum("nkf,nkdf->nkd", h, self.w2[i.flip(-1) if self.bug == "matrices of the other expert" else i])
        if self.bug == "weights on the input":
            return out.sum(1)
        return (out * p[..., None]).mean(1) if self.bug == "mean for the sum" else (out * p[..., None]).sum(1)


EXPERT_BUGS = ("weights on the input", "gelu", "matrices of the other expert", "mean for the sum")


class WrongResidual(nn.Module):
    def __init__(self, bug, d=16):
        super().__init__()
        self.bug, self.query = bug, nn.Parameter(torch.randn(d))

    def forward(self, x, bank):
        rows = torch.cat([bank, x[:, None]], 1)
        normed = F.rms_norm(rows, (rows.shape[-1],), eps=1e-5)
        if self.bug == "softmax over the tokens":
            return ((normed @ self.query).softmax(0)[..., None] * rows).sum(1)
        if self.bug == "the running sum is normed twice":
            normed = torch.cat([normed[:, :-1], F.rms_norm(normed[:, -1:], (rows.shape[-1],), eps=1e-1)], 1)
        values = normed if self.bug == "normed values are mixed" else rows
        return ((normed @ self.query).softmax(1)[..., None] * values).sum(1)


RESIDUAL_BUGS = ("normed values are mixed", "softmax over the tokens", "the running sum is normed twice")


def choice_with_holes():
    index = torch.rand(3, 13).topk(5).indices
    index[:, 3] = -1
    return index


def wrong(make, bugs, *inputs, meaning=lambda result: result):
    """Return a stranger for each bug; `inputs` are shapes, or functions that make a tensor."""

    def build(bug):
        arguments = tuple(one() if callable(one) else torch.randn(*one) for one in inputs)
        return make(bug), arguments

    return [Stranger(f"{make.__name__}: {bug}", lambda bug=bug: build(bug), {}, meaning=meaning) for bug in bugs]


NEAR_MISSES = [
    *wrong(WrongStep, STEP_BUGS, (2, 20), (2, 3, 8, 8)),
    *wrong(WrongAlpha, ALPHA_BUGS, (2, 3, 20), (2, 3, 8, 8)),
    *wrong(WrongChunk, CHUNK_BUGS, (2, 27, 16)),
    *wrong(WrongConv, CONV_BUGS, (2, 14, 3), (2, 14, 4)),
    *wrong(WrongRoll, ROLL_BUGS, (3, 14), (3, 14, 4)),
    *wrong(WrongNorm, NORM_BUGS, (3, 8, 8), (3, 8, 8)),
    *wrong(WrongRouter, ROUTER_BUGS, (7, 16)),
    *wrong(WrongIndexer, INDEXER_BUGS, (2, 5, 18), meaning=sorted_choice),
    *wrong(WrongAttention, ATTENTION_BUGS, (3, 4, 10), (3, 13, 10), choice_with_holes),
    *wrong(WrongExperts, EXPERT_BUGS, (6, 12)),
    *wrong(WrongResidual, RESIDUAL_BUGS, (5, 16), (5, 3, 16)),
]


# What is asked of all of them: plain numbers, large ones, tiny ones, rows that are all alike, and rows of zeros.
def scaled(factor):
    return lambda args: tuple(x * factor if x.is_floating_point() else x for x in args)


def alike(args):
    return tuple(x[:1].expand_as(x).clone() if x.is_floating_point() else x for x in args)


def one_zero_row(args):
    def clear(x):
        if not x.is_floating_point():
            return x
        x = x.clone()
        x[0] = 0
        return x

    return tuple(clear(x) for x in args)


ADVERSARIES = (scaled(1.0), scaled(300.0), scaled(1e-3), alike, one_zero_row)
# Equal scores are anybody's choice, and scores that underflow are equal: what selects gets other inputs.
SELECTING = (scaled(1.0), scaled(10.0), scaled(1e-3))


def adversaries_of(name):
    """Return the inputs for a near miss."""
    return SELECTING if name.startswith(("WrongIndexer", "WrongRouter", "WrongExperts")) else ADVERSARIES
