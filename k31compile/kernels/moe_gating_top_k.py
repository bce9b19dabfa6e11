"""``k31::moe_gating_top_k``: which experts a token goes to, and with what weight (K3.1 spec 2.18).

    score = sigmoid(x) or softmax(x);  choice = score + bias, outside the best groups group_fill
    weight[n, j] = score[n, e_j] / (sum_j score[n, e_j] + eps) * routed_scaling_factor

over the k experts e_j of the largest choice: larger first, equal ones the lower expert first, NaN the largest.
"""

from __future__ import annotations

from typing import Any

import torch

from k31compile.kernels.checks import accumulation_dtype
from k31compile.kernels.cpu.moe_gating_top_k import gating_provider
from k31compile.kernels.expert_checks import GROUP_TWO_BEST, SIGMOID, Gating, check_rank
from k31compile.kernels.library import register_operator

SCHEMA = (
    "moe_gating_top_k(Tensor x, int k, *, Tensor? bias=None, int k_group=1, int group_count=1, "
    "int group_select_mode=1, float? group_fill=None, bool renorm=True, int norm_type=1, "
    "float routed_scaling_factor=1.0, float eps=1e-20) -> (Tensor, Tensor)"
)


def moe_gating_top_k_fake(x: torch.Tensor, k: int, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapes and dtypes of the result, both [N, k]; N may be symbolic and stays so."""
    gating = Gating(**options)
    gating.check_words()
    check_rank("x", x, "[N, E]")
    shape = (x.shape[0], k)
    weights = x.new_empty(shape, dtype=accumulation_dtype(x, gating.bias))
    return weights, x.new_empty(shape, dtype=torch.int32)


def moe_gating_top_k_reference(x: torch.Tensor, k: int, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts and weigh them; the definition of the operator.

    Args:
        x: router logits [N, E], any float dtype; what follows runs in float32, in float64 when x or bias is.
        k: how many experts a row chooses, at most E.
        options: the fields of `Gating`.

    Returns weights [N, k] in float32 (float64) and their experts, int32 [N, k]. The weights are scores without the
    bias, of an expert outside the kept groups too where group_fill let it win. Raises OperatorError on anything
    outside this contract.
    """
    gating = Gating(**options)
    gating.check(x, k)
    dtype = accumulation_dtype(x, gating.bias)
    with torch.autocast(x.device.type, enabled=False):
        logits = x.to(dtype)
        scores = torch.sigmoid(logits) if gating.norm_type == SIGMOID else torch.softmax(logits, dim=1)
        choice = scores if gating.bias is None else scores + gating.bias.to(dtype)
        if gating.group_count > 1:
            choice = _fill_other_groups(choice, gating)
        experts = _rank(choice)[:, :k]
        weights = scores.gather(1, experts)
        if gating.renorm:
            weights = weights / (weights.sum(1, keepdim=True) + gating.eps)
        return weights * gating.routed_scaling_factor, experts.to(torch.int32)


def _fill_other_groups(choice: torch.Tensor, gating: Gating) -> torch.Tensor:
    grouped = choice.view(choice.shape[0], gating.group_count, -1)
    taken = 2 if gating.group_select_mode == GROUP_TWO_BEST else 1
    best = _rank(grouped.topk(taken, dim=2).values.sum(2))[:, : gating.k_group]
    other = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(1, best, False)
    return grouped.masked_fill(other[..., None], gating.fill).view_as(choice)


def _rank(values: torch.Tensor) -> torch.Tensor:
    """Places by value. Stable and descending: NaN first, ties by place."""
    return torch.sort(values, dim=1, stable=True, descending=True).indices


OPERATOR = register_operator(
    SCHEMA,
    fake=moe_gating_top_k_fake,
    reference=moe_gating_top_k_reference,
    providers=(gating_provider(),),
)
