"""Sparse attention behind an indexer as different authors would write it (K3.1 spec 3.2).

Each style takes what `operands` makes by name and the rule of visibility `pos` [B, T]; all compute a softmax over the
keys that are selected and visible.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from indexer_styles import to_pages

B, T, S, K = 2, 11, 36, 5
HEADS, NOPE, ROPE, LATENT, V, PAGE = 3, 12, 6, 14, 9, 4
INF = float("inf")


@dataclass(frozen=True)
class Style:
    """A spelling and its arguments by name."""

    fn: Callable
    arguments: tuple[str, ...]

    @property
    def name(self):
        return self.fn.__name__


STYLES: dict[str, Style] = {}


def style(arguments):
    def register(fn):
        STYLES[fn.__name__] = Style(fn, ("qi", "ki", "wi", *arguments.split()))
        return fn

    return register


def operands(names, phase, dtype=torch.float32, seed=0, sizes=None):
    """The arguments of a style; `phase` as for the indexer's."""
    generator = torch.Generator().manual_seed(seed)
    b, t, s = sizes or (B, {"prefill": T, "square": S, "decode": 1}[phase], S)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    start = torch.randint(0, s - t + 1, (b,), generator=generator)
    c, kr = normal(b, s, LATENT), normal(b, s, ROPE)
    pages, table = to_pages(c, generator)
    rope_pages = torch.zeros(*pages.shape[:2], ROPE, dtype=dtype)
    if table.numel():
        rope_pages[table.reshape(-1)] = kr.reshape(-1, PAGE, ROPE)
    weight = torch.nn.Parameter(normal(HEADS * (NOPE + V), LATENT) * 0.3, requires_grad=False)
    made = {
        "qi": normal(b, t, 4, 10),
        "ki": normal(b, s, 10),
        "wi": normal(b, t, 4),
        "pos": start[:, None] + torch.arange(t),
        "q": normal(b, t, HEADS, NOPE + ROPE),
        "q_latent": normal(b, t, HEADS, LATENT),
        "q_rope": normal(b, t, HEADS, ROPE),
        "q_joint": normal(b, t, HEADS, LATENT + ROPE),
        "c": c,
        "kr": kr,
        "joint": torch.cat([c, kr], dim=-1),
        "kv_b": weight,
        "k_up": torch.nn.Parameter(normal(HEADS * NOPE, LATENT) * 0.3, requires_grad=False),
        "v_up": torch.nn.Parameter(normal(HEADS * V, LATENT) * 0.3, requires_grad=False),
        "k": normal(b, s, HEADS, NOPE),
        "v": normal(b, s, HEADS, V),
        "q_nope": normal(b, t, HEADS, NOPE),
        "gate": normal(b, t, HEADS * LATENT),
        "pages": pages,
        "rope_pages": rope_pages,
        "table": table,
    }
    return [made[name] for name in names]


def select(qi, ki, wi, pos):
    """A plain indexer: the one in front of every style."""
    scores = (torch.einsum("bthd,bsd->bths", qi, ki).relu() * wi.unsqueeze(-1)).sum(2)
    scores = scores.masked_fill(hidden_of(pos, ki.shape[1]), -INF)
    return scores.topk(min(K, ki.shape[1]), dim=-1).indices


def hidden_of(pos, length):
    return torch.arange(length) > pos[..., None]


@style("q c kr kv_b pos")
def full_scatter_native(qi, ki, wi, q, c, kr, kv_b, pos):
    """Native heads from one projection; -inf everywhere, 0 scattered in, the causal mask added."""
    chosen = select(qi, ki, wi, pos)
    b, t, h, _ = q.shape
    s = c.shape[1]
    kv = F.linear(c, kv_b).view(b, s, h, NOPE + V)
    k_nope, v = kv.split([NOPE, V], dim=-1)
    k = torch.cat([k_nope, kr[:, :, None].expand(-1, -1, h, -1)], dim=-1)
    scores = torch.einsum("bshd,bthd->bsht", q, k) * (NOPE + ROPE) ** -0.5
    mask = torch.full((b, t, s), -INF, dtype=q.dtype).scatter_(-1, chosen, 0)
    mask = mask + torch.zeros(b, t, s, dtype=q.dtype).masked_fill(hidden_of(pos, s), -INF)
    scores = scores + mask.unsqueeze(2)
    return torch.einsum("bsht,bthd->bshd", scores.softmax(dim=-1), v)


