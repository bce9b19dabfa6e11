"""Attention residuals over depth as different authors would write them (K3.1 spec 2.2 and 3.5)."""

import math

import torch
import torch.nn.functional as F
from operands import EPS, HIDDEN
from records import speller

ONE_QUERY = {"attn_res_prepare": 1, "attn_res_update": 1}
TWO_QUERIES = {"attn_res_prepare": 1, "attn_res_update": 2}

spelling = speller(
    "attn_res",
    arguments="bank_list prefix query res_norm",
    results="h",
    phase="prefill",
    lengths=(1, 7),
    counts=ONE_QUERY,
)


@spelling(half=True)
def stacked_list(bank, prefix, query, norm):
    """The frozen sums as a list, stacked on a new front axis; F.rms_norm, einsum, softmax over axis 0."""
    values = torch.stack([*bank, prefix]).float()
    keys = F.rms_norm(values, (values.shape[-1],), norm, EPS)
    p = torch.einsum("nbtd,od->nbt", keys, query).softmax(dim=0)
    return torch.einsum("nbt,nbtd->btd", p, values).to(prefix.dtype)


@spelling(arguments="bank_btnd prefix query res_norm")
def growing_cat(bank, prefix, query, norm):
    """[B, T, N, D] grown by cat; query and norm folded into one vector, the mix by matmul."""
    values = torch.cat([bank, prefix.unsqueeze(-2)], dim=-2)
    logits = (values * (query.squeeze(0) * norm)).sum(-1) * torch.rsqrt(values.pow(2).mean(-1) + EPS)
    return torch.matmul(torch.softmax(logits, dim=-1).unsqueeze(-2), values).squeeze(-2)


@spelling(arguments="buffer_btnd valid prefix query res_norm", half=True)
def fixed_buffer_with_mask(buffer, valid, prefix, query, norm):
    """A buffer of fixed length, of which `valid` blocks count; the others get -inf before the softmax."""
    values = torch.cat([buffer, prefix.unsqueeze(2)], dim=2)
    wide = values.to(torch.float32)
    normed = norm * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS))
    scores = F.linear(normed, query).squeeze(-1)
    place = torch.arange(values.shape[2])
    empty = (place >= valid) & (place < buffer.shape[2])
    p = F.softmax(scores.masked_fill(empty, float("-inf")), dim=-1)
    return (p.unsqueeze(-1) * wide).sum(2).to(values.dtype)


@spelling(arguments="buffer_btnd valid prefix delta query res_norm", results="h partial", options={"source": "sum"})
def sliced_buffer_after_add(buffer, valid, prefix, delta, query, norm):
    """The residual add stands in front; the filled part of the buffer is a slice."""
    prefix = prefix + delta
    values = torch.cat([buffer[:, :, :valid], prefix[:, :, None]], dim=2)
    keys = values / torch.sqrt((values * values).mean(-1, keepdim=True) + EPS) * norm
    p = torch.softmax((keys @ query.mT).squeeze(-1), -1)
    return torch.einsum("btn,btnd->btd", p, values), prefix


@spelling()
def running_softmax(bank, prefix, query, norm):
    """A loop over the sources with a running maximum, as flash attention has it."""
    highest = torch.full_like(prefix[..., :1], -math.inf)
    total, mixed = torch.zeros_like(highest), torch.zeros_like(prefix)
    for value in (*bank, prefix):
        rms = (value.square().mean(-1, keepdim=True) + EPS).sqrt()
        logit = (value * norm / rms * query).sum(-1, keepdim=True)
        higher = torch.maximum(highest, logit)
        old, new = (highest - higher).exp(), (logit - higher).exp()
        total, mixed, highest = total * old + new, mixed * old + new * value, higher
    return mixed / total


