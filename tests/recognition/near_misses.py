"""Programs that are almost an indexer or almost sparse attention, each with the words that its refusal must hold."""

import torch
import torch.nn.functional as F

INF = float("inf")
K = 5

INDEXERS: dict[str, tuple] = {}
ATTENTIONS: dict[str, tuple] = {}
STRANGERS: dict[str, tuple] = {}
# Not the usual rule, yet one that the operators can be told: the length of each row is an operand.
OTHER_LENGTHS: dict[str, tuple] = {}


def near(table, *words):
    def register(fn):
        table[fn.__name__] = (fn, words)
        return fn

    return register


def dots_of(q, k):
    return torch.einsum("bthd,bsd->bths", q, k)


def future(pos, length):
    return torch.arange(length) > pos.unsqueeze(-1)


def choose(scores, pos):
    return scores.masked_fill(future(pos, scores.shape[-1]), -INF).topk(K, dim=-1).indices


@near(INDEXERS, "relu is missing")
def no_relu(q, k, w, pos):
    return choose((dots_of(q, k) * w.unsqueeze(-1)).sum(2), pos)


@near(INDEXERS, "relu is squared")
def relu_squared(q, k, w, pos):
    return choose((dots_of(q, k).relu().square() * w.unsqueeze(-1)).sum(2), pos)


@near(INDEXERS, "relu comes after the weights")
def relu_after_weights(q, k, w, pos):
    return choose((dots_of(q, k) * w.unsqueeze(-1)).relu().sum(2), pos)


@near(INDEXERS, "relu comes after the sum")
def relu_after_sum(q, k, w, pos):
    return choose((dots_of(q, k) * w.unsqueeze(-1)).sum(2).relu(), pos)


@near(INDEXERS, "softmax")
def softmax_for_relu(q, k, w, pos):
    return choose((dots_of(q, k).softmax(-1) * w.unsqueeze(-1)).sum(2), pos)


@near(INDEXERS, "not sum_h w * relu")
def masked_softmax_for_relu(q, k, w, pos):
    hide = future(pos, k.shape[1])
    p = dots_of(q, k).masked_fill(hide.unsqueeze(2), -INF).softmax(-1)
    scores = (p * w.unsqueeze(-1)).sum(2)
    return scores.masked_fill(hide, -INF).topk(K, dim=-1).indices


@near(INDEXERS, "smallest")
def smallest(q, k, w, pos):
    scores = (dots_of(q, k).relu() * w.unsqueeze(-1)).sum(2)
    return scores.masked_fill(future(pos, k.shape[1]), INF).topk(K, dim=-1, largest=False).indices


@near(INDEXERS, "")
def flat_head_twice(q, k, w, pos):
    """Of three heads cut from one flat tensor the last is read twice, the second never."""
    first, _, last = q.flatten(2).chunk(3, -1)
    dots = torch.stack([torch.bmm(part, k.mT) for part in (first, last, last)], dim=-1)
    return choose((dots.relu() * w.unsqueeze(2)).sum(-1), pos)


@near(INDEXERS, "")
def flat_heads_cut_elsewhere(q, k, w, pos):
    """The heads are cut as if the flat tensor held them side by side, feature by feature, and one ends early."""
    flat = q.flatten(2)
    parts = [flat[..., head::3] * (torch.arange(10) < 9 + head) for head in range(3)]
    dots = torch.stack([torch.bmm(part, k.mT) for part in parts], dim=-1)
    return choose((dots.relu() * w.unsqueeze(2)).sum(-1), pos)


@near(INDEXERS, "also read", "returned")
def scores_returned(q, k, w, pos):
    scores = (dots_of(q, k).relu() * w.unsqueeze(-1)).sum(2)
    scores = scores.masked_fill(future(pos, k.shape[1]), -INF)
    return scores.topk(K, dim=-1).indices, scores


@near(INDEXERS, "values")
def values_returned(q, k, w, pos):
    scores = (dots_of(q, k).relu() * w.unsqueeze(-1)).sum(2)
    return tuple(scores.masked_fill(future(pos, k.shape[1]), -INF).topk(K, dim=-1))


@near(INDEXERS, "values")
def values_summed(q, k, w, pos):
    scores = (dots_of(q, k).relu() * w.unsqueeze(-1)).sum(2)
    values, chosen = scores.masked_fill(future(pos, k.shape[1]), -INF).topk(K, dim=-1)
    return chosen, values.masked_fill(values == -INF, 0).sum(-1)


