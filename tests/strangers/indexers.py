"""Lightning indexers, as five people write them."""

import torch
import torch.nn.functional as F
from stranger import Stranger, seen_choice, sorted_choice
from torch import nn


# 1. An inference script: rope on the first dims, layer norm, a cache in a buffer, an additive mask.
def apply_rotary_emb(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class Indexer(nn.Module):
    def __init__(self, dim=24, q_lora_rank=10, n_heads=3, head_dim=16, rope_dim=4, topk=5, max_len=20):
        super().__init__()
        self.n_heads, self.head_dim, self.rope_dim, self.index_topk = n_heads, head_dim, rope_dim, topk
        self.wq_b = nn.Linear(q_lora_rank, n_heads * head_dim, bias=False)
        self.wk = nn.Linear(dim, head_dim, bias=False)
        self.k_norm = nn.LayerNorm(head_dim)
        self.weights_proj = nn.Linear(dim, n_heads, bias=False)
        self.softmax_scale = head_dim**-0.5
        self.register_buffer("k_cache", torch.zeros(2, max_len, head_dim))
        angle = torch.outer(torch.arange(max_len), 1 / 100 ** (torch.arange(rope_dim // 2) / rope_dim))
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())

    def forward(self, x, qr, start_pos, mask):
        bsz, seqlen, _ = x.size()
        end_pos = start_pos + seqlen
        cos, sin = self.cos[start_pos:end_pos], self.sin[start_pos:end_pos]
        q = self.wq_b(qr).view(bsz, seqlen, self.n_heads, self.head_dim)
        q_pe, q_nope = torch.split(q, [self.rope_dim, self.head_dim - self.rope_dim], dim=-1)
        q = torch.cat([apply_rotary_emb(q_pe, cos[:, None], sin[:, None]), q_nope], dim=-1)
        k_pe, k_nope = torch.split(self.k_norm(self.wk(x)), [self.rope_dim, self.head_dim - self.rope_dim], dim=-1)
        k = torch.cat([apply_rotary_emb(k_pe, cos, sin), k_nope], dim=-1)
        self.k_cache[:bsz, start_pos:end_pos] = k
        weights = self.weights_proj(x) * self.n_heads**-0.5
        weights = weights.unsqueeze(-1) * self.softmax_scale
        logits = torch.einsum("bshd,btd->bsht", q.float(), self.k_cache[:bsz, :end_pos].float())
        index_score = (F.relu(logits) * weights).sum(dim=2)
        if mask:
            index_score += torch.full((seqlen, seqlen), float("-inf")).triu_(1)
        return index_score.topk(min(self.index_topk, end_pos), dim=-1)[1]


# 2. From scratch after the paper: heads second, a registered triangle, masked_fill, indices only.
class LightningIndexer(nn.Module):
    def __init__(self, d_model=18, indexer_heads=4, indexer_dim=6, block_size=32, k=4):
        super().__init__()
        self.h, self.d, self.k = indexer_heads, indexer_dim, k
        self.q_proj = nn.Linear(d_model, indexer_heads * indexer_dim, bias=False)
        self.k_proj = nn.Linear(d_model, indexer_dim, bias=False)
        self.w_proj = nn.Linear(d_model, indexer_heads, bias=False)
        self.register_buffer("bias", torch.tril(torch.ones(block_size, block_size)).view(1, block_size, block_size))

    def forward(self, x):
        B, T, _C = x.size()
        q = self.q_proj(x).view(B, T, self.h, self.d).transpose(1, 2)  # (B, h, T, d)
        k = self.k_proj(x)[:, None]  # (B, 1, T, d)
        w = self.w_proj(x).transpose(1, 2)[..., None]  # (B, h, T, 1)
        att = (q @ k.transpose(-2, -1)) * (1.0 / self.d**0.5)
        scores = (w * F.relu(att)).sum(1)
        scores = scores.masked_fill(self.bias[:, :T, :T] == 0, float("-inf"))
        _, top_idx = torch.topk(scores, min(self.k, T), dim=-1)
        return top_idx


# 3. From JAX: maximum, where with a large negative number, static k, -1 for what is hidden.
class JaxIndexer(nn.Module):
    def __init__(self, features=22, heads=2, dim=8, top_k=6):
        super().__init__()
        self.top_k = top_k
        self.wq = nn.Parameter(torch.randn(features, heads, dim) * 0.2)
        self.wk = nn.Parameter(torch.randn(features, dim) * 0.2)
        self.ww = nn.Parameter(torch.randn(features, heads) * 0.2)

    def forward(self, x):
        t = x.shape[1]
        q = torch.einsum("btf,fhd->bthd", x, self.wq)
        k = torch.einsum("bsf,fd->bsd", x, self.wk)
        w = torch.einsum("btf,fh->bth", x, self.ww)
        dots = torch.maximum(torch.einsum("bthd,bsd->bhts", q, k), torch.tensor(0.0))
        logits = torch.einsum("bhts,bth->bts", dots, w)
        pos = torch.arange(t)
        logits = torch.where(pos[None, None, :] <= pos[None, :, None], logits, -torch.inf)
        values, indices = torch.topk(logits, self.top_k)
        return torch.where(torch.isneginf(values), -1, indices)


# 4. A serving engine's decode: pages, a table, lengths; -1 beyond the length.
class PagedIndexer(nn.Module):
    def __init__(self, heads=3, dim=10, top_k=5):
        super().__init__()
        self.heads, self.dim, self.top_k = heads, dim, top_k
        self.q_proj = nn.Linear(16, heads * dim, bias=False)
        self.w_proj = nn.Linear(16, heads, bias=False)

    def forward(self, hidden, index_cache, block_tables, seq_lens):
        batch = hidden.shape[0]
        q = self.q_proj(hidden).view(batch, self.heads, self.dim)
        w = self.w_proj(hidden) * (self.heads * self.dim) ** -0.5
        keys = index_cache[block_tables.long()].reshape(batch, -1, self.dim)
        scores = torch.relu(torch.bmm(q, keys.transpose(1, 2)))
        scores = torch.bmm(w.unsqueeze(1), scores).squeeze(1)
        positions = torch.arange(keys.shape[1], device=hidden.device)
        scores = scores.masked_fill(positions >= seq_lens.unsqueeze(1), float("-inf"))
        chosen = torch.topk(scores, self.top_k, dim=-1).indices.to(torch.int32)
        slot = torch.arange(self.top_k, device=hidden.device)
        return torch.where(slot < seq_lens.unsqueeze(1), chosen, -1)


# 5. From MLX: argsort of the negated scores, relu as a product, history by cat.
class SortedIndexer(nn.Module):
    def __init__(self, n_embd=20, n_index=2, size=12, keep=7):
        super().__init__()
        self.n_index, self.size, self.keep = n_index, size, keep
        self.q = nn.Linear(n_embd, n_index * size, bias=False)
        self.k = nn.Linear(n_embd, size, bias=False)
        self.w = nn.Linear(n_embd, n_index, bias=False)

    def forward(self, x, past_k):
        B, L, _ = x.shape
        k = torch.cat([past_k, self.k(x)], dim=1)
        S = k.shape[1]
        q = self.q(x).reshape(B, L, self.n_index, self.size)
        scores = q.flatten(1, 2) @ k.mT
        scores = (scores * (scores > 0)).unflatten(1, (L, self.n_index))
        scores = (scores * self.w(x)[..., None]).sum(axis=2)
        offset = S - L
        causal = torch.arange(L)[:, None] + offset >= torch.arange(S)
        scores = scores.masked_fill(~causal, torch.finfo(scores.dtype).min)
        return torch.argsort(-scores, dim=-1)[..., : self.keep], k


ONE = {"lightning_indexer": 1}
STRANGERS = [
    Stranger(
        "inference_script",
        lambda: (Indexer(), (torch.randn(2, 9, 24), torch.randn(2, 9, 10), 0, True)),
        ONE,
        meaning=seen_choice,
    ),
    Stranger("from_the_paper", lambda: (LightningIndexer(), (torch.randn(2, 11, 18),)), ONE, meaning=seen_choice),
    Stranger("jax_where", lambda: (JaxIndexer(), (torch.randn(2, 13, 22),)), ONE, meaning=sorted_choice),
    Stranger(
        "paged_decode",
        lambda: (
            PagedIndexer(),
            (
                torch.randn(3, 16),
                torch.randn(8, 4, 10),
                torch.tensor([[1, 5, 2], [0, 3, 7], [6, 4, 1]], dtype=torch.int32),
                torch.tensor([12, 7, 5]),
            ),
        ),
        ONE,
        meaning=sorted_choice,
    ),
    Stranger(
        "argsort_negated",
        lambda: (SortedIndexer(), (torch.randn(2, 3, 20), torch.randn(2, 12, 12))),
        ONE,
        meaning=lambda result: (sorted_choice(result[0]), result[1]),
    ),
]
