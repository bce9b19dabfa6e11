"""Gated multi-head latent attention without positions, sparse through the indexer (K3.1 spec 2.7 to 2.9)."""

import torch
from torch import Tensor, nn

from k31compile.model.caches import MlaCache, Step, gather_pages, page_slots, read_pages, write_pages
from k31compile.model.config import K31Config
from k31compile.model.indexer import LightningIndexer
from k31compile.model.norms import RMSNorm, accumulate_dtype
from k31compile.model.sparse_attention import attend_gathered, attend_masked, selection_mask


class GatedMLA(nn.Module):
    """One MLA layer: low-rank queries, latent keys and values in pages, an output gate (K3.1 spec 2.7)."""

    def __init__(self, config: K31Config, has_indexer: bool = True) -> None:
        """Parameters of one layer; without an indexer it attends to the selection of an earlier layer."""
        super().__init__()
        hidden, heads = config.hidden_size, config.num_attention_heads
        self.num_heads, self.form = heads, config.mla_form
        self.nope_dim, self.rope_dim = config.qk_nope_head_dim, config.qk_rope_head_dim
        self.v_dim = config.v_head_dim
        self.kv_lora_rank = config.kv_lora_rank
        self.scale = (self.nope_dim + self.rope_dim) ** -0.5
        self.q_a_proj = nn.Linear(hidden, config.q_lora_rank, bias=False)
        self.q_a_layernorm = RMSNorm(config.q_lora_rank, config.lora_norm_eps)
        self.q_b_proj = nn.Linear(config.q_lora_rank, heads * (self.nope_dim + self.rope_dim), bias=False)
        self.kv_a_proj = nn.Linear(hidden, self.kv_lora_rank + self.rope_dim, bias=False)
        self.kv_a_layernorm = RMSNorm(self.kv_lora_rank, config.lora_norm_eps)
        self.kv_b_proj = nn.Linear(self.kv_lora_rank, heads * (self.nope_dim + self.v_dim), bias=False)
        self.g_proj = nn.Linear(hidden, heads * self.v_dim, bias=False)
        self.o_proj = nn.Linear(heads * self.v_dim, hidden, bias=False)
        self.indexer = LightningIndexer(config) if has_indexer else None

    def forward(self, x: Tensor, cache: MlaCache, step: Step, selected: Tensor | None) -> tuple[Tensor, Tensor]:
        """x [B, T, D], the normed layer input -> (out [B, T, D], selected int64 [B, T, k]).

        Writes latent, rope and index keys of this call to their pages before it reads them. `selected` is
        the selection of an earlier layer; a layer with an indexer ignores it and returns its own.
        """
        q_latent = self.q_a_layernorm(self.q_a_proj(x))
        q = self.q_b_proj(q_latent).view(*x.shape[:-1], self.num_heads, -1)
        latent, rope = torch.split(self.kv_a_proj(x), [self.kv_lora_rank, self.rope_dim], dim=-1)
        write_pages(cache.latent, step.slots, self.kv_a_layernorm(latent))
        write_pages(cache.rope, step.slots, rope)
        if self.indexer is not None:
            selected = self.indexer(x, q_latent, cache, step)
        assert selected is not None
        attend = self._absorbed if self.form == "absorbed" else self._native
        o = attend(q, cache, step, selected)
        gate = torch.sigmoid(self.g_proj(x).to(accumulate_dtype(x.dtype))).to(x.dtype)
        out: Tensor = self.o_proj(o.to(x.dtype).flatten(-2) * gate)
        return out, selected

    def _absorbed(self, q: Tensor, cache: MlaCache, step: Step, selected: Tensor) -> Tensor:
        """Queries go into the latent space; the gathered rows are keys and values -> [B, T, H, v]."""
        q_nope, q_rope = torch.split(q, [self.nope_dim, self.rope_dim], dim=-1)
        w_k, w_v = self._key_and_value_weights()
        seen = step.visible.gather(-1, selected)
        slots = page_slots(step.block_table, selected, cache.latent.shape[1])
        latent, rope = gather_pages(cache.latent, slots), gather_pages(cache.rope, slots)
        q_latent = torch.einsum("bthn,hnl->bthl", q_nope, w_k)
        o = attend_gathered(q_latent, q_rope, latent, rope, seen, self.scale)
        return torch.einsum("bthl,hvl->bthv", o.to(q.dtype), w_v)

    def _native(self, q: Tensor, cache: MlaCache, step: Step, selected: Tensor) -> Tensor:
        """All keys and values are expanded per head and masked -> [B, T, H, v]."""
        written = step.visible.any(1)[..., None]
        latent = read_pages(cache.latent, step.block_table).masked_fill(~written, 0.0).to(q.dtype)
        rope = read_pages(cache.rope, step.block_table).masked_fill(~written, 0.0).to(q.dtype)
        kv = self.kv_b_proj(latent).view(*latent.shape[:-1], self.num_heads, -1)
        k_nope, v = torch.split(kv, [self.nope_dim, self.v_dim], dim=-1)
        k = torch.cat([k_nope, rope.unsqueeze(2).expand(-1, -1, self.num_heads, -1)], dim=-1)
        return attend_masked(q, k, v, selection_mask(selected, step.visible), self.scale)

    def _key_and_value_weights(self) -> tuple[Tensor, Tensor]:
        """kv_b_proj per head, [H, nope, L] for keys and [H, v, L] for values."""
        weight = self.kv_b_proj.weight.view(self.num_heads, self.nope_dim + self.v_dim, self.kv_lora_rank)
        w_k, w_v = torch.split(weight, [self.nope_dim, self.v_dim], dim=1)
        return w_k, w_v