@near(INDEXERS, "another rule")
def strided(q, k, w, pos):
    place = torch.arange(k.shape[1])
    hide = future(pos, k.shape[1]) | (place % 3 == 1)
    return (dots_of(q, k).relu() * w.unsqueeze(-1)).sum(2).masked_fill(hide, -INF).topk(K, dim=-1).indices


@near(INDEXERS, "another rule")
def sliding_window(q, k, w, pos):
    behind = pos.unsqueeze(-1) - torch.arange(k.shape[1])
    hide = (behind < 0) | (behind >= 9)
    return (dots_of(q, k).relu() * w.unsqueeze(-1)).sum(2).masked_fill(hide, -INF).topk(K, dim=-1).indices


@near(OTHER_LENGTHS, "lightning_indexer")
def two_beyond_the_row(q, k, w, pos):
    hide = torch.arange(k.shape[1]) > pos.unsqueeze(-1) + 2
    return (dots_of(q, k).relu() * w.unsqueeze(-1)).sum(2).masked_fill(hide, -INF).topk(K, dim=-1).indices


@near(INDEXERS, "another rule")
def before_the_row(q, k, w, pos):
    hide = torch.arange(k.shape[1]) <= pos.unsqueeze(-1)
    return (dots_of(q, k).relu() * w.unsqueeze(-1)).sum(2).masked_fill(hide, -INF).topk(K, dim=-1).indices


@near(INDEXERS, "heads are not summed")
def over_heads(q, k, w, pos):
    scores = dots_of(q, k).relu() * w.unsqueeze(-1)
    return scores.masked_fill(future(pos, k.shape[1]).unsqueeze(2), -INF).topk(2, dim=2).indices


@near(INDEXERS, "heads are not summed")
def for_each_head(q, k, w, pos):
    scores = dots_of(q, k).relu() * w.unsqueeze(-1)
    return scores.masked_fill(future(pos, k.shape[1]).unsqueeze(2), -INF).topk(K, dim=-1).indices


@near(INDEXERS, "absolute value")
def abs_for_relu(q, k, w, pos):
    return choose((dots_of(q, k).abs() * w.unsqueeze(-1)).sum(2), pos)


@near(INDEXERS, "")
def ones_for_weights(q, k, w, pos):
    return choose((dots_of(q, k).relu() * torch.ones_like(w).unsqueeze(-1)).sum(2), pos)


@near(INDEXERS, "")
def no_weights(q, k, w, pos):
    return choose(dots_of(q, k).relu().sum(2), pos)


@near(INDEXERS, "")
def key_for_each_head(q, k, w, pos):
    keys = torch.stack([k, k.roll(1, 1), k.roll(2, 1)], dim=2)
    dots = torch.einsum("bthd,bshd->bths", q, keys)
    return choose((dots.relu() * w.unsqueeze(-1)).sum(2), pos)


@near(INDEXERS, "gelu")
def gelu_for_relu(q, k, w, pos):
    return choose((F.gelu(dots_of(q, k)) * w.unsqueeze(-1)).sum(2), pos)


@near(INDEXERS, "silu")
def silu_for_relu(q, k, w, pos):
    return choose((F.silu(dots_of(q, k)) * w.unsqueeze(-1)).sum(2), pos)


@near(INDEXERS, "not sum_h w * relu")
def bias_before_relu(q, k, w, pos):
    return choose(((dots_of(q, k) + 0.01).relu() * w.unsqueeze(-1)).sum(2), pos)


@near(INDEXERS, "not sum_h w * relu")
def distance_added(q, k, w, pos):
    scores = (dots_of(q, k).relu() * w.unsqueeze(-1)).sum(2)
    return choose(scores - 0.01 * torch.arange(k.shape[1]), pos)


def select(qi, ki, wi, pos):
    return choose((dots_of(qi, ki).relu() * wi.unsqueeze(-1)).sum(2), pos)


def gathered(c, chosen):
    return c[torch.arange(c.shape[0])[:, None, None], chosen]


def seen_logits(q, rows, chosen, pos):
    logits = torch.einsum("bthd,btkd->bthk", q, rows) * 0.3
    return logits.masked_fill((chosen > pos.unsqueeze(-1)).unsqueeze(2), -INF)