@style("q c kr kv_b pos")
def ones_scatter_false(qi, ki, wi, q, c, kr, kv_b, pos):
    """Heads first; a bool mask with False scattered in, the type's lowest value, softmax with a dtype."""
    chosen = select(qi, ki, wi, pos)
    b, t, h, _ = q.shape
    s = c.shape[1]
    kv = F.linear(c, kv_b).view(b, s, h, NOPE + V).transpose(1, 2)
    k = torch.cat([kv[..., :NOPE], kr.unsqueeze(1).expand(b, h, s, ROPE)], dim=-1)
    unselected = torch.ones(b, t, s, dtype=torch.bool).scatter(-1, chosen, False)
    drop = (unselected | hidden_of(pos, s)).unsqueeze(1)
    logits = torch.matmul(q.transpose(1, 2), k.transpose(2, 3)) * 0.21
    logits = logits.masked_fill(drop, torch.finfo(logits.dtype).min)
    p = torch.softmax(logits, dim=-1, dtype=logits.dtype).to(q.dtype)
    p = F.dropout(p, p=0.0, training=False)
    return torch.matmul(p, kv[..., NOPE:]).transpose(1, 2).contiguous()


@style("q_latent q_rope c kr pos")
def dummy_column(qi, ki, wi, ql, qr, c, kr, pos):
    """-1 in empty slots lands in one column too many."""
    chosen = select(qi, ki, wi, pos)
    chosen = chosen.masked_fill(chosen > pos.unsqueeze(-1), -1)
    b, t, _, _ = ql.shape
    s = c.shape[1]
    keep = torch.zeros(b, t, s + 1, dtype=torch.bool)
    keep = keep.scatter(-1, torch.where(chosen < 0, s, chosen), True)[..., :s] & ~hidden_of(pos, s)
    logits = torch.einsum("bthd,bsd->bths", ql, c) + torch.einsum("bthd,bsd->bths", qr, kr)
    logits = (logits * 0.3).masked_fill(~keep.unsqueeze(2), -INF)
    return torch.einsum("bths,bsd->bthd", F.softmax(logits, dim=-1), c)


@style("q_latent c pos")
def empty_slots_at_the_first_key(qi, ki, wi, q, c, pos):
    """-1 in empty slots becomes key 0: a row with empty slots has chosen all that it sees, that one too."""
    chosen = select(qi, ki, wi, pos)
    chosen = chosen.masked_fill(chosen > pos.unsqueeze(-1), -1)
    chosen = torch.where(chosen < 0, 0, chosen)
    keep = torch.zeros(q.shape[0], q.shape[1], c.shape[1], dtype=torch.bool).scatter(-1, chosen, True)
    keep = keep & ~hidden_of(pos, c.shape[1])
    logits = torch.einsum("bthd,bsd->bths", q, c) * 0.3
    return torch.einsum("bths,bsd->bthd", logits.masked_fill(~keep.unsqueeze(2), -INF).softmax(-1), c)


@style("q_latent c pos")
def zeros_scatter_true(qi, ki, wi, q, c, pos):
    """Selected and causal as one bool mask; no rope; scale after the mask."""
    chosen = select(qi, ki, wi, pos)
    keep = torch.zeros(q.shape[0], q.shape[1], c.shape[1], dtype=torch.bool).scatter_(2, chosen, True)
    keep &= ~hidden_of(pos, c.shape[1])
    logits = torch.matmul(q, c.unsqueeze(1).transpose(-1, -2))
    logits = torch.where(keep.unsqueeze(2), logits, -INF).mul(q.shape[-1] ** -0.5)
    return torch.matmul(logits.softmax(-1), c.unsqueeze(1))


