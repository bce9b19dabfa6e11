"""The lightning indexer as different authors would write it (K3.1 spec 3.1).

Each style names its arguments; `operands` makes them. All compute sum_h w relu(q . k), hide the keys after a row's
position, and name the best few of the rest.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

B, T, S, H, D, K, PAGE = 2, 11, 36, 3, 10, 5, 4
INF = float("inf")


@dataclass(frozen=True)
class Style:
    """A spelling: its arguments by name, whether it lists the best first, and how often its operator appears."""

    fn: Callable
    arguments: tuple[str, ...]
    ordered: bool = True
    count: int = 1
    prefill: bool = True

    @property
    def name(self):
        return self.fn.__name__


STYLES: dict[str, Style] = {}


def style(arguments, **more):
    def register(fn):
        STYLES[fn.__name__] = Style(fn, tuple(arguments.split()), **more)
        return fn

    return register


def operands(names, phase, dtype=torch.float32, seed=0, sizes=None):
    """The arguments of a style: `phase` is "prefill" (T rows into a longer cache), "square" (T = S) or "decode"."""
    generator = torch.Generator().manual_seed(seed)
    b, t, s, h, d = sizes or (B, {"prefill": T, "square": S, "decode": 1}[phase], S, H, D)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    start = torch.randint(0, s - t + 1, (b,), generator=generator)
    q, k, w = normal(b, t, h, d), normal(b, s, d), normal(b, t, h)
    positions = start[:, None] + torch.arange(t)
    pages, table = to_pages(k, generator)
    made = {
        "q": q,
        "k": k,
        "w": w,
        "q_tbhd": q.transpose(0, 1).contiguous(),
        "k_sbd": k.transpose(0, 1).contiguous(),
        "w_tbh": w.transpose(0, 1).contiguous(),
        "q_bhtd": q.transpose(1, 2).contiguous(),
        "q_grouped": q.unsqueeze(2),
        "q_flat": q.reshape(b, t, h * d),
        "k_bs1d": k.unsqueeze(2),
        "pos": positions,
        "start": start,
        "lens": start + t,
        "lens32": (start + t).to(torch.int32),
        "pages": pages,
        "table": table,
    }
    return [made[name] for name in names]


def to_pages(keys, generator, spare=3):
    """Pages [blocks, PAGE, ...] that hold `keys` [B, S, ...] in shuffled blocks, and their table [B, S / PAGE].

    Empty ones where S is no multiple of a page.
    """
    b, s = keys.shape[:2]
    if s % PAGE:
        return keys.new_zeros(1, PAGE, *keys.shape[2:]), torch.zeros(b, 0, dtype=torch.int64)
    count = b * s // PAGE
    table = (torch.randperm(count + spare - 1, generator=generator)[:count] + 1).view(b, s // PAGE)
    pages = torch.zeros(count + spare, PAGE, *keys.shape[2:], dtype=keys.dtype)
    pages[table.reshape(-1)] = keys.reshape(count, PAGE, *keys.shape[2:])
    return pages, table


def visible_of(pos, length):
    return torch.arange(length) <= pos[..., None]


@style("q k w pos")
def matmul_row(q, k, w, pos):
    """Broadcast matmul, scale before relu, the weights a row vector; int32 indices."""
    dots = torch.matmul(q.float(), k.float().transpose(-1, -2).unsqueeze(1)) * q.shape[-1] ** -0.5
    rows = (w.float() * q.shape[2] ** -0.5).unsqueeze(-2)
    scores = torch.matmul(rows, F.relu(dots)).squeeze(-2)
    scores = scores.masked_fill(~visible_of(pos, k.shape[1]), -INF)
    return torch.topk(scores, min(K, scores.shape[-1]), dim=-1).indices.to(torch.int32)


@style("q k w")
def einsum_triu(q, k, w):
    """A causal constant added, relu in place, weights scaled."""
    t, s = q.shape[1], k.shape[1]
    future = torch.full((t, s), -INF, dtype=q.dtype).triu_(1 + s - t)
    dots = torch.einsum("bthd,bsd->bths", q, k)
    dots.relu_()
    scores = (dots * (w * q.shape[2] ** -0.5 * q.shape[3] ** -0.5).unsqueeze(-1)).sum(dim=2)
    scores += future
    return scores.topk(K, dim=-1)[1]


@style("q_tbhd k_sbd w_tbh pos")
def sequence_first(q, k, w, pos):
    """Time first as in tensor-parallel trainers; -1 where the value is -inf."""
    dots = torch.einsum("sbhd,tbd->sbht", q, k)
    dots = torch.relu(dots) * w.unsqueeze(-1)
    scores = dots.sum(dim=2).transpose(0, 1)
    hide = torch.zeros_like(scores).masked_fill(torch.arange(k.shape[0]) > pos.unsqueeze(-1), -INF)
    values, chosen = (scores + hide).topk(K, dim=-1)
    return chosen.masked_fill(values == -INF, -1)


@style("q k w start", count=B)
def loop_over_batch(q, k, w, start):
    """One sequence after the other; -1 by isinf."""
    out = []
    for i in range(q.shape[0]):
        dots = torch.einsum("mhd,nd->hmn", q[i], k[i]) * 0.25
        scores = torch.einsum("hmn,mh->mn", F.relu(dots), w[i])
        row = start[i] + torch.arange(q.shape[1])[:, None]
        scores = scores.masked_fill(row < torch.arange(k.shape[1])[None, :], -INF)
        values, chosen = torch.topk(scores, K, dim=-1)
        out.append(torch.where(torch.isinf(values), -1, chosen))
    return torch.stack(out)


@style("q_grouped k_bs1d w pos")
def grouped_five_dims(q, k, w, pos):
    """Heads in groups that share a key, though there is one group."""
    dots = torch.einsum("bsmgd,btmd->bmsgt", q, k).relu()
    dots = dots.permute(0, 2, 1, 3, 4)
    scores = (dots * w[:, :, None, :, None]).sum(dim=3).squeeze(2)
    scores = torch.where(visible_of(pos, k.shape[1]), scores, -INF)
    return scores.topk(K, dim=-1, sorted=True).indices


@style("q k w lens")
def bmm_flat(q, k, w, lens):
    """All rows and heads in one bmm, clamp for relu; a row sees the length minus the rows after it."""
    b, t, h, d = q.shape
    dots = torch.bmm(q.reshape(b, t * h, d), k.mT).view(b, t, h, -1).clamp(min=0)
    scores = (w[:, :, None, :] @ dots)[:, :, 0]
    seen = lens[:, None] - t + 1 + torch.arange(t)
    scores = scores.masked_fill(torch.arange(k.shape[1]) >= seen[..., None], torch.finfo(scores.dtype).min)
    return scores.topk(K).indices


@style("q k w pos")
def broadcast_sum(q, k, w, pos):
    """No matrix product at all; maximum with zero; a descending sort."""
    dots = (q[:, :, :, None, :] * k[:, None, None, :, :]).sum(-1)
    dots = torch.maximum(dots, torch.zeros_like(dots)) * (1 / math.sqrt(q.shape[-1]))
    scores = (dots * w[..., None]).sum(-2)
    scores = torch.where(pos[..., None] >= torch.arange(k.shape[1]), scores, -INF)
    return scores.sort(dim=-1, descending=True).indices[..., :K]


@style("q k w pos")
def loop_over_heads(q, k, w, pos):
    """Heads added one by one, relu by where; argsort."""
    scores = torch.zeros(q.shape[0], q.shape[1], k.shape[1], dtype=q.dtype)
    for h in range(q.shape[2]):
        dots = q[:, :, h] @ k.transpose(1, 2)
        scores = scores + w[:, :, h, None] * torch.where(dots > 0, dots, 0.0)
    scores = scores.masked_fill(~visible_of(pos, k.shape[1]), -INF)
    return scores.argsort(dim=-1, descending=True)[:, :, :K]


@style("q pages table w lens32")
def paged_gather(q, pages, table, w, lens):
    """Keys behind a block table, per-request lengths, int32 out, -1 by comparison with -inf."""
    keys = pages[table].flatten(1, 2)
    scores = torch.einsum("bthd,bsd->bths", q.float(), keys.float()).clamp_min(0)
    scores = torch.einsum("bths,bth->bts", scores, w.float())
    seen = lens[:, None, None] - q.shape[1] + 1 + torch.arange(q.shape[1])[:, None]
    scores = scores.masked_fill(torch.arange(keys.shape[1]) >= seen, -INF)
    values, chosen = scores.topk(K, dim=-1)
    return chosen.masked_fill(values.eq(-INF), -1).int()


@style("q k w pos")
def argsort_of_negative(q, k, w, pos):
    """Ascending order of the negated score."""
    scores = torch.einsum("bth,bths->bts", w, F.relu(torch.einsum("bthd,bsd->bths", q, k)))
    scores = scores.masked_fill(torch.arange(k.shape[1]) > pos[..., None], -INF)
    return (-scores).argsort(dim=-1)[..., :K]


@style("q k w pos", ordered=False)
def additive_finfo(q, k, w, pos):
    """An additive mask of the type's lowest value; top-k in no order."""
    low = torch.finfo(q.dtype).min
    mask = torch.zeros_like(k[:, None, :, 0]).masked_fill(~visible_of(pos, k.shape[1]), low)
    dots = torch.einsum("bthd,bsd->bhts", q * q.shape[-1] ** -0.5, k).relu()
    scores = torch.einsum("bhts,bth->bts", dots, w) + mask
    return scores.topk(K, dim=-1, sorted=False).indices


