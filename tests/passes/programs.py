"""Small programs of named operands, before a pass and as it should leave them."""

import torch

import k31compile.kernels  # noqa: F401

B, T, S, H, K, D = 2, 5, 13, 3, 4, 24
_GENERATOR = torch.Generator().manual_seed(0)


def _normal(*shape):
    return torch.randn(shape, generator=_GENERATOR)


def _parameter(*shape):
    return torch.nn.Parameter(_normal(*shape) * 0.2, requires_grad=False)


# Positive weights: with others many scores are exactly zero, and which of equal scores is best is anybody's choice.
# What a Before block may speak of: q queries, k the indexer's keys, w its weights, c the latent, i chosen positions.
OPERANDS = {
    "q": _normal(B, T, H, D),
    "k": _normal(B, S, D),
    "w": _normal(B, T, H).abs(),
    "c": _normal(B, S, D),
    "i": torch.stack([torch.randperm(S, generator=_GENERATOR)[:K] for _ in range(B * T)]).view(B, T, K),
    # for the delta rule: unit keys, gates below zero
    "query": _normal(B, T, H, 6),
    "key": torch.nn.functional.normalize(_normal(B, T, H, 6), dim=-1),
    "value": _normal(B, T, H, 7),
    "gate": -_normal(B, T, H, 6).abs(),
    "beta": torch.rand((B, T, H), generator=_GENERATOR),
    "state": _normal(B, H, 6, 7),
    # for a norm and its gate
    "opening": _normal(B, T, H, 7),
    "weight": _normal(7),
    # for a convolution over time: inputs, those before them, taps
    "inputs": _normal(B, T, 15),
    "before": _normal(B, 3, 15),
    "taps": _normal(15, 1, 4),
    # for the mixture of experts: a router's logits and bias, tokens and their experts, gate and up packed
    "logits": _normal(8, 12),
    "bias": _normal(12) * 0.3,
    "tokens": _normal(8, 10),
    "experts": torch.stack([torch.randperm(12, generator=_GENERATOR)[:3] for _ in range(8)]),
    "shares": torch.rand((8, 3), generator=_GENERATOR),
    "gate_up": _normal(12, 14, 10),
    "down": _normal(12, 10, 7),
    # for a KDA layer: packed channels of query, key and value, those before them, taps; rate and shift of its gate
    "packed": _normal(B, T, 57),
    "packed_before": _normal(B, 3, 57),
    "packed_taps": _normal(57, 4),
    "rate": _normal(H),
    "shift": _normal(H, 6),
    # for attention over depth: frozen block sums, the running one, a learned query
    "frozen": _normal(3, B, T, D),
    "running": _normal(B, T, D),
    "depth_query": _normal(D),
    # for what stands in front of an indexer and its attention: the layer's input, caches and where to write, weights
    "hidden": _normal(B, T, 17).abs(),
    "places": torch.tensor([1, 4, 6, 9, 11]),
    "keys": _normal(B, S, D),
    "latents": _normal(B, S, D),
    "query_index": _parameter(17, H * D),
    "key_down": _parameter(17, D),
    "head_weights": torch.nn.Parameter(_parameter(17, H).abs(), requires_grad=False),
    "query_down": _parameter(17, 11),
    "query_up": _parameter(11, H * D),
    "latent_down": _parameter(17, D),
    # for two rows of attention to a latent cache: keys of 12 and values of 9 a head, positions of 6
    "row_query": _normal(B, H, 2, 18),
    "key_value_up": _parameter(H * 21, D),
    "ropes": _normal(B, S, 6),
    "shown": torch.rand((B, 1, 1, S), generator=_GENERATOR) < 0.6,
}
# For programs of the indexer and its attention alone.
INDEXED = {name: OPERANDS[name] for name in "qkwci"}
indexer = torch.ops.k31.lightning_indexer
attention = torch.ops.k31.sparse_flash_attention


def scored(q, k, w):
    return (w.unsqueeze(-1) * torch.einsum("bthd,bsd->bths", q, k).relu()).sum(2)


def attended(q, c, i, scale=1.0):
    picked = torch.gather(c.unsqueeze(1).expand(-1, q.shape[1], -1, -1), 2, i[..., None].expand(-1, -1, -1, D))
    p = torch.softmax(torch.einsum("bthd,btkd->bthk", q, picked) * scale, dim=-1)
    return torch.einsum("bthk,btkd->bthd", p, picked)


def indexer_before(q, k, w, c, i, *_):
    return scored(q, k, w).topk(K, dim=-1).indices


def indexer_expected(q, k, w, c, i, *_):
    found = indexer(q, k.unsqueeze(2), w, sparse_count=K, sparse_mode=0, order="score", tail="lowest")
    return found.squeeze(2).to(torch.int64)