@style("q_latent q_rope c kr pos")
def advanced_indexing(qi, ki, wi, ql, qr, c, kr, pos):
    """Rows by c[b, idx]; the sum of two dots; hidden slots masked by position."""
    chosen = select(qi, ki, wi, pos)
    batch = torch.arange(c.shape[0])[:, None, None]
    rows, ropes = c[batch, chosen], kr[batch, chosen]
    logits = (torch.einsum("bthd,btkd->bthk", ql, rows) + torch.einsum("bthd,btkd->bthk", qr, ropes)) * 0.25
    logits = logits.masked_fill((chosen > pos[..., None]).unsqueeze(2), -INF)
    return torch.einsum("bthk,btkd->bthd", logits.softmax(-1), rows)


@style("q_joint joint pos")
def take_along(qi, ki, wi, q, joint, pos):
    """One dot over latent and rope, the values a slice of the keys."""
    chosen = select(qi, ki, wi, pos)
    rows = torch.take_along_dim(joint.unsqueeze(1), chosen.unsqueeze(-1), dim=2)
    logits = torch.matmul(q, rows.transpose(-1, -2)) * (LATENT + ROPE) ** -0.5
    seen = (chosen <= pos.unsqueeze(-1)).unsqueeze(2)
    weights = torch.softmax(torch.where(seen, logits, torch.finfo(logits.dtype).min), dim=-1)
    return torch.matmul(weights, rows[..., :LATENT])


@style("q_latent c pos")
def gather_expand(qi, ki, wi, q, c, pos):
    """torch.gather on an expanded cache; the scale folded into q; softmax by hand."""
    chosen = select(qi, ki, wi, pos)
    t = q.shape[1]
    rows = torch.gather(c.unsqueeze(1).expand(-1, t, -1, -1), 2, chosen.unsqueeze(-1).expand(-1, -1, -1, c.shape[-1]))
    logits = torch.einsum("bthd,btkd->bthk", q * (1 / math.sqrt(LATENT)), rows)
    logits = logits.masked_fill((chosen > pos[..., None])[:, :, None], -INF)
    top = logits.max(dim=-1, keepdim=True).values
    weights = (logits - top).exp()
    weights = weights / weights.sum(-1, keepdim=True)
    return torch.einsum("bthk,btkd->bthd", weights, rows)


@style("q_latent q_rope c kr pos")
def flat_index_select(qi, ki, wi, ql, qr, c, kr, pos):
    """One flat list of rows over the batch."""
    chosen = select(qi, ki, wi, pos)
    b, t, k = chosen.shape
    flat = (chosen + torch.arange(b)[:, None, None] * c.shape[1]).view(-1)
    rows = c.flatten(0, 1).index_select(0, flat).view(b, t, k, -1)
    ropes = kr.flatten(0, 1).index_select(0, flat).view(b, t, k, -1)
    query, key = torch.cat([ql, qr], dim=-1), torch.cat([rows, ropes], dim=-1)
    logits = torch.einsum("bthd,btkd->bthk", query, key) / 4.5
    bias = torch.zeros(b, t, k, dtype=ql.dtype).masked_fill(chosen > pos[..., None], -INF)
    return torch.einsum("bthk,btkd->bthd", (logits + bias[:, :, None]).softmax(-1), rows)


