"""Sparse attention over a latent as serving engines and tutorials keep it (K3.1 spec 2.7, 3.2).

Engines: latent and rope part in one cache, in pages behind a block table, tokens of all requests in one list.
Tutorials: keys and values by two projections of the latent, a buffer of ones and zeros for causality.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from attention_styles import HEADS, INF, LATENT, NOPE, PAGE, ROPE, K, V, select

R, ROWS, BLOCKS = 2, 7, 9
S = BLOCKS * PAGE
JOINT = LATENT + ROPE


@dataclass(frozen=True)
class Program:
    """A spelling or a lie, and its arguments by name."""

    fn: Callable
    arguments: tuple[str, ...]
    words: tuple[str, ...] = ()


STYLES: dict[str, Program] = {}


def style(arguments):
    def register(fn):
        STYLES[fn.__name__] = Program(fn, ("qi", "ki", "wi", *arguments.split()))
        return fn

    return register


def operands(names, rows=ROWS, dtype=torch.float32, seed=0):
    """The arguments by name: `rows` tokens a request, a list of all tokens for names that begin with n."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    def weight(*shape):
        return torch.nn.Parameter(normal(*shape) * 0.3, requires_grad=False)

    start = torch.randint(1, S - rows + 1, (R,), generator=generator)
    pos = start[:, None] + torch.arange(rows)
    pool = R * BLOCKS + 3
    table = (torch.randperm(pool - 1, generator=generator)[: R * BLOCKS] + 1).view(R, BLOCKS)
    order = torch.randperm(R * rows, generator=generator)
    made = {
        "pos": pos,
        "q_joint": normal(R, rows, HEADS, JOINT),
        "q_latent": normal(R, rows, HEADS, LATENT),
        "q_rope": normal(R, rows, HEADS, ROPE),
        "q_nope": normal(R, rows, HEADS, NOPE),
        "joint": normal(R, S, JOINT),
        "pages": normal(pool, PAGE, JOINT),
        "pages_4d": normal(pool, PAGE, 1, JOINT),
        "slots": normal(pool * PAGE, 1, JOINT),
        "table": table,
        "token_table": (table.unsqueeze(-1) * PAGE + torch.arange(PAGE)).flatten(1),
        "req": torch.arange(R).repeat_interleave(rows)[order],
        "lens": pos[:, -1] + 1,
        "c": normal(R, S, LATENT),
        "kr": normal(R, S, ROPE),
        "W_UK": weight(HEADS, NOPE, LATENT),
        "W_UV": weight(HEADS, LATENT, V),
        "k_up": weight(HEADS * NOPE, LATENT),
        "v_up": weight(HEADS * V, LATENT),
        "tril": torch.tril(torch.ones(S + 4, S + 4, dtype=dtype)).view(1, 1, S + 4, S + 4),
        "qi": normal(R, rows, 4, 10),
        "ki": normal(R, S, 10),
        "wi": normal(R, rows, 4),
    }
    by_row = ("pos", "q_joint", "q_latent", "q_rope", "q_nope", "qi", "wi")
    made |= {f"n_{name}": made[name].flatten(0, 1)[order] for name in by_row}
    given = names if "req" not in names else [{"qi": "n_qi", "wi": "n_wi"}.get(name, name) for name in names]
    return [made[name] for name in given]


def marked(qi, ki, wi, pos):
    """Chosen keys, -1 where a row sees fewer."""
    chosen = select(qi, ki, wi, pos)
    return chosen.masked_fill(chosen > pos.unsqueeze(-1), -1)


def marked_tokens(qi, ki, wi, pos, req):
    """The same for one list of tokens, as an engine's indexer writes it."""
    scores = (torch.einsum("nhd,nsd->nhs", qi, ki[req]).relu() * wi.unsqueeze(-1)).sum(1)
    scores = scores.masked_fill(torch.arange(ki.shape[1]) > pos[:, None], -INF)
    best, chosen = scores.topk(K, dim=-1)
    return torch.where(best == -INF, -1, chosen)


def attend(q, rows, hidden, width=LATENT, scale=0.2):
    """One dot with both parts; the values are the first."""
    logits = torch.einsum("...hd,...kd->...hk", q, rows) * scale
    weights = logits.masked_fill(hidden.unsqueeze(-2), -INF).softmax(-1)
    return torch.einsum("...hk,...kd->...hd", weights, rows[..., :width])


