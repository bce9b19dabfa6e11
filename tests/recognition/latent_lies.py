"""What is almost a sparse attention over a latent: each with one lie, and the words of its refusal.

Those without words are the operator after all, with other operands: they may be fused, and their numbers must be right.
"""

import torch
import torch.nn.functional as F
from attention_styles import HEADS, INF, LATENT, NOPE, PAGE, ROPE, K, V
from latent_styles import JOINT, Program, attend, marked, marked_tokens, projected, slots_of

LIES: dict[str, Program] = {}
NO_SOFTMAX = "not a softmax over the selected"


def lie(arguments, *words):
    def register(fn):
        LIES[fn.__name__] = Program(fn, ("qi", "ki", "wi", *arguments.split()), words)
        return fn

    return register


def rows_of(pages, table, chosen):
    return pages.view(-1, JOINT)[slots_of(table.unsqueeze(1).expand(-1, chosen.shape[1], -1), chosen)]


def two_dots(ql, qr, c, pe, hidden, values, scale=0.2, rope_scale=0.2):
    logits = torch.einsum("bthd,btkd->bthk", ql, c) * scale + torch.einsum("bthd,btkd->bthk", qr, pe) * rope_scale
    return torch.einsum("bthk,btkd->bthd", logits.masked_fill(hidden.unsqueeze(2), -INF).softmax(-1), values)


@lie("q_latent q_rope pages table pos", NO_SOFTMAX)
def rope_of_the_next_choice(qi, ki, wi, ql, qr, pages, table, pos):
    chosen = marked(qi, ki, wi, pos)
    c, pe = rows_of(pages, table, chosen).split([LATENT, ROPE], dim=-1)
    return two_dots(ql, qr, c, pe.roll(1, dims=2), chosen < 0, c)


@lie("q_latent q_rope pages table pos", NO_SOFTMAX)
def rope_of_the_first_choice(qi, ki, wi, ql, qr, pages, table, pos):
    chosen = marked(qi, ki, wi, pos)
    c, pe = rows_of(pages, table, chosen).split([LATENT, ROPE], dim=-1)
    return two_dots(ql, qr, c, pe[:, :, :1].expand_as(pe), chosen < 0, c)


@lie("q_latent q_rope pages table pos", NO_SOFTMAX)
def values_are_the_other_end(qi, ki, wi, ql, qr, pages, table, pos):
    chosen = marked(qi, ki, wi, pos)
    rows = rows_of(pages, table, chosen)
    return two_dots(ql, qr, rows[..., :LATENT], rows[..., LATENT:], chosen < 0, rows[..., ROPE:])


@lie("q_latent q_rope joint pos", NO_SOFTMAX)
def values_are_the_other_end_of_a_cache(qi, ki, wi, ql, qr, joint, pos):
    chosen = marked(qi, ki, wi, pos)
    rows = joint[torch.arange(len(joint))[:, None, None], chosen.clamp(min=0)]
    return two_dots(ql, qr, rows[..., ROPE:], rows[..., :ROPE], chosen < 0, rows[..., :LATENT])


@lie("q_joint pages table pos", NO_SOFTMAX)
def values_turned_around(qi, ki, wi, q, pages, table, pos):
    chosen = marked(qi, ki, wi, pos)
    rows = rows_of(pages, table, chosen)
    logits = torch.einsum("bthd,btkd->bthk", q, rows) * 0.2
    weights = logits.masked_fill((chosen < 0).unsqueeze(2), -INF).softmax(-1)
    return torch.einsum("bthk,btkd->bthd", weights, rows[..., :LATENT].flip(-1))


@lie("q_joint pages table pos", NO_SOFTMAX)
def values_from_the_middle(qi, ki, wi, q, pages, table, pos):
    chosen = marked(qi, ki, wi, pos)
    rows = rows_of(pages, table, chosen)
    logits = torch.einsum("bthd,btkd->bthk", q, rows) * 0.2
    weights = logits.masked_fill((chosen < 0).unsqueeze(2), -INF).softmax(-1)
    return torch.einsum("bthk,btkd->bthd", weights, rows[..., 2 : LATENT + 2])


@lie("q_latent q_rope pages table pos", NO_SOFTMAX)
def only_the_latent_is_scaled(qi, ki, wi, ql, qr, pages, table, pos):
    chosen = marked(qi, ki, wi, pos)
    c, pe = rows_of(pages, table, chosen).split([LATENT, ROPE], dim=-1)
    return two_dots(ql, qr, c, pe, chosen < 0, c, LATENT**-0.5, 1.0)


