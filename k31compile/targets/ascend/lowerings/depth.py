"""Attention residuals as formulas (K3.1 spec 2.2)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from k31compile.kernels.attn_res_arguments import Prepare
from k31compile.kernels.checks import accumulation_dtype
from k31compile.targets.ascend.lowerings.norms import inverse_rms
from k31compile.targets.ascend.lowerings.registry import FORMULA, known, lowers
from k31compile.targets.ascend.providers import VLLM_ASCEND

for _operator in ("attn_res_prepare", "attn_res_update"):
    known(
        _operator, VLLM_ASCEND, "ops.triton.kimi_k3.attention_residual.apply_attn_res",
        "mixes bank and running sum in one call, and this graph has read the bank ahead for all sub-layers at once",
    )  # fmt: skip


@lowers("attn_res_prepare", FORMULA)
def attn_res_prepare(
    bank: Tensor,
    queries: Tensor,
    *,
    eps: float,
    valid: Tensor | None = None,
    more: Sequence[Tensor] | None = None,
    mix: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Largest logit, sum of exponentials and mixture of the frozen sums, or their weights, for each query."""
    banks = [bank, *(more or ())]
    dtype = accumulation_dtype(*banks, queries)
    bank, queries = _joined(banks, dtype), queries.to(dtype)
    counts = Prepare(bank, queries, eps=eps, valid=valid).mask()
    if counts is not None:
        bank = torch.where(counts[:, None], bank, torch.zeros_like(bank))
    logits = torch.einsum("mnd,qd->mqn", bank, queries) * inverse_rms(bank, eps).squeeze(-1)[:, None]
    if counts is not None:
        logits = logits.masked_fill(~counts, -torch.inf)
    if bank.shape[1] == 0:
        rows = (bank.shape[0], queries.shape[0])
        third = logits.new_zeros((*rows, bank.shape[2])) if mix else logits
        return logits.new_full(rows, -torch.inf), logits.new_zeros(rows), third
    maximum = logits.max(-1).values
    weights = torch.exp(logits - maximum.masked_fill(maximum == -torch.inf, 0)[..., None])
    return maximum, weights.sum(-1), torch.einsum("mqn,mnd->mqd", weights, bank) if mix else weights


@lowers("attn_res_update", FORMULA)
def attn_res_update(
    partial: Tensor,
    delta: Tensor | None,
    maximum: Tensor,
    total: Tensor,
    mixture: Tensor,
    query: Tensor,
    *,
    eps: float,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-5,
    dtype: torch.dtype | None = None,
    bank: Sequence[Tensor] | None = None,
    slot: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The running sum with what a sub-layer adds, merged into the mixture, and normalised where a norm reads it."""
    summed = partial.clone() if delta is None else partial + delta.to(partial.dtype)
    wide = accumulation_dtype(partial, delta, maximum, total, mixture, query, norm_weight, *(bank or ()))
    if slot is not None:
        maximum, total, mixture = maximum[:, slot], total[:, slot], mixture[:, slot]
    p, maximum, mixture = summed.to(wide), maximum.to(wide), mixture.to(wide)
    if bank:
        # A weight of 0 says that a sum does not count, whatever it holds.
        counted = torch.where(mixture[..., None] == 0, torch.zeros_like(p)[:, None], _joined(bank, wide))
        mixture = torch.einsum("mn,mnd->md", mixture, counted)
    elif bank is not None:
        mixture = torch.zeros_like(p)
    logit = (p * query.to(wide)).sum(-1) * inverse_rms(p, eps).squeeze(-1)
    top = torch.maximum(maximum, logit)
    before, own = torch.exp(maximum - top), torch.exp(logit - top)
    shared = before * total.to(wide) + own
    h = ((before[:, None] * mixture + own[:, None] * p) / shared[:, None]).to(dtype or wide)
    if norm_weight is not None:
        rounded = h.to(wide)
        h = (rounded * inverse_rms(rounded, norm_eps) * norm_weight.to(wide)).to(dtype or wide)
    return summed, h


def _joined(banks: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    wide = [bank.to(dtype) for bank in banks]
    return wide[0] if len(wide) == 1 else torch.cat(wide, dim=1)