def slots_of(table, chosen):
    """Slots in the pool for rows of a table [..., n] and chosen keys [..., K]."""
    safe = chosen.clamp(min=0)
    return table.gather(-1, safe // PAGE) * PAGE + safe % PAGE


@style("q_joint pages table pos")
def pages_joined(qi, ki, wi, q, pages, table, pos):
    """Pages of both parts, one query; a row of the table for each request."""
    chosen = marked(qi, ki, wi, pos)
    slots = slots_of(table.unsqueeze(1).expand(-1, chosen.shape[1], -1), chosen)
    return attend(q, pages.view(-1, JOINT)[slots], chosen < 0)


@style("q_latent q_rope pages_4d table pos")
def pages_split(qi, ki, wi, ql, qr, pages, table, pos):
    """Pages with a dimension for the one head; two queries, a dot with each part."""
    chosen = marked(qi, ki, wi, pos)
    slots = slots_of(table.unsqueeze(1).expand(-1, chosen.shape[1], -1), chosen)
    rows = pages.flatten(0, 2).index_select(0, slots.flatten()).view(*slots.shape, -1)
    c, pe = rows.split([LATENT, ROPE], dim=-1)
    logits = (ql @ c.transpose(-1, -2) + qr @ pe.transpose(-1, -2)) / 4.5
    logits = torch.where((chosen < 0).unsqueeze(2), -INF, logits)
    return logits.softmax(-1) @ c


@style("q_joint pages table pos")
def pages_rope_first(qi, ki, wi, q, pages, table, pos):
    """The rope part in front."""
    chosen = marked(qi, ki, wi, pos)
    slots = slots_of(table.unsqueeze(1).expand(-1, chosen.shape[1], -1), chosen)
    rows = pages.view(-1, JOINT)[slots]
    logits = torch.einsum("bthd,btkd->bthk", q, rows) * 0.2
    weights = logits.masked_fill((chosen < 0)[:, :, None], -INF).softmax(-1)
    return torch.einsum("bthk,btkd->bthd", weights, rows[..., ROPE:])


@style("n_q_nope n_q_rope pages table n_pos req W_UK W_UV")
def tokens_of_a_table(qi, ki, wi, qn, qr, pages, table, pos, req, w_uk, w_uv):
    """One list of tokens; the row of the table that each reads is gathered first; absorbed by hand."""
    chosen = marked_tokens(qi, ki, wi, pos, req)
    rows = pages.view(-1, JOINT)[slots_of(table[req], chosen)]
    q = torch.cat([torch.einsum("nhd,hdc->nhc", qn, w_uk), qr], dim=-1)
    out = attend(q, rows, chosen < 0, scale=(NOPE + ROPE) ** -0.5)
    return torch.bmm(out.transpose(0, 1), w_uv).transpose(0, 1).flatten(1)


@style("n_q_latent n_q_rope pages table n_pos req")
def tokens_by_request_and_block(qi, ki, wi, ql, qr, pages, table, pos, req):
    """Block by table[request, position // page] at once."""
    chosen = marked_tokens(qi, ki, wi, pos, req)
    safe = torch.where(chosen < 0, 0, chosen)
    block = table[req[:, None], torch.div(safe, PAGE, rounding_mode="floor")]
    rows = pages[block, safe % PAGE]
    c, pe = rows.tensor_split([LATENT], dim=-1)
    logits = torch.einsum("nhl,nkl->nhk", ql, c) + torch.einsum("nhr,nkr->nhk", qr, pe)
    logits = (logits * 0.23).masked_fill((chosen < 0).unsqueeze(1), -INF)
    return torch.einsum("nhk,nkl->nhl", F.softmax(logits, dim=-1, dtype=torch.float32).to(rows.dtype), c)


@style("n_q_joint slots token_table n_pos req")
def tokens_of_slots(qi, ki, wi, q, slots, table, pos, req):
    """A pool of single slots; a table of one slot a position."""
    chosen = marked_tokens(qi, ki, wi, pos, req)
    where = table.index_select(0, req).gather(1, chosen.clamp(min=0))
    return attend(q, slots.squeeze(1)[where], chosen < 0)


@style("n_q_joint joint n_pos req")
def tokens_of_one_cache(qi, ki, wi, q, joint, pos, req):
    """No pages: a row of the cache for each request."""
    chosen = marked_tokens(qi, ki, wi, pos, req)
    return attend(q, joint[req.unsqueeze(1), chosen.clamp(min=0)], chosen < 0)


@style("n_q_joint pages table n_pos req lens")
def tokens_hidden_by_position(qi, ki, wi, q, pages, table, pos, req, lens):
    """No marks: hidden slots are told by the token's position."""
    scores = (torch.einsum("nhd,nsd->nhs", qi, ki[req]).relu() * wi.unsqueeze(-1)).sum(1)
    chosen = scores.masked_fill(torch.arange(ki.shape[1]) > pos[:, None], -INF).topk(K, dim=-1).indices
    return attend(q, pages.flatten(0, 1)[slots_of(table[req], chosen)], chosen > pos[:, None])


@style("q_latent q_rope joint pos")
def cache_split(qi, ki, wi, ql, qr, joint, pos):
    """One tensor of both parts, split after the gather."""
    chosen = marked(qi, ki, wi, pos)
    rows = joint[torch.arange(joint.shape[0])[:, None, None], chosen.clamp(min=0)]
    c, pe = rows[..., :LATENT], rows[..., LATENT:]
    logits = torch.einsum("bthd,btkd->bthk", ql, c) + torch.einsum("bthd,btkd->bthk", qr, pe)
    logits = (logits * 0.25).masked_fill((chosen < 0).unsqueeze(2), -INF)
    return torch.einsum("bthk,btkd->bthd", logits.softmax(-1), c)


@style("q_nope q_rope pages table pos k_up v_up")
def pages_projected(qi, ki, wi, qn, qr, pages, table, pos, k_up, v_up):
    """Keys and values projected from the rows that were read: not absorbed, of different sizes."""
    chosen = marked(qi, ki, wi, pos)
    slots = slots_of(table.unsqueeze(1).expand(-1, chosen.shape[1], -1), chosen)
    c, pe = pages.view(-1, JOINT)[slots].split([LATENT, ROPE], dim=-1)
    k = F.linear(c, k_up).unflatten(-1, (HEADS, NOPE))
    v = F.linear(c, v_up).unflatten(-1, (HEADS, V))
    logits = torch.einsum("bthd,btkhd->bthk", qn, k) + torch.einsum("bthd,btkd->bthk", qr, pe)
    logits = (logits * (NOPE + ROPE) ** -0.5).masked_fill((chosen < 0).unsqueeze(2), -INF)
    return torch.einsum("bthk,btkhd->bthd", logits.softmax(-1), v)


def projected(c, weight, size):
    """[B, H, S, size]."""
    return F.linear(c, weight).view(*c.shape[:2], HEADS, size).transpose(1, 2)


@style("q_nope c k_up v_up tril")
def two_projections_tril(qi, ki, wi, q, c, k_up, v_up, tril):
    """Keys and values by two weights; chosen times causal, both of ones and zeros, compared with zero."""
    b, t = q.shape[:2]
    c, ki = c[:, :t], ki[:, :t]
    seen = tril[:, 0, :t, :t]
    scores = (torch.einsum("bthd,bsd->bths", qi, ki).relu() * wi.unsqueeze(-1)).sum(2)
    chosen = scores.masked_fill(seen == 0, -INF).topk(min(K, t), dim=-1).indices
    keep = torch.zeros(b, t, t, dtype=q.dtype).scatter(2, chosen, 1.0).unsqueeze(1) * tril[:, :, :t, :t]
    logits = (q.transpose(1, 2) @ projected(c, k_up, NOPE).transpose(-2, -1)) * NOPE**-0.5
    weights = F.softmax(logits.masked_fill(keep == 0, -INF), dim=-1)
    return (weights @ projected(c, v_up, V)).transpose(1, 2).contiguous().view(b, t, HEADS * V)


@style("q_nope q_rope c kr k_up v_up tril")
def two_projections_where(qi, ki, wi, qn, qr, c, kr, k_up, v_up, tril):
    """The same with a rope part for all heads, the mask read as not zero."""
    b, t = qn.shape[:2]
    c, kr, ki = c[:, :t], kr[:, :t], ki[:, :t]
    scores = (torch.einsum("bthd,bsd->bths", qi, ki).relu() * wi.unsqueeze(-1)).sum(2)
    chosen = torch.where(tril[0, 0, :t, :t] != 0, scores, -INF).topk(min(K, t), dim=-1).indices
    keep = tril[0, 0, :t, :t] * torch.zeros(b, t, t, dtype=qn.dtype).scatter_(-1, chosen, 1.0)
    q = torch.cat([qn, qr], dim=-1).transpose(1, 2)
    k = torch.cat([projected(c, k_up, NOPE), kr.unsqueeze(1).expand(-1, HEADS, -1, -1)], dim=-1)
    logits = torch.where((keep != 0).unsqueeze(1), q @ k.mT * 0.24, -INF)
    return torch.einsum("bhts,bhsv->bthv", logits.softmax(-1), projected(c, v_up, V))


@style("q_nope q_rope c kr k_up v_up pos")
def two_projections_gathered(qi, ki, wi, qn, qr, c, kr, k_up, v_up, pos):
    """All keys and values projected, the chosen ones gathered."""
    chosen = marked(qi, ki, wi, pos)
    batch, safe = torch.arange(c.shape[0])[:, None, None], chosen.clamp(min=0)
    k = F.linear(c, k_up).unflatten(-1, (HEADS, NOPE))[batch, safe]
    v = F.linear(c, v_up).unflatten(-1, (HEADS, V))[batch, safe]
    logits = torch.einsum("bthd,btkhd->bthk", qn, k) + torch.einsum("bthd,btkd->bthk", qr, kr[batch, safe])
    logits = (logits * 0.2).masked_fill((chosen < 0).unsqueeze(2), -INF)
    return torch.einsum("bthk,btkhd->bthd", logits.softmax(-1), v)


@style("q_nope c k_up v_up pos")
def two_projections_of_rows(qi, ki, wi, q, c, k_up, v_up, pos):
    """The chosen rows of the latent gathered, then projected."""
    chosen = select(qi, ki, wi, pos)
    rows = torch.take_along_dim(c.unsqueeze(1), chosen.unsqueeze(-1), dim=2)
    k = (rows @ k_up.T).unflatten(-1, (HEADS, NOPE))
    v = (rows @ v_up.T).unflatten(-1, (HEADS, V))
    logits = (q.unsqueeze(2) * k).sum(-1).transpose(2, 3) * NOPE**-0.5
    weights = logits.masked_fill((chosen > pos.unsqueeze(-1)).unsqueeze(2), -INF).softmax(-1)
    return torch.einsum("bthk,btkhd->bthd", weights, v)