def mix(weights, rows):
    return torch.einsum("bthk,btkd->bthd", weights, rows)


@near(ATTENTIONS, "weights are also read")
def weights_returned(qi, ki, wi, pos, q, c):
    chosen = select(qi, ki, wi, pos)
    rows = gathered(c, chosen)
    p = seen_logits(q, rows, chosen, pos).softmax(-1)
    return mix(p, rows), p


@near(ATTENTIONS, "weights are also read")
def weights_summed_elsewhere(qi, ki, wi, pos, q, c):
    """The weights of a softmax by hand leave as a sum over the heads."""
    chosen = select(qi, ki, wi, pos)
    rows = gathered(c, chosen)
    logits = seen_logits(q, rows, chosen, pos)
    grown = (logits - logits.amax(-1, keepdim=True)).exp()
    p = grown / grown.sum(-1, keepdim=True)
    return mix(p, rows), p.sum(2)


@near(ATTENTIONS, "a sigmoid of the scores")
def sigmoid_over_its_sum(qi, ki, wi, pos, q, c):
    chosen = select(qi, ki, wi, pos)
    rows = gathered(c, chosen)
    p = seen_logits(q, rows, chosen, pos).sigmoid()
    return mix(p / p.sum(-1, keepdim=True), rows)


@near(ATTENTIONS, "a sigmoid of the scores")
def sigmoid_for_softmax(qi, ki, wi, pos, q, c):
    chosen = select(qi, ki, wi, pos)
    rows = gathered(c, chosen)
    return mix(seen_logits(q, rows, chosen, pos).sigmoid(), rows)


@near(ATTENTIONS, "not a softmax over the selected")
def softmax_over_all_keys(qi, ki, wi, pos, q, c):
    chosen = select(qi, ki, wi, pos)
    keep = torch.zeros(q.shape[0], q.shape[1], c.shape[1], dtype=torch.bool).scatter(-1, chosen, True)
    keep = (keep & ~future(pos, c.shape[1])).unsqueeze(2)
    logits = torch.einsum("bthd,bsd->bths", q, c) * 0.3
    p = logits.masked_fill(future(pos, c.shape[1]).unsqueeze(2), -INF).softmax(-1)
    return torch.einsum("bths,bsd->bthd", p * keep, c)


@near(ATTENTIONS, "")
def wrong_column_cut_off(qi, ki, wi, pos, q, c):
    """The first column goes instead of the last: every key is taken for the one before."""
    chosen = select(qi, ki, wi, pos)
    chosen = chosen.masked_fill(chosen > pos.unsqueeze(-1), -1)
    length = c.shape[1]
    chosen = torch.where(chosen < 0, length, chosen)
    columns = torch.zeros(*chosen.shape[:2], length + 1, dtype=torch.bool).scatter(-1, chosen, True)
    keep = (columns[..., 1:] & ~future(pos, length)).unsqueeze(2)
    logits = torch.einsum("bthd,bsd->bths", q, c) * 0.3
    p = logits.masked_fill(~keep, -INF).softmax(-1)
    return torch.einsum("bths,bsd->bthd", torch.where(keep.any(-1, keepdim=True), p, 0.0), c)


@near(ATTENTIONS, "future")
def gather_without_mask(qi, ki, wi, pos, q, c):
    chosen = select(qi, ki, wi, pos)
    rows = gathered(c, chosen)
    return mix((torch.einsum("bthd,btkd->bthk", q, rows) * 0.3).softmax(-1), rows)


@near(OTHER_LENGTHS, "lightning_indexer", "sparse_flash_attention")
def two_keys_of_the_future(qi, ki, wi, pos, q, c):
    chosen = select(qi, ki, wi, pos)
    rows = gathered(c, chosen)
    return mix(seen_logits(q, rows, chosen, pos + 2).softmax(-1), rows)


@near(ATTENTIONS, "")
def temperature_for_each_head(qi, ki, wi, pos, q, c):
    chosen = select(qi, ki, wi, pos)
    rows = gathered(c, chosen)
    heat = torch.linspace(0.5, 2.0, q.shape[2]).view(1, 1, -1, 1)
    return mix((seen_logits(q, rows, chosen, pos) * heat).softmax(-1), rows)


@near(ATTENTIONS, "not a softmax over the selected")
def sink_column(qi, ki, wi, pos, q, c):
    chosen = select(qi, ki, wi, pos)
    rows = gathered(c, chosen)
    logits = F.pad(seen_logits(q, rows, chosen, pos), (1, 0))
    return mix(logits.softmax(-1)[..., 1:], rows)