def attention_before(q, k, w, c, i, *_):
    return attended(q, c, i, 0.2)


def attention_expected(q, k, w, c, i, *_):
    latent = c.unsqueeze(2)
    return attention(q, latent, latent, i.unsqueeze(2), 0.2, sparse_mode=0)


def latent_attention_before(*operands):
    q, c, up, ropes, shown = named(operands, "row_query", "latents", "key_value_up", "ropes", "shown")
    k, v = torch.einsum("bsl,hnl->bhsn", c, up.view(H, 21, D)).split((12, 9), -1)
    k = torch.cat((k, ropes.unsqueeze(1).expand(-1, H, -1, -1)), -1)
    p = (q @ k.mT * 18**-0.5).masked_fill(~shown, -torch.inf).softmax(-1)
    return p @ v


def latent_attention_expected(*operands):
    q, c, up, ropes, shown = named(operands, "row_query", "latents", "key_value_up", "ropes", "shown")
    rows = q.permute(0, 2, 1, 3)
    per_head = up.view(H, 21, D)
    latent, positions = c.unsqueeze(2), torch.arange(S, dtype=torch.int32).expand(B, 2, 1, -1)
    key_rope = ropes.unsqueeze(1).permute(0, 2, 3, 1).squeeze(-1).unsqueeze(2)
    out = attention(
        torch.einsum("bthn,hnl->bthl", rows[..., :-6], per_head[:, :12]), latent, latent, positions, 18**-0.5,
        query_rope=rows[..., -6:], key_rope=key_rope, sparse_mode=0, mask=shown.permute(0, 1, 3, 2).squeeze(-1),
    )  # fmt: skip
    return torch.einsum("bthl,hvl->bthv", out, per_head[:, 12:]).permute(0, 2, 1, 3).contiguous()


def both_before(q, k, w, c, i, *_):
    return attended(q, c, scored(q, k, w).topk(K, dim=-1).indices)


def both_expected(q, k, w, c, i, *_):
    found = indexer(q, k.unsqueeze(2), w, sparse_count=K, sparse_mode=0, order="position", tail="minus_one")
    latent = c.unsqueeze(2)
    return attention(q, latent, latent, found, 1.0, sparse_mode=0)


def delta_steps(query, key, value, decays, beta, state):
    out = []
    for t in range(T):
        state = decays[:, t] * state
        update = beta[:, t, :, None] * (value[:, t] - (state * key[:, t, :, :, None]).sum(2))
        state = state + key[:, t, :, :, None] * update[:, :, None]
        out.append((state * query[:, t, :, :, None]).sum(2))
    return torch.stack(out, 1)


def kda_recurrent_before(q, k, w, c, i, query, key, value, gate, beta, state, *_):
    return delta_steps(query, key, value, gate.exp().unsqueeze(-1), beta, state)


class ByToken:
    """Decays that are made of a token's gate where the token is taken."""

    def __init__(self, gate):
        self.gate = gate

    def __getitem__(self, token):
        return self.gate[token].exp().unsqueeze(-1)


def token_gates_before(q, k, w, c, i, query, key, value, gate, beta, state, *_):
    return delta_steps(query, key, value, ByToken(gate), beta, state)


def kda_recurrent_expected(q, k, w, c, i, query, key, value, gate, beta, state, *_):
    return torch.ops.k31.kda_recurrent(query, key, value, gate, beta, state, scale=1.0, state_layout="KV")[0]


def gated_delta_recurrent_before(q, k, w, c, i, query, key, value, gate, beta, state, *_):
    return delta_steps(query, key, value, gate[..., 0].exp()[..., None, None], beta, state)


def gated_delta_recurrent_expected(q, k, w, c, i, query, key, value, gate, beta, state, *_):
    given = (query, key, value, gate[..., 0], beta, state)
    return torch.ops.k31.gated_delta_recurrent(*given, scale=1.0, state_layout="KV")[0]


def in_one_chunk(query, key, value, beta, overlap, readout):
    b = beta.transpose(1, 2)[..., None]
    inverse = torch.linalg.inv(torch.eye(T, dtype=value.dtype) + (b * overlap).tril(-1))
    return (readout.tril() @ (inverse @ (b * value.transpose(1, 2)))).transpose(1, 2).contiguous()


def kda_chunk_before(q, k, w, c, i, query, key, value, gate, beta, state, *_):
    total = gate.cumsum(1).transpose(1, 2)
    decay = (total[:, :, :, None] - total[:, :, None]).exp()
    at, of = query.transpose(1, 2)[:, :, :, None], key.transpose(1, 2)
    overlap, readout = (decay * of[:, :, :, None] * of[:, :, None]).sum(-1), (decay * at * of[:, :, None]).sum(-1)
    return in_one_chunk(query, key, value, beta, overlap, readout)


