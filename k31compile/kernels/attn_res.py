"""``k31::attn_res_prepare`` and ``k31::attn_res_update``: attention over depth in two phases (K3.1 spec 2.2).

    logit(v) = <query, v> * rsqrt(mean(v^2) + eps);    h = sum_i softmax_i(logit(v_i)) v_i

over a block's frozen sums and the running one. The frozen ones serve every sub-layer of the block: prepare reads them
once for all its queries, update adds the running sum of one sub-layer. In real arithmetic this is the plain form.

What passes between the two is the mixture of the frozen sums, or the weights by which update mixes them itself: N
numbers for a token and query instead of D, for which update reads the frozen sums again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from k31compile.kernels.arguments import taking
from k31compile.kernels.attn_res_arguments import Prepare, Update
from k31compile.kernels.checks import accumulation_dtype
from k31compile.kernels.cpu.attn_res import prepare_provider, update_provider
from k31compile.kernels.library import register_operator

PREPARE_SCHEMA = (
    "attn_res_prepare(Tensor bank, Tensor queries, *, float eps, Tensor? valid=None, Tensor[]? more=None, "
    "bool mix=True) -> (Tensor, Tensor, Tensor)"
)
UPDATE_SCHEMA = (
    "attn_res_update(Tensor partial, Tensor? delta, Tensor maximum, Tensor total, Tensor mixture, Tensor query, *, "
    "float eps, Tensor? norm_weight=None, float norm_eps=1e-5, ScalarType? dtype=None, "
    "Tensor[]? bank=None, int? slot=None) -> (Tensor, Tensor)"
)


@taking(Prepare, sizes=False)
def attn_res_prepare_fake(call: Prepare) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Shapes and dtypes of the results; sizes may be symbolic and stay so."""
    return call.new_results()


@taking(Prepare)
def attn_res_prepare_reference(call: Prepare) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weigh the frozen sums for every query; the definition of the operator (arguments: see `Prepare`).

    Returns, in float32 (float64 for float64 tensors), the largest logit [M, Q], the sum of exp(logit - largest)
    [M, Q], and the block sums mixed by these unnormalised weights [M, Q, D]: -inf, 0 and zeros where no block counts.
    With mix=False the third is these weights [M, Q, N], 0 for a block that does not count. What such a block holds is
    never read. Raises OperatorError on anything outside this contract.
    """
    maximum, total, third = call.new_results()
    dtype, mask = third.dtype, call.mask()
    bank, queries = _joined(call.banks, dtype), call.queries.to(dtype)
    if mask is not None:
        mask = mask.to(bank.device)
        bank = torch.where(mask[:, None], bank, 0)
    with torch.autocast(bank.device.type, enabled=False):
        logits = torch.einsum("mnd,qd->mqn", bank, queries) * _inverse_rms(bank, call.eps)[:, None]
        if mask is not None:
            logits = logits.masked_fill(~mask, -torch.inf)
        nothing = logits.new_full((*maximum.shape, 1), -torch.inf)
        maximum.copy_(torch.cat((logits, nothing), dim=-1).amax(-1))
        weights = torch.exp(logits - maximum.masked_fill(maximum == -torch.inf, 0)[..., None])
        total.copy_(weights.sum(-1))
        third.copy_(torch.einsum("mqn,mnd->mqd", weights, bank) if call.mix else weights)
    return maximum, total, third


@taking(Update, sizes=False)
def attn_res_update_fake(call: Update) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapes and dtypes of the results; sizes may be symbolic and stay so."""
    return call.new_results()


@taking(Update)
def attn_res_update_reference(call: Update) -> tuple[torch.Tensor, torch.Tensor]:
    """Take one sub-layer's step; the definition of the operator (arguments: see `Update`).

    The running sum p = partial + delta is kept in partial's dtype: delta is rounded to it and so is the sum, as the
    plain `partial + delta.to(partial.dtype)` does. With r its logit and M = max(maximum, r),

        h = (exp(maximum - M) mixture + exp(r - M) p) / (exp(maximum - M) total + exp(r - M))

    in float32 (float64 for float64 tensors), rounded to `dtype`. With `bank`, mixture holds weights [M, N], and the
    frozen sums times these stand for it; one whose weight is 0 is not read. `slot` says which of many queries is meant.
    With `norm_weight` the rounded rows are normalised in float32 and rounded to `dtype` again: exactly the RMS norm
    that would have read them.

    Returns p [M, D] (a copy of partial without a delta), and h or the normalised h [M, D]. Where nothing was prepared
    (maximum -inf, total 0, mixture 0) h is p. Raises OperatorError on anything outside this contract.
    """
    result, mixed = call.new_results()
    result.copy_(call.partial if call.delta is None else call.partial + call.delta.to(call.partial.dtype))
    tensors = (call.partial, call.delta, call.maximum, call.total, call.mixture, call.query, call.norm_weight)
    dtype = accumulation_dtype(*tensors, *(call.bank or ()))
    maximum, total, mixture = (tensor.to(dtype) for tensor in call.prepared)
    p = result.to(dtype)
    if call.bank is not None:
        blocks = _joined(call.bank, dtype) if call.bank else mixture.new_empty((*mixture.shape, p.shape[1]))
        mixture = (torch.where(mixture == 0, 0, blocks.permute(2, 0, 1)) * mixture).sum(-1).T
    logit = (p * call.query.to(dtype)).sum(-1) * _inverse_rms(p, call.eps)
    top = torch.maximum(maximum, logit)
    before, own = torch.exp(maximum - top), torch.exp(logit - top)
    shared = before * total + own
    mixed.copy_((before[:, None] * mixture + own[:, None] * p) / shared[:, None])
    if call.norm_weight is not None:
        h = mixed.to(dtype)
        mixed.copy_(h * _inverse_rms(h, call.norm_eps)[:, None] * call.norm_weight.to(dtype))
    return result, mixed


def _joined(banks: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """All blocks of the banks as one [M, N, D]."""
    parts = [bank.to(dtype) for bank in banks]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _inverse_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.rsqrt(x.square().mean(-1) + eps)


PREPARE = register_operator(
    PREPARE_SCHEMA,
    fake=attn_res_prepare_fake,
    reference=attn_res_prepare_reference,
    providers=(prepare_provider(),),
)
UPDATE = register_operator(
    UPDATE_SCHEMA,
    fake=attn_res_update_fake,
    reference=attn_res_update_reference,
    providers=(update_provider(),),
)