@near(ATTENTIONS, "not a softmax over the selected")
def soft_capped(qi, ki, wi, pos, q, c):
    chosen = select(qi, ki, wi, pos)
    rows = gathered(c, chosen)
    logits = torch.tanh(torch.einsum("bthd,btkd->bthk", q, rows) * 0.3 / 30) * 30
    logits = logits.masked_fill((chosen > pos.unsqueeze(-1)).unsqueeze(2), -INF)
    return mix(logits.softmax(-1), rows)


@near(ATTENTIONS, "not a softmax over the selected")
def distance_bias(qi, ki, wi, pos, q, c):
    chosen = select(qi, ki, wi, pos)
    rows = gathered(c, chosen)
    bias = 0.1 * (pos.unsqueeze(-1) - chosen)
    return mix((seen_logits(q, rows, chosen, pos) - bias.unsqueeze(2)).softmax(-1), rows)


@near(ATTENTIONS, "not a softmax over the selected")
def values_shifted_by_one(qi, ki, wi, pos, q, c):
    chosen = select(qi, ki, wi, pos)
    p = seen_logits(q, gathered(c, chosen), chosen, pos).softmax(-1)
    return mix(p, gathered(c, (chosen + 1) % c.shape[1]))


@near(ATTENTIONS, "not a softmax over the selected")
def first_slot_dropped(qi, ki, wi, pos, q, c):
    chosen = select(qi, ki, wi, pos)
    rows = gathered(c, chosen)
    logits = seen_logits(q, rows, chosen, pos)
    drop = (torch.arange(K) == K - 1) & (pos.unsqueeze(-1) > 20)
    return mix(logits.masked_fill(drop.unsqueeze(2), -INF).softmax(-1), rows)


@near(STRANGERS)
def moe_gate(x, router, experts, bias):
    p = torch.sigmoid(F.linear(x, router))
    chosen = (p + bias).topk(2, dim=-1).indices
    share = p.gather(-1, chosen)
    share = share / (share.sum(-1, keepdim=True) + 1e-20)
    mask = torch.zeros_like(p).scatter(-1, chosen, share)
    return torch.einsum("bte,eio,bti->bto", mask, experts, x)


@near(STRANGERS)
def grouped_gate(x, router, experts, bias):
    p = F.linear(x, router).softmax(-1)
    groups = p.unflatten(-1, (2, -1)).topk(2, dim=-1).values.sum(-1)
    best = groups.topk(1, dim=-1).indices
    keep = torch.zeros_like(groups).scatter(-1, best, 1.0).repeat_interleave(p.shape[-1] // 2, dim=-1)
    return (p * keep).topk(2, dim=-1)


@near(STRANGERS)
def dense_attention(x, router, experts, bias):
    mask = torch.full((x.shape[1], x.shape[1]), -INF).triu(1)
    p = (x @ x.mT * 0.3 + mask).softmax(-1)
    return p @ x


@near(STRANGERS)
def dense_sdpa(x, router, experts, bias):
    h = x.unsqueeze(1)
    return F.scaled_dot_product_attention(h, h, h, is_causal=True)


@near(STRANGERS)
def beam_search(x, router, experts, bias):
    logp = F.linear(x, router).log_softmax(-1)
    scores = logp[:, -1] + logp[:, -2].max(-1, keepdim=True).values
    best, place = scores.flatten().topk(4)
    return best, place // scores.shape[-1], place % scores.shape[-1]


@near(STRANGERS)
def top_k_sampling(x, router, experts, bias):
    logits = F.linear(x[:, -1], router)
    floor = logits.topk(3, dim=-1).values[..., -1:]
    return logits.masked_fill(logits < floor, -INF).softmax(-1)


@near(STRANGERS)
def nucleus(x, router, experts, bias):
    p, order = F.linear(x[:, -1], router).softmax(-1).sort(-1, descending=True)
    keep = p.cumsum(-1) - p < 0.8
    return torch.zeros_like(p).scatter(-1, order, torch.where(keep, p, 0.0))


@near(STRANGERS)
def token_merge(x, router, experts, bias):
    unit = F.normalize(x, dim=-1)
    return (unit @ unit.mT).amax(-1).topk(3, dim=-1).indices