@lie("q_joint pages table pos")
def scale_of_another_width(qi, ki, wi, q, pages, table, pos):
    """The operator with the scale that is written."""
    chosen = marked(qi, ki, wi, pos)
    return attend(q, rows_of(pages, table, chosen), chosen < 0, scale=JOINT**-0.5)


@lie("q_joint pages table pos", NO_SOFTMAX)
def offset_of_the_next_position(qi, ki, wi, q, pages, table, pos):
    chosen = marked(qi, ki, wi, pos)
    safe = chosen.clamp(min=0)
    blocks = table.unsqueeze(1).expand(-1, chosen.shape[1], -1).gather(-1, safe // PAGE)
    rows = pages.view(-1, JOINT)[blocks * PAGE + (safe + 1) % PAGE]
    return attend(q, rows, chosen < 0)


@lie("n_q_joint pages table n_pos req")
def table_of_the_other_request(qi, ki, wi, q, pages, table, pos, req):
    """The operator with other numbers of requests."""
    chosen = marked_tokens(qi, ki, wi, pos, req)
    other = (req + 1) % len(table)
    return attend(q, pages.view(-1, JOINT)[slots_of(table[other], chosen)], chosen < 0)


@lie("n_q_joint pages table n_pos req", NO_SOFTMAX)
def first_page_of_the_first_request(qi, ki, wi, q, pages, table, pos, req):
    chosen = marked_tokens(qi, ki, wi, pos, req)
    safe = chosen.clamp(min=0)
    shared = torch.where(safe < PAGE, 0, req[:, None])
    rows = pages[table[shared, safe // PAGE], safe % PAGE]
    return attend(q, rows, chosen < 0)


@lie("n_q_joint joint n_pos req", NO_SOFTMAX)
def values_of_the_other_request(qi, ki, wi, q, joint, pos, req):
    chosen = marked_tokens(qi, ki, wi, pos, req)
    rows, others = (joint[r.unsqueeze(1), chosen.clamp(min=0)] for r in (req, (req + 1) % len(joint)))
    logits = (torch.einsum("nhd,nkd->nhk", q, rows) * 0.2).masked_fill((chosen < 0).unsqueeze(1), -INF)
    return torch.einsum("nhk,nkd->nhd", logits.softmax(-1), others[..., :LATENT])


@lie("n_q_joint pages table n_pos req lens", NO_SOFTMAX)
def hidden_by_the_length_of_the_request(qi, ki, wi, q, pages, table, pos, req, lens):
    """Keys of the future: a token in the middle of its request sees what the last one does."""
    scores = (torch.einsum("nhd,nsd->nhs", qi, ki[req]).relu() * wi.unsqueeze(-1)).sum(1)
    chosen = scores.masked_fill(torch.arange(ki.shape[1]) > pos[:, None], -INF).topk(K, dim=-1).indices
    return attend(q, pages.flatten(0, 1)[slots_of(table[req], chosen)], chosen >= lens[req][:, None])


def projected_rows(qn, qr, c, pe, chosen, k_weight, v_weight, size):
    k = F.linear(c, k_weight).unflatten(-1, (HEADS, NOPE))
    v = F.linear(c, v_weight).unflatten(-1, (HEADS, size))
    logits = torch.einsum("bthd,btkhd->bthk", qn, k) + torch.einsum("bthd,btkd->bthk", qr, pe)
    logits = (logits * 0.24).masked_fill((chosen < 0).unsqueeze(2), -INF)
    return torch.einsum("bthk,btkhd->bthd", logits.softmax(-1), v)


@lie("q_nope q_rope pages table pos k_up", "cannot be told apart")
def values_by_the_projection_of_keys(qi, ki, wi, qn, qr, pages, table, pos, k_up):
    chosen = marked(qi, ki, wi, pos)
    c, pe = rows_of(pages, table, chosen).split([LATENT, ROPE], dim=-1)
    return projected_rows(qn, qr, c, pe, chosen, k_up, k_up, NOPE)


@lie("q_nope q_rope pages table pos k_up v_up", "cannot be told apart")
def values_of_the_next_choice(qi, ki, wi, qn, qr, pages, table, pos, k_up, v_up):
    chosen = marked(qi, ki, wi, pos)
    c, pe = rows_of(pages, table, chosen).split([LATENT, ROPE], dim=-1)
    k = F.linear(c, k_up).unflatten(-1, (HEADS, NOPE))
    v = F.linear(c.roll(1, dims=2), v_up).unflatten(-1, (HEADS, V))
    logits = torch.einsum("bthd,btkhd->bthk", qn, k) + torch.einsum("bthd,btkd->bthk", qr, pe)
    logits = (logits * 0.24).masked_fill((chosen < 0).unsqueeze(2), -INF)
    return torch.einsum("bthk,btkhd->bthd", logits.softmax(-1), v)


@lie("q_nope q_rope pages table pos k_up v_up", NO_SOFTMAX)
def projections_with_an_edge(qi, ki, wi, qn, qr, pages, table, pos, k_up, v_up):
    chosen = marked(qi, ki, wi, pos)
    c, pe = rows_of(pages, table, chosen).split([LATENT, ROPE], dim=-1)
    k = F.linear(c, k_up).unflatten(-1, (HEADS, NOPE))
    v = F.linear(c, v_up).relu().unflatten(-1, (HEADS, V))
    logits = torch.einsum("bthd,btkhd->bthk", qn, k) + torch.einsum("bthd,btkd->bthk", qr, pe)
    logits = (logits * 0.24).masked_fill((chosen < 0).unsqueeze(2), -INF)
    return torch.einsum("bthk,btkhd->bthd", logits.softmax(-1), v)


def by_buffer(qi, ki, wi, q, c, k_up, v_up, seen, masked):
    """Chosen under `seen`, weighed by the logits that `masked(logits, ones)` leaves; ones where a key is chosen."""
    t = q.shape[1]
    c, ki = c[:, :t], ki[:, :t]
    scores = (torch.einsum("bthd,bsd->bths", qi, ki).relu() * wi.unsqueeze(-1)).sum(2)
    chosen = scores.masked_fill(seen == 0, -INF).topk(min(K, t), dim=-1).indices
    ones = torch.zeros(*chosen.shape[:2], t, dtype=q.dtype).scatter(2, chosen, 1.0).unsqueeze(1)
    logits = masked((q.transpose(1, 2) @ projected(c, k_up, NOPE).transpose(-2, -1)) * NOPE**-0.5, ones)
    return (logits.softmax(-1) @ projected(c, v_up, V)).transpose(1, 2)


BUFFER = "q_nope c k_up v_up tril"


@lie(BUFFER, "another mask")
def attention_under_the_buffer_turned(qi, ki, wi, q, c, k_up, v_up, tril):
    t = q.shape[1]
    turned = tril[:, :, :t, :t].transpose(-1, -2)

    def masked(logits, ones):
        return logits.masked_fill(ones * turned == 0, -INF)

    return by_buffer(qi, ki, wi, q, c, k_up, v_up, tril[0, 0, :t, :t], masked)


@lie(BUFFER, "another mask")
def attention_under_the_rows_below(qi, ki, wi, q, c, k_up, v_up, tril):
    t = q.shape[1]

    def masked(logits, ones):
        return logits.masked_fill(ones * tril[:, :, 1 : t + 1, :t] == 0, -INF)

    return by_buffer(qi, ki, wi, q, c, k_up, v_up, tril[0, 0, :t, :t], masked)


@lie(BUFFER, NO_SOFTMAX)
def chosen_or_causal(qi, ki, wi, q, c, k_up, v_up, tril):
    t = q.shape[1]

    def masked(logits, ones):
        return logits.masked_fill(ones + tril[:, :, :t, :t] == 0, -INF)

    return by_buffer(qi, ki, wi, q, c, k_up, v_up, tril[0, 0, :t, :t], masked)


@lie(BUFFER, NO_SOFTMAX)
def logits_times_the_mask(qi, ki, wi, q, c, k_up, v_up, tril):
    """What is hidden counts as a logit of zero."""
    t = q.shape[1]

    def masked(logits, ones):
        return logits * (ones * tril[:, :, :t, :t])

    return by_buffer(qi, ki, wi, q, c, k_up, v_up, tril[0, 0, :t, :t], masked)


@lie(BUFFER, NO_SOFTMAX)
def more_than_half_of_the_product(qi, ki, wi, q, c, k_up, v_up, tril):
    """Right for ones and zeros, and nobody promises that the buffer holds nothing else."""
    t = q.shape[1]

    def masked(logits, ones):
        return logits.masked_fill(ones * tril[:, :, :t, :t] < 0.5, -INF)

    return by_buffer(qi, ki, wi, q, c, k_up, v_up, tril[0, 0, :t, :t], masked)


@lie(BUFFER, "another mask")
def indexer_under_no_buffer(qi, ki, wi, q, c, k_up, v_up, tril):
    t = q.shape[1]
    seen = torch.arange(t) <= torch.arange(t)[:, None]

    def masked(logits, ones):
        return logits.masked_fill(ones * tril[:, :, :t, :t] == 0, -INF)

    return by_buffer(qi, ki, wi, q, c, k_up, v_up, seen, masked)