@style("q k w pos")
def marks_by_length(q, k, w, pos):
    """-1 where the slot lies beyond the visible length."""
    seen = pos + 1
    dots = torch.matmul(q, k.unsqueeze(1).mT)
    scores = (F.relu(dots) * w.unsqueeze(-1)).sum(2)
    scores = scores.masked_fill(torch.arange(k.shape[1]) >= seen.unsqueeze(-1), -INF)
    chosen = scores.topk(K, dim=-1).indices
    return torch.where(torch.arange(K) >= seen.unsqueeze(-1), -1, chosen)


@style("q k w pos")
def smallest_of_negative(q, k, w, pos):
    """The smallest of the negated scores, the future at +inf."""
    scores = -(w.unsqueeze(-1) * torch.einsum("bthd,bsd->bths", q, k).relu()).sum(2)
    scores = scores.masked_fill(~visible_of(pos, k.shape[1]), INF)
    return scores.topk(K, dim=-1, largest=False).indices


@style("q k w pos")
def baddbmm_mask(q, k, w, pos):
    """The mask comes in with the product that sums the heads."""
    b, t, h, d = q.shape
    mask = torch.zeros(b, t, k.shape[1], dtype=q.dtype).masked_fill_(~visible_of(pos, k.shape[1]), -INF)
    dots = (q.view(b, t * h, d) @ k.transpose(1, 2)).view(b * t, h, -1).relu()
    scores = torch.baddbmm(mask.view(b * t, 1, -1), w.reshape(b * t, 1, h), dots)
    return scores.view(b, t, -1).topk(K, dim=-1).indices


