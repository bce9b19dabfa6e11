"""Router and experts (K3.1 spec 2.18): torch_npu's gating and grouped matmul, or plain operators."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from k31compile.kernels.checks import accumulation_dtype
from k31compile.kernels.expert_checks import SIGMOID, ExpertActivation, Gating, narrow_dtype
from k31compile.kernels.grouped_experts import activate
from k31compile.targets.ascend.constraints import moe_gating_top_k_objections
from k31compile.targets.ascend.lowerings.registry import FORMULA, TORCH_NPU, lowers
from k31compile.targets.ascend.profiles import Profile


@lowers("moe_gating_top_k", TORCH_NPU, moe_gating_top_k_objections, calls="npu_moe_gating_top_k")
def gate_by_torch_npu(_profile: Profile, x: Tensor, k: int, **options: Any) -> tuple[Tensor, Tensor]:
    """npu_moe_gating_top_k with a sigmoid: choose by score and bias, weigh by the score alone."""
    gating = Gating(**options)
    weights, chosen, _ = torch.ops.npu.npu_moe_gating_top_k(
        x.float(), k, bias=None if gating.bias is None else gating.bias.float(), k_group=gating.k_group,
        group_count=gating.group_count, group_select_mode=gating.group_select_mode, renorm=0, norm_type=1,
        routed_scaling_factor=gating.routed_scaling_factor, eps=gating.eps,
    )  # fmt: skip
    return weights, chosen


@lowers("moe_gating_top_k", FORMULA)
def gate_by_formula(x: Tensor, k: int, **options: Any) -> tuple[Tensor, Tensor]:
    """Scores, choices among the best groups, and weights. Equal scores: whichever the device's top-k takes."""
    gating = Gating(**options)
    logits = x.to(accumulation_dtype(x, gating.bias))
    scores = torch.sigmoid(logits) if gating.norm_type == SIGMOID else torch.softmax(logits, dim=1)
    choice = scores if gating.bias is None else scores + gating.bias.to(scores.dtype)
    if gating.group_count > 1:
        grouped = choice.view(choice.shape[0], gating.group_count, -1)
        best = grouped.topk(gating.group_select_mode + 1, dim=2).values.sum(2).topk(gating.k_group, dim=1).indices
        kept = torch.zeros_like(grouped[..., 0]).scatter(1, best, 1.0)
        choice = grouped.masked_fill(kept[..., None] == 0, gating.fill).view_as(choice)
    chosen = choice.topk(k, dim=1).indices
    weights = scores.gather(1, chosen)
    if gating.renorm:
        weights = weights / (weights.sum(1, keepdim=True) + gating.eps)
    return weights * gating.routed_scaling_factor, chosen.to(torch.int32)


def _objections_to_grouped_matmul(
    _profile: Any,
    x: Tensor,
    expert_idx: Tensor,
    weights: Tensor,
    gate_proj: Sequence[Tensor],
    up_proj: Sequence[Tensor],
    down_proj: Sequence[Tensor],
    **_options: Any,
) -> list[str]:
    found = []
    if any(len(stack) != 1 or stack[0].dim() != 3 for stack in (gate_proj, up_proj, down_proj)):
        found.append("the experts are matrices of their own, npu_grouped_matmul reads a stack [E, in, out]")
    dtypes = {tensor.dtype for tensor in (x, *gate_proj, *up_proj, *down_proj)}
    if not dtypes <= {torch.bfloat16} and not dtypes <= {torch.float16}:
        found.append(f"tokens and experts are {', '.join(sorted(map(str, dtypes)))}, all must be bfloat16 or float16")
    return found


@lowers("grouped_experts", TORCH_NPU, _objections_to_grouped_matmul, calls="npu_grouped_matmul")
def experts_by_grouped_matmul(
    _profile: Profile,
    x: Tensor,
    expert_idx: Tensor,
    weights: Tensor,
    gate_proj: Sequence[Tensor],
    up_proj: Sequence[Tensor],
    down_proj: Sequence[Tensor],
    **options: Any,
) -> Tensor:
    """Pairs of token and expert sorted by expert, grouped matmuls on them, and each token's weighted sum."""
    count, (tokens, choices) = gate_proj[0].shape[0], expert_idx.shape
    owner, weight = _pairs(expert_idx, weights, count, torch.float32)
    ordered, order = owner.sort()
    experts = torch.arange(count, device=x.device, dtype=torch.int32)
    groups = (ordered[None] == experts[:, None]).to(torch.int64).sum(1)
    rows = x.index_select(0, torch.div(order, choices, rounding_mode="floor"))

    def product(rows: Tensor, stack: Tensor) -> Tensor:
        made: Tensor = torch.ops.npu.npu_grouped_matmul(
            [rows], [stack.transpose(1, 2)], group_list=groups, split_item=3, group_type=0, group_list_type=1
        )[0]
        return made

    gate, up = product(rows, gate_proj[0]).float(), product(rows, up_proj[0]).float()
    inner = activate(gate, up, ExpertActivation(**options)).to(x.dtype)
    made = product(inner, down_proj[0]).float()
    back = order.sort().indices
    return (made.index_select(0, back) * weight[:, None]).view(tokens, choices, -1).sum(1)


@lowers("grouped_experts", FORMULA)
def experts_by_formula(
    x: Tensor,
    expert_idx: Tensor,
    weights: Tensor,
    gate_proj: Sequence[Tensor],
    up_proj: Sequence[Tensor],
    down_proj: Sequence[Tensor],
    **options: Any,
) -> Tensor:
    """The matrices of each token's experts, gathered: right everywhere, and for a few tokens at a time."""
    dtype = accumulation_dtype(x, weights, *gate_proj, *up_proj, *down_proj)
    gate_stack, up_stack, down_stack = (
        stack[0] if stack[0].dim() == 3 else torch.stack(list(stack)) for stack in (gate_proj, up_proj, down_proj)
    )
    owner, weight = _pairs(expert_idx, weights, gate_stack.shape[0], dtype)
    rows = x.to(dtype).repeat_interleave(expert_idx.shape[1], dim=0)

    def product(rows: Tensor, stack: Tensor) -> Tensor:
        return torch.bmm(stack.index_select(0, owner).to(dtype), rows[..., None]).squeeze(-1)

    inner = activate(product(rows, gate_stack), product(rows, up_stack), ExpertActivation(**options))
    inner = inner.to(narrow_dtype(x, *gate_proj, *up_proj, *down_proj) or dtype).to(dtype)
    return (product(inner, down_stack) * weight[:, None]).view(*expert_idx.shape, -1).sum(1)


def _pairs(expert_idx: Tensor, weights: Tensor, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Expert and weight of each pair of token and choice; where none is named, the last one with no weight."""
    flat, weight = expert_idx.reshape(-1).to(torch.int32), weights.reshape(-1).to(dtype)
    named = (flat >= 0) & (flat < count)
    owner = torch.where(named, flat, torch.full_like(flat, count - 1))
    return owner, torch.where(named, weight, torch.zeros_like(weight))