@style("q_latent q_rope pages rope_pages table pos")
def paged_slots(qi, ki, wi, ql, qr, pages, rope_pages, table, pos):
    """Slots in a pool of pages, block * page + offset."""
    chosen = select(qi, ki, wi, pos)
    size = pages.shape[1]
    blocks = table.unsqueeze(1).expand(-1, chosen.shape[1], -1).gather(-1, chosen // size)
    slots = blocks * size + chosen % size
    rows, ropes = pages.flatten(0, 1)[slots], rope_pages.flatten(0, 1)[slots]
    logits = (ql @ rows.mT + qr @ ropes.mT) * 0.22
    logits = logits.masked_fill((chosen > pos[..., None]).unsqueeze(2), -INF)
    return logits.softmax(-1) @ rows


@style("q c kr k_up v_up pos")
def sdpa_bool(qi, ki, wi, q, c, kr, k_up, v_up, pos):
    """Two projections, scaled_dot_product_attention under a bool mask."""
    chosen = select(qi, ki, wi, pos)
    b, t, h, _ = q.shape
    s = c.shape[1]
    k = F.linear(c, k_up).view(b, s, h, NOPE)
    k = torch.cat([k, kr.unsqueeze(2).expand(b, s, h, ROPE)], dim=-1).transpose(1, 2)
    v = F.linear(c, v_up).view(b, s, h, V).transpose(1, 2)
    keep = torch.zeros(b, t, s, dtype=torch.bool).scatter(-1, chosen, True) & ~hidden_of(pos, s)
    out = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=keep.unsqueeze(1))
    return out.transpose(1, 2).flatten(2)


@style("q_latent c pos")
def sdpa_float(qi, ki, wi, q, c, pos):
    """scaled_dot_product_attention under an additive mask, one key head for all."""
    chosen = select(qi, ki, wi, pos)
    b, t, h, _ = q.shape
    s = c.shape[1]
    bias = torch.full((b, t, s), -INF, dtype=q.dtype).scatter(-1, chosen, 0.0).masked_fill(hidden_of(pos, s), -INF)
    key = c.unsqueeze(1).expand(b, h, s, LATENT)
    out = F.scaled_dot_product_attention(q.transpose(1, 2), key, key, attn_mask=bias.unsqueeze(1), scale=0.2)
    return out.transpose(1, 2)


@style("q_nope k v pos")
def heads_of_their_own(qi, ki, wi, q, k, v, pos):
    """A key and a value for every head, no latent."""
    chosen = select(qi, ki, wi, pos)
    keep = torch.zeros(q.shape[0], q.shape[1], k.shape[1], dtype=torch.bool).scatter(-1, chosen, True)
    keep = keep.logical_and(~hidden_of(pos, k.shape[1]))
    logits = torch.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
    weights = logits.masked_fill(~keep[:, None], -INF).softmax(dim=-1)
    return torch.einsum("bhts,bshd->bthd", weights, v)


@style("q_nope q_rope c kr kv_b pos")
def absorbed_by_hand(qi, ki, wi, qn, qr, c, kr, kv_b, pos):
    """The query projected into the latent space first, the output out of it last."""
    chosen = select(qi, ki, wi, pos)
    both = kv_b.view(HEADS, NOPE + V, LATENT)
    ql = torch.einsum("bthn,hnl->bthl", qn, both[:, :NOPE])
    mask = torch.full((c.shape[0], qn.shape[1], c.shape[1]), -INF, dtype=c.dtype).scatter_(-1, chosen, 0)
    mask = mask.masked_fill(hidden_of(pos, c.shape[1]), -INF)
    logits = (torch.einsum("bthl,bsl->bths", ql, c) + torch.einsum("bthr,bsr->bths", qr, kr)) * 0.24
    weights = (logits + mask.unsqueeze(2)).softmax(-1)
    latent = torch.einsum("bths,bsl->bthl", weights, c)
    return torch.einsum("bthl,hvl->bthv", latent, both[:, NOPE:])


@style("q_latent c gate pos")
def gated_output(qi, ki, wi, q, c, gate, pos):
    """Gather, then a gate on what comes out; -1 marked by the author and respected."""
    chosen = select(qi, ki, wi, pos)
    empty = chosen > pos.unsqueeze(-1)
    chosen = chosen.masked_fill(empty, -1)
    safe = chosen.clamp(min=0)
    rows = c[torch.arange(c.shape[0]).view(-1, 1, 1), safe]
    logits = torch.einsum("bthd,btkd->bthk", q, rows).div(math.sqrt(LATENT))
    logits = logits.masked_fill((chosen < 0).unsqueeze(2), -INF)
    out = torch.einsum("bthk,btkd->bthd", torch.softmax(logits, -1), rows).flatten(2)
    return out * torch.sigmoid(gate)
