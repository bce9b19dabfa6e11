"""An indexer and the attention behind it under masks that the caller makes: as authors write it, and almost so.

`mask` is boolean [B, 1, T, S], True where a key is seen; `bias` the same as numbers to be added; `pad` integers [B, S],
`history` the first of them.
"""

import torch
import torch.nn.functional as F

B, T, S, H, D, K, HEADS, LATENT = 2, 7, 29, 5, 6, 4, 3, 9
INF = float("inf")
ARGUMENTS = ("qi", "ki", "wi", "q", "c", "mask", "bias", "pad", "pos")


def operands(names, dtype=torch.float32, seed=0, kind="random", rows=T):
    """The arguments of a program; every row sees a key, in no order unless `kind` is "left" (padded prompts)."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    start = torch.tensor([S - rows, 11])
    pos = start[:, None] + torch.arange(rows)
    pad = torch.ones(B, S, dtype=torch.int64)
    pad[1, :8] = 0
    if kind == "left":
        mask = (torch.arange(S) <= pos[..., None]) & pad.bool()[:, None]
    else:
        mask = torch.rand(B, rows, S, generator=generator) < torch.tensor([0.1, 0.7])[:, None, None]
        mask[..., 0] |= ~mask.any(-1)
    bias = torch.zeros(B, rows, S, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
    if kind == "numbers":
        bias = bias + normal(B, rows, S) * mask
    made = {
        "qi": normal(B, rows, H, D),
        "ki": normal(B, S, D),
        "wi": normal(B, rows, H),
        "q": normal(B, rows, HEADS, LATENT),
        "c": normal(B, S, LATENT),
        "mask": mask.unsqueeze(1),
        "bias": bias.unsqueeze(1),
        "pad": pad,
        "history": pad[:, : S - 5].contiguous(),
        "pos": pos,
    }
    return [made[name] for name in names]


def scores_of(qi, ki, wi):
    dots = torch.einsum("bthd,bsd->bths", qi, ki) * D**-0.5
    return (dots.relu() * (wi * H**-0.5).unsqueeze(-1)).sum(2)


def best(scores):
    return scores.topk(K, dim=-1).indices


def unchosen(chosen):
    return torch.ones(*chosen.shape[:2], S, dtype=torch.bool).scatter(-1, chosen, False).unsqueeze(1)


def attend(q, c, mask):
    """Boolean or added, in scaled_dot_product_attention."""
    keys = c.unsqueeze(1).expand(-1, HEADS, -1, -1)
    return F.scaled_dot_product_attention(q.transpose(1, 2), keys, keys, attn_mask=mask, scale=0.3).transpose(1, 2)


def by_hand(q, c, mask):
    """Added in front of a softmax."""
    logits = torch.einsum("bthd,bsd->bhts", q, c) * 0.3 + mask
    return torch.einsum("bhts,bsd->bthd", logits.softmax(-1), c)


PROGRAMS, NEAR_INDEXERS, NEAR_ATTENTIONS = {}, {}, {}


def program(arguments):
    def register(fn):
        PROGRAMS[fn.__name__] = (fn, tuple(arguments.split()))
        return fn

    return register


def near(table, arguments, *words):
    def register(fn):
        table[fn.__name__] = (fn, tuple(arguments.split()), words)
        return fn

    return register


@program("qi ki wi q c mask")
def boolean(qi, ki, wi, q, c, mask):
    chosen = best(scores_of(qi, ki, wi).masked_fill(~mask[:, 0], -INF))
    return attend(q, c, mask & ~unchosen(chosen))


@program("qi ki wi q c bias")
def added(qi, ki, wi, q, c, bias):
    chosen = best(scores_of(qi, ki, wi) + bias[:, 0])
    return by_hand(q, c, bias.masked_fill(unchosen(chosen), torch.finfo(q.dtype).min))


@program("qi ki wi q c mask")
def where_and_gather(qi, ki, wi, q, c, mask):
    """The attention reads the chosen rows alone, and their part of the mask."""
    seen = mask.squeeze(1)
    chosen = best(torch.where(seen, scores_of(qi, ki, wi), -INF))
    rows = c[torch.arange(B)[:, None, None], chosen]
    logits = torch.einsum("bthd,btkd->bthk", q, rows) * 0.3
    logits = logits.masked_fill(~seen.gather(-1, chosen).unsqueeze(2), -INF)
    return torch.einsum("bthk,btkd->bthd", logits.softmax(-1), rows)


@program("qi ki wi q c pad pos")
def padding_and_position(qi, ki, wi, q, c, pad, pos):
    """One mask made in the graph of a padding mask and of positions."""
    seen = (torch.arange(S) <= pos[..., None]) & (pad != 0)[:, None]
    chosen = best(scores_of(qi, ki, wi).masked_fill(~seen, -INF))
    return attend(q, c, (seen & ~unchosen(chosen).squeeze(1)).unsqueeze(1))


@program("qi ki wi q c history pos")
def history_and_position(qi, ki, wi, q, c, history, pos):
    """The padding mask ends with the history; the rest of the cache is hidden by position."""
    seen = F.pad(history.bool(), (0, S - history.shape[1]))[:, None] & (torch.arange(S) <= pos[..., None])
    chosen = best(scores_of(qi, ki, wi).masked_fill(~seen, -INF))
    return attend(q, c, (seen & ~unchosen(chosen).squeeze(1)).unsqueeze(1))


@program("qi ki wi q c pad pos")
def one_after_the_other(qi, ki, wi, q, c, pad, pos):
    """Positions hide first, padding second."""
    future, padding = torch.arange(S) > pos[..., None], (pad == 0)[:, None]
    chosen = best(scores_of(qi, ki, wi).masked_fill(future, -INF).masked_fill(padding, -INF))
    hidden = unchosen(chosen) | future.unsqueeze(1)
    logits = torch.einsum("bthd,bsd->bhts", q, c) * 0.3
    logits = logits.masked_fill(hidden, -INF).masked_fill(padding.unsqueeze(1), -INF)
    return torch.einsum("bhts,bsd->bthd", logits.softmax(-1), c)


@program("qi ki wi q c mask")
def masked_in_the_attention_alone(qi, ki, wi, q, c, mask):
    """The indexer sees every key: fused as it is written, not as it may have been meant."""
    return attend(q, c, mask & ~unchosen(best(scores_of(qi, ki, wi))))


@near(NEAR_INDEXERS, "qi ki wi mask", "not sum_h w * relu")
def mask_before_relu(qi, ki, wi, mask):
    dots = torch.einsum("bthd,bsd->bths", qi, ki).masked_fill(~mask[:, 0].unsqueeze(2), -INF)
    return best((dots.relu() * wi.unsqueeze(-1)).sum(2))


@near(NEAR_INDEXERS, "qi ki wi bias", "not sum_h w * relu")
def bias_before_relu(qi, ki, wi, bias):
    dots = torch.einsum("bthd,bsd->bths", qi, ki) + bias[:, 0].unsqueeze(2)
    return best((dots.relu() * wi.unsqueeze(-1)).sum(2))


@near(NEAR_INDEXERS, "qi ki wi bias", "not sum_h w * relu")
def bias_under_the_weights(qi, ki, wi, bias):
    dots = torch.einsum("bthd,bsd->bths", qi, ki).relu() + bias[:, 0].unsqueeze(2)
    return best((dots * wi.unsqueeze(-1)).sum(2))


@near(NEAR_INDEXERS, "qi ki wi mask", "not sum_h w * relu")
def hidden_scores_are_zero(qi, ki, wi, mask):
    return best(scores_of(qi, ki, wi).masked_fill(~mask[:, 0], 0.0))


@near(NEAR_INDEXERS, "qi ki wi mask", "not sum_h w * relu")
def multiplied_by_the_mask(qi, ki, wi, mask):
    return best(scores_of(qi, ki, wi) * mask[:, 0])


@near(NEAR_INDEXERS, "qi ki wi mask", "no value has the shape")
def a_mask_of_queries(qi, ki, wi, mask):
    return best(scores_of(qi, ki, wi).masked_fill(~mask[:, 0, :, :1], -INF))


@near(NEAR_INDEXERS, "qi ki wi mask", "no value has the shape")
def only_the_next_key(qi, ki, wi, mask):
    """A key is hidden where its neighbour is."""
    hidden = ~mask[:, 0]
    scores = scores_of(qi, ki, wi)
    return best(torch.cat([scores[..., :1], scores[..., 1:].masked_fill(hidden[..., :-1], -INF)], -1))


def after_an_indexer(qi, ki, wi, mask):
    return best(scores_of(qi, ki, wi).masked_fill(~mask[:, 0], -INF))


@near(NEAR_ATTENTIONS, "qi ki wi q c mask", "future")
def masked_in_the_indexer_alone(qi, ki, wi, q, c, mask):
    return attend(q, c, ~unchosen(after_an_indexer(qi, ki, wi, mask)))


@near(NEAR_ATTENTIONS, "qi ki wi q c mask", "another mask")
def the_contrary_mask(qi, ki, wi, q, c, mask):
    keep = ~mask & ~unchosen(after_an_indexer(qi, ki, wi, mask))
    return attend(q, c, keep)


@near(NEAR_ATTENTIONS, "qi ki wi q c mask", "another mask")
def shifted_by_one(qi, ki, wi, q, c, mask):
    return attend(q, c, mask.roll(1, -1) & ~unchosen(after_an_indexer(qi, ki, wi, mask)))


@near(NEAR_ATTENTIONS, "qi ki wi q c mask", "not a softmax")
def masked_after_the_softmax(qi, ki, wi, q, c, mask):
    drop = unchosen(after_an_indexer(qi, ki, wi, mask))
    weights = (torch.einsum("bthd,bsd->bhts", q, c) * 0.3).masked_fill(drop, -INF).softmax(-1)
    return torch.einsum("bhts,bsd->bthd", weights.masked_fill(~mask, 0.0), c)


@near(NEAR_ATTENTIONS, "qi ki wi q c bias", "not a softmax")
def bias_under_the_scale(qi, ki, wi, q, c, bias):
    chosen = best(scores_of(qi, ki, wi) + bias[:, 0])
    logits = (torch.einsum("bthd,bsd->bhts", q, c) + bias.masked_fill(unchosen(chosen), -INF)) * 0.3
    return torch.einsum("bhts,bsd->bthd", logits.softmax(-1), c)
