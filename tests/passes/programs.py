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
}
indexer = torch.ops.k31.lightning_indexer
attention = torch.ops.k31.sparse_flash_attention


def scored(q, k, w):
    return (w.unsqueeze(-1) * torch.einsum("bthd,bsd->bths", q, k).relu()).sum(2)


def attended(q, c, i, scale=1.0):
    picked = torch.gather(c.unsqueeze(1).expand(-1, q.shape[1], -1, -1), 2, i[..., None].expand(-1, -1, -1, D))
    p = torch.softmax(torch.einsum("bthd,btkd->bthk", q, picked) * scale, dim=-1)
    return torch.einsum("bthk,btkd->bthd", p, picked)


def indexer_before(q, k, w, c, i):
    return scored(q, k, w).topk(K, dim=-1).indices


def indexer_expected(q, k, w, c, i):
    found = indexer(q, k.unsqueeze(2), w, sparse_count=K, sparse_mode=0, order="score", tail="lowest")
    return found.squeeze(2).to(torch.int64)


def attention_before(q, k, w, c, i):
    return attended(q, c, i, 0.2)


def attention_expected(q, k, w, c, i):
    latent = c.unsqueeze(2)
    return attention(q, latent, latent, i.unsqueeze(2), 0.2, sparse_mode=0)


def both_before(q, k, w, c, i):
    return attended(q, c, scored(q, k, w).topk(K, dim=-1).indices)


def both_expected(q, k, w, c, i):
    found = indexer(q, k.unsqueeze(2), w, sparse_count=K, sparse_mode=0, order="position", tail="minus_one")
    latent = c.unsqueeze(2)
    return attention(q, latent, latent, found, 1.0, sparse_mode=0)


PROGRAMS = {
    "fuse_lightning_indexer": (indexer_before, indexer_expected),
    "fuse_sparse_flash_attention": (attention_before, attention_expected),
    "static_top_k": (both_before, both_expected),
}