@style("q_bhtd k w start")
def heads_first(q, k, w, start):
    """[B, H, T, D] as attention code has it; scores per head, the weights moved to them."""
    weights = w.permute(0, 2, 1).unsqueeze(-1)
    scores = (q @ k.unsqueeze(1).transpose(-2, -1)).clamp(min=0.0).mul(weights).sum(1)
    rows = start.view(-1, 1, 1) + torch.arange(q.shape[2]).view(1, -1, 1)
    columns = torch.arange(k.shape[1]).view(1, 1, -1)
    scores = scores.masked_fill(columns > rows, -INF)
    _, chosen = torch.topk(scores, k=K, dim=2)
    return chosen


@style("q_flat k w pos")
def chunked_heads(q, k, w, pos):
    """A flat projection cut into heads; a list of per-head scores, stacked."""
    parts = q.chunk(w.shape[-1], dim=-1)
    dots = torch.stack([torch.bmm(part, k.mT) for part in parts], dim=-1)
    scores = torch.einsum("btsh,bth->bts", dots.relu(), w)
    scores = scores.masked_fill(~visible_of(pos, k.shape[1]), -INF)
    return scores.topk(K, dim=-1).indices


@style("q_flat k w pos")
def sliced_heads(q, k, w, pos):
    """A flat projection sliced head by head, each weighed and added to the sum."""
    width, scores = q.shape[-1] // w.shape[-1], 0
    for head in range(w.shape[-1]):
        dots = torch.matmul(q[..., head * width : (head + 1) * width], k.transpose(-1, -2))
        scores = scores + w[..., head, None] * F.relu(dots)
    scores = scores.masked_fill(~visible_of(pos, k.shape[1]), -INF)
    return scores.topk(K, dim=-1).indices


@style("q k w pos")
def sorted_pair(q, k, w, pos):
    """Stable sort, both parts unpacked, int32, -1 behind the visible."""
    raw = torch.einsum("bthd,bsd->bths", q, k)
    scores = torch.einsum("bths,bth->bts", raw.masked_fill(raw < 0, 0), w)
    scores = scores.masked_fill(~visible_of(pos, k.shape[1]), -INF)
    values, order = torch.sort(scores, dim=-1, descending=True, stable=True)
    chosen = order[..., :K].to(torch.int32)
    return chosen.masked_fill(torch.isinf(values[..., :K]), -1)


@style("q k w pos")
def transposed_scores(q, k, w, pos):
    """Keys along the second dimension: [B, S, T]."""
    dots = torch.einsum("bsd,bthd->bsth", k, q).relu()
    scores = (dots * w.unsqueeze(1)).sum(-1)
    scores = scores.masked_fill(torch.arange(k.shape[1])[None, :, None] > pos[:, None, :], -INF)
    return scores.topk(K, dim=1).indices.transpose(1, 2)
