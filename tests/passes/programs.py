"""Small programs of named operands, before a pass and as it should leave them."""

import torch

import k31compile.kernels  # noqa: F401

B, T, S, H, K, D = 2, 5, 13, 3, 4, 24
_GENERATOR = torch.Generator().manual_seed(0)


def _normal(*shape):
    return torch.randn(shape, generator=_GENERATOR)


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
    # for attention over depth: frozen block sums, the running one, a learned query
    "frozen": _normal(3, B, T, D),
    "running": _normal(B, T, D),
    "depth_query": _normal(D),
}
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


def over_depth(values, query):
    logits = (values * query).sum(-1) * torch.rsqrt(values.square().mean(-1) + 1e-5)
    return (logits.softmax(-1).unsqueeze(-1) * values).sum(-2)


def prepared(bank, query):
    found = torch.ops.k31.attn_res_prepare(bank, query.unsqueeze(0), eps=1e-5)
    return [part.select(1, 0) for part in found]


def attn_res_prepare_before(q, k, w, c, i, query, key, value, gate, beta, state, frozen, running, depth_query, *_):
    return over_depth(frozen.movedim(0, 2), depth_query)


def attn_res_prepare_expected(q, k, w, c, i, query, key, value, gate, beta, state, frozen, running, depth_query, *_):
    _, total, mixture = prepared(frozen.permute(1, 2, 0, 3).view(B * T, 3, D), depth_query)
    return (mixture / total.unsqueeze(-1)).view(B, T, D)


def attn_res_update_before(q, k, w, c, i, query, key, value, gate, beta, state, frozen, running, depth_query, *_):
    return over_depth(torch.stack([*frozen.unbind(0), running], dim=-2), depth_query)


def attn_res_update_expected(q, k, w, c, i, query, key, value, gate, beta, state, frozen, running, depth_query, *_):
    rows = [row.view(B * T, 1, D) for row in frozen.unbind(0)]
    found = prepared(torch.cat(rows, dim=1), depth_query)
    joined = torch.ops.k31.attn_res_update(
        running.view(B * T, D), None, *found, depth_query, eps=1e-5, dtype=running.dtype
    )
    return joined[1].view(B, T, D)


PROGRAMS = {
    "fuse_attn_res_prepare": (attn_res_prepare_before, attn_res_prepare_expected),
    "fuse_attn_res_update": (attn_res_update_before, attn_res_update_expected),
    "fuse_gated_delta_chunk": (gated_delta_chunk_before, gated_delta_chunk_expected),
    "fuse_gated_delta_recurrent": (gated_delta_recurrent_before, gated_delta_recurrent_expected),
    "fuse_kda_chunk": (kda_chunk_before, kda_chunk_expected),
    "fuse_kda_recurrent": (kda_recurrent_before, kda_recurrent_expected),
    "fuse_lightning_indexer": (indexer_before, indexer_expected),
    "fuse_sparse_flash_attention": (attention_before, attention_expected),
    "static_top_k": (both_before, both_expected),
}
