"""Attention over the keys that the indexer selected, in two forms with one result (K3.1 spec 2.7, 2.9)."""

import torch
from torch import Tensor

from k31compile.model.norms import accumulate_dtype


def masked_softmax(logits: Tensor, mask: Tensor) -> Tensor:
    """Softmax over the last axis where mask is true; a row without any is exactly 0 (K3.1 spec 4.5)."""
    weights = logits.masked_fill(~mask, float("-inf")).softmax(-1)
    return weights.masked_fill(~mask, 0.0)


def attend_gathered(
    q_latent: Tensor, q_rope: Tensor, latent: Tensor, rope: Tensor, mask: Tensor, scale: float
) -> Tensor:
    """Absorbed form: every head attends to the same gathered latent rows (K3.1 spec 2.9).

    q_latent [B, T, H, L], q_rope [B, T, H, R], latent [B, T, k, L], rope [B, T, k, R], mask bool [B, T, k].
    Returns [B, T, H, L] in the accumulation dtype. Rows outside the mask may hold anything, even NaN.
    """
    dtype = accumulate_dtype(latent.dtype)
    latent = latent.to(dtype).masked_fill(~mask[..., None], 0.0)
    logits = torch.einsum("bthl,btkl->bthk", q_latent.to(dtype), latent)
    logits = (logits + torch.einsum("bthr,btkr->bthk", q_rope.to(dtype), rope.to(dtype))) * scale
    return torch.einsum("bthk,btkl->bthl", masked_softmax(logits, mask[:, :, None]), latent)


def attend_masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Native form: dense attention per head under a mask (K3.1 spec 2.7).

    q [B, T, H, d], k [B, S, H, d], v [B, S, H, v], mask bool [B, T, S] -> [B, T, H, v] in the accumulation
    dtype. Values outside the mask must be finite, for they are multiplied by 0.
    """
    dtype = accumulate_dtype(q.dtype)
    logits = torch.einsum("bthd,bshd->bhts", q.to(dtype), k.to(dtype)) * scale
    return torch.einsum("bhts,bshv->bthv", masked_softmax(logits, mask[:, None]), v.to(dtype))


def selection_mask(selected: Tensor, visible: Tensor) -> Tensor:
    """True where a key is selected and visible: int64 [B, T, k], bool [B, T, S] -> bool [B, T, S]."""
    return torch.zeros_like(visible).scatter(-1, selected, True) & visible