def kda_chunk_expected(q, k, w, c, i, query, key, value, gate, beta, state, *_):
    return torch.ops.k31.kda_chunk(query, key, value, gate, beta, None, scale=1.0, state_layout="KV")[0]


def gated_delta_chunk_before(q, k, w, c, i, query, key, value, gate, beta, state, *_):
    total = gate[..., 0].cumsum(1).transpose(1, 2)
    decay, of = (total[..., None] - total[..., None, :]).exp(), key.transpose(1, 2)
    return in_one_chunk(query, key, value, beta, decay * (of @ of.mT), decay * (query.transpose(1, 2) @ of.mT))


def gated_delta_chunk_expected(q, k, w, c, i, query, key, value, gate, beta, state, *_):
    return torch.ops.k31.gated_delta_chunk(query, key, value, gate[..., 0], beta, None, scale=1.0, state_layout="KV")[0]


def gated_rms_norm_before(q, k, w, c, i, query, key, value, gate, beta, state, opening, weight, *_):
    return value * torch.rsqrt(value.square().mean(-1, keepdim=True) + 1e-5) * weight * torch.sigmoid(opening)


def gated_rms_norm_expected(q, k, w, c, i, query, key, value, gate, beta, state, opening, weight, *_):
    return torch.ops.k31.gated_rms_norm(value, opening, weight, eps=1e-5)


def short_conv_before(q, k, w, c, i, query, key, value, gate, beta, state, opening, weight, inputs, before, taps, *_):
    window = torch.cat([before, inputs], 1)
    y = sum(window[:, i : i + T] * taps[:, 0, i] for i in range(4))
    return torch.nn.functional.silu(y)


def short_conv_expected(q, k, w, c, i, query, key, value, gate, beta, state, opening, weight, inputs, before, taps, *_):
    return torch.ops.k31.short_conv(inputs, taps.permute(0, 2, 1).squeeze(-1), state=before)[0]


def named(operands, *names):
    given = dict(zip(OPERANDS, operands, strict=True))
    return [given[name] for name in names]


def gating_before(*operands):
    logits, bias = named(operands, "logits", "bias")
    scores = logits.sigmoid()
    experts = (scores + bias).topk(3, dim=-1).indices
    weights = scores.gather(-1, experts)
    return torch.zeros_like(logits).scatter(-1, experts, 2.5 * weights / (weights.sum(-1, keepdim=True) + 1e-20))


def gating_expected(*operands):
    logits, bias = named(operands, "logits", "bias")
    weights, experts = torch.ops.k31.moe_gating_top_k(
        logits, 3, bias=bias, renorm=True, norm_type=1, routed_scaling_factor=2.5, eps=1e-20
    )
    return torch.zeros_like(logits).scatter(-1, experts.to(torch.int64), weights)


def experts_before(*operands):
    tokens, experts, shares, gate_up, down = named(operands, "tokens", "experts", "shares", "gate_up", "down")
    gate, up = torch.einsum("nkil,nl->nki", gate_up[experts], tokens).chunk(2, dim=-1)
    inner = 4 * torch.tanh(gate / 4) * gate.sigmoid() * 25 * torch.tanh(up / 25)
    return (torch.einsum("nkli,nki->nkl", down[experts], inner) * shares.unsqueeze(-1)).sum(1)


def experts_expected(*operands):
    tokens, experts, shares, gate_up, down = named(operands, "tokens", "experts", "shares", "gate_up", "down")
    return torch.ops.k31.grouped_experts(tokens, experts, shares, [gate_up[:, :7]], [gate_up[:, 7:14]], [down])


def over_depth(values, query):
    logits = (values * query).sum(-1) * torch.rsqrt(values.square().mean(-1) + 1e-5)
    return (logits.softmax(-1).unsqueeze(-1) * values).sum(-2)


def prepared(bank, query):
    found = torch.ops.k31.attn_res_prepare(bank, query.unsqueeze(0), eps=1e-5)
    return [part.select(1, 0) for part in found]


def attn_res_prepare_before(*operands):
    frozen, _running, depth_query = named(operands, "frozen", "running", "depth_query")
    return over_depth(frozen.movedim(0, 2), depth_query)


def attn_res_prepare_expected(*operands):
    frozen, _running, depth_query = named(operands, "frozen", "running", "depth_query")
    _, total, mixture = prepared(frozen.permute(1, 2, 0, 3).view(B * T, 3, D), depth_query)
    return (mixture / total.unsqueeze(-1)).view(B, T, D)


def attn_res_update_before(*operands):
    frozen, running, depth_query = named(operands, "frozen", "running", "depth_query")
    return over_depth(torch.stack([*frozen.unbind(0), running], dim=-2), depth_query)