@spelling()
def softmax_by_hand(bank, prefix, query, norm):
    """exp of each logit less the largest, sums of Python lists, no softmax."""
    sources = [*bank, prefix]
    folded = query[0] * norm
    logits = [torch.inner(v, folded) / torch.sqrt(v.pow(2).sum(-1) / v.shape[-1] + EPS) for v in sources]
    largest = torch.stack(logits).amax(0)
    parts = [(logit - largest).exp() for logit in logits]
    return sum(part[..., None] * v for part, v in zip(parts, sources, strict=True)) / sum(parts)[..., None]


@spelling(
    arguments="bank prefix delta query res_norm next_query next_norm", results="h next", counts=TWO_QUERIES, half=True
)
def two_phases(bank, prefix, delta, query, norm, next_query, next_norm):
    """Both queries of a block meet the frozen sums at once; each running sum joins by its maximum and total."""
    frozen = bank.float()
    folded = torch.cat([query * norm, next_query * next_norm])
    logits = torch.einsum("nbtd,qd->qnbt", frozen, folded) * torch.rsqrt(frozen.pow(2).mean(-1) + EPS)
    highest = logits.amax(1)
    parts = (logits - highest.unsqueeze(1)).exp()
    total, mixed = parts.sum(1), torch.einsum("qnbt,nbtd->qbtd", parts, frozen)

    def join(q, partial):
        partial = partial.float()
        logit = (partial * folded[q]).sum(-1) * torch.rsqrt(partial.pow(2).mean(-1) + EPS)
        top = torch.maximum(highest[q], logit)
        old, new = (highest[q] - top).exp().unsqueeze(-1), (logit - top).exp().unsqueeze(-1)
        return (old * mixed[q] + new * partial) / (old * total[q].unsqueeze(-1) + new)

    return join(0, prefix).to(prefix.dtype), join(1, prefix.float() + delta.float()).to(prefix.dtype)


@spelling(arguments="bank_list prefix delta query res_norm next_query next_norm", results="h next", counts=TWO_QUERIES)
def same_layer_twice(bank, prefix, delta, query, norm, next_query, next_norm):
    """Two sub-layers that each stack the same list anew; the prefix grows between them."""

    def read(stream, w, scale):
        values = torch.stack((*bank, stream), dim=2)
        rms = values.pow(2).mean(-1, keepdim=True).add(EPS).rsqrt()
        logits = F.linear(values * rms * scale, w)
        return (F.softmax(logits, dim=2) * values).sum(dim=2)

    return read(prefix, query, norm), read(prefix + delta, next_query, next_norm)


@spelling(arguments="bank_btnd prefix query res_norm norm_weight", results="normed")
def input_norm_behind(bank, prefix, query, norm, norm_weight):
    """The layer's own RMS norm follows at once; tokens flattened, the mix by bmm."""
    values = torch.cat((bank, prefix.unsqueeze(2)), 2).flatten(0, 1)
    logits = torch.bmm(F.rms_norm(values, (HIDDEN,), norm, EPS), query.mT.expand(values.shape[0], -1, -1))
    h = torch.bmm(logits.softmax(1).mT, values).view_as(prefix)
    return F.rms_norm(h, (HIDDEN,), norm_weight, EPS)


@spelling(arguments="bank_btnd query res_norm", options={"with_partial": False}, counts={"attn_res_prepare": 1})
def first_of_a_block(bank, query, norm):
    """The first sub-layer of a block: no running sum yet, a softmax over the frozen ones alone."""
    logits = (F.rms_norm(bank, bank.shape[-1:], norm, EPS) * query).sum(-1, keepdim=True)
    return (logits.softmax(2) * bank).sum(2)


@spelling(options={"temperature": HIDDEN**-0.5})
def scaled_logits(bank, prefix, query, norm):
    """1/sqrt(D) on the logits, as in attention: it belongs to the query; scaled_dot_product_attention does the rest."""
    values = torch.stack([*bank, prefix], dim=-2)
    keys = F.rms_norm(values, (values.shape[-1],), norm, EPS)
    rows = query.expand(*values.shape[:2], 1, -1)
    return F.scaled_dot_product_attention(rows, keys, values).squeeze(-2)