def attn_res_update_expected(*operands):
    frozen, running, depth_query = named(operands, "frozen", "running", "depth_query")
    rows = [row.view(B * T, 1, D) for row in frozen.unbind(0)]
    found = prepared(torch.cat(rows, dim=1), depth_query)
    joined = torch.ops.k31.attn_res_update(
        running.view(B * T, D), None, *found, depth_query, eps=1e-5, dtype=running.dtype
    )
    return joined[1].view(B, T, D)


def prolog_of_indexer(*operands):
    hidden, places, keys, index, down, weights = named(
        operands, "hidden", "places", "keys", "query_index", "key_down", "head_weights"
    )
    rows = keys.index_copy(1, places, torch.nn.functional.layer_norm(hidden @ down, [D]))
    return (hidden @ index).view(B, T, H, D), rows, hidden @ weights


def indexer_prolog_before(*operands):
    return scored(*prolog_of_indexer(*operands)).topk(K, dim=-1).indices


def indexer_prolog_expected(*operands):
    query, rows, weights = prolog_of_indexer(*operands)
    return indexer_expected(query, rows, weights, None, None)


def prolog_of_mla(*operands):
    hidden, places, latents, down, up, latent_down, chosen = named(
        operands, "hidden", "places", "latents", "query_down", "query_up", "latent_down", "i"
    )
    rows = latents.index_copy(1, places, torch.nn.functional.rms_norm(hidden @ latent_down, [D]))
    return (hidden @ down @ up).view(B, T, H, D), rows, chosen


def mla_prolog_before(*operands):
    return attended(*prolog_of_mla(*operands), 0.2)


def mla_prolog_expected(*operands):
    query, rows, chosen = prolog_of_mla(*operands)
    return attention_expected(query, None, None, rows, chosen)


def mega_kda_before(*operands):
    names = ("gate", "beta", "state", "opening", "weight", "packed", "packed_before", "packed_taps", "rate", "shift")
    gate, beta, state, opening, weight, packed, before, taps, rate, shift = named(operands, *names)
    window = torch.cat([before, packed], 1)
    y = torch.nn.functional.silu(sum(window[:, i : i + T] * taps[:, i] for i in range(4)))
    query, key, value = (x.unflatten(-1, (H, -1)) for x in y.split([18, 18, 21], -1))
    query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    decays = (-torch.exp(rate)[:, None] * torch.nn.functional.softplus(gate + shift)).exp().unsqueeze(-1)
    out = delta_steps(query * 0.4, key, value, decays, 2 * beta.sigmoid(), state)
    return torch.nn.functional.rms_norm(out, (7,), weight, 1e-5) * torch.sigmoid(opening)


def mega_kda_expected(*operands):
    names = ("gate", "beta", "state", "opening", "weight", "packed", "packed_before", "packed_taps", "rate", "shift")
    gate, beta, state, opening, weight, packed, before, taps, rate, shift = named(operands, *names)
    layer = ([packed], [taps], [before], gate, rate, shift, beta, state, opening, weight)
    options = {"norm_eps": 1e-5, "beta_factor": 2.0, "scale": 0.4}
    return torch.ops.k31.mega_kda(*layer, **options)[0]


PROGRAMS = {
    "fuse_attn_res_prepare": (attn_res_prepare_before, attn_res_prepare_expected),
    "fuse_attn_res_update": (attn_res_update_before, attn_res_update_expected),
    "fuse_gated_delta_chunk": (gated_delta_chunk_before, gated_delta_chunk_expected),
    "fuse_gated_delta_recurrent": (gated_delta_recurrent_before, gated_delta_recurrent_expected),
    "fuse_gated_rms_norm": (gated_rms_norm_before, gated_rms_norm_expected),
    "fuse_grouped_experts": (experts_before, experts_expected),
    "fuse_kda_chunk": (kda_chunk_before, kda_chunk_expected),
    "fuse_kda_recurrent": (kda_recurrent_before, kda_recurrent_expected),
    "fuse_latent_attention": (latent_attention_before, latent_attention_expected),
    "gather_token_gates": (token_gates_before, kda_recurrent_expected),
    "fuse_lightning_indexer": (indexer_before, indexer_expected),
    "fuse_mega_kda": (mega_kda_before, mega_kda_expected),
    "fuse_moe_gating_top_k": (gating_before, gating_expected),
    "fuse_sparse_flash_attention": (attention_before, attention_expected),
    "fuse_short_conv": (short_conv_before, short_conv_expected),
    "name_indexer_prolog": (indexer_prolog_before, indexer_prolog_expected),
    "name_mla_prolog": (mla_prolog_before, mla_prolog_expected),
    "static_top_k": (both_before, both_expected),
}
