"""``k31::grouped_experts``: the routed experts of every token, weighed and summed (K3.1 spec 2.18).

    out[n] = sum_j weights[n, j] * down_e(act(gate_e(x_n), up_e(x_n))),    e = expert_idx[n, j]
    SiTU(g, u) = beta tanh(g / beta) sigmoid(g) * lb tanh(u / lb);  SwiGLU(g, u) = g sigmoid(g) * u

Where x and all projections are bfloat16, or all are float16, act(..) is rounded to that before `down`, as it is in a
model of that dtype; nothing else is rounded.

An index that is no expert (below 0, or E and above) adds nothing: experts of other ranks are named so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from k31compile.kernels.checks import accumulation_dtype
from k31compile.kernels.cpu.grouped_experts import experts_provider
from k31compile.kernels.expert_checks import (
    SWIGLU,
    ExpertActivation,
    check_experts,
    check_rank,
    count_experts,
    narrow_dtype,
    width_of,
)
from k31compile.kernels.library import register_operator

SCHEMA = (
    "grouped_experts(Tensor x, Tensor expert_idx, Tensor weights, Tensor[] gate_proj, Tensor[] up_proj, "
    "Tensor[] down_proj, *, str activation='situ', float situ_beta=4.0, float? linear_beta=25.0) -> Tensor"
)
_BLOCK_ELEMENTS = 1 << 19


def grouped_experts_fake(
    x: torch.Tensor,
    expert_idx: torch.Tensor,
    weights: torch.Tensor,
    gate_proj: Sequence[torch.Tensor],
    up_proj: Sequence[torch.Tensor],
    down_proj: Sequence[torch.Tensor],
    **options: Any,
) -> torch.Tensor:
    """Shape and dtype of the result, [N, L_out] in float32 (float64); sizes may be symbolic and stay so."""
    ExpertActivation(**options).check()
    check_rank("x", x, "[N, L]")
    dtype = accumulation_dtype(x, weights, *gate_proj, *up_proj, *down_proj)
    return x.new_empty((x.shape[0], width_of(down_proj)), dtype=dtype)


def grouped_experts_reference(
    x: torch.Tensor,
    expert_idx: torch.Tensor,
    weights: torch.Tensor,
    gate_proj: Sequence[torch.Tensor],
    up_proj: Sequence[torch.Tensor],
    down_proj: Sequence[torch.Tensor],
    **options: Any,
) -> torch.Tensor:
    """Run each expert on the tokens that name it; the definition of the operator, in blocks of one expert.

    Args:
        x: [N, L]; weights: [N, k]. Any mix of float dtypes, here and in the projections.
        expert_idx: integers [N, k]; what is not in [0, E) is no expert and adds nothing.
        gate_proj, up_proj: one tensor [E, I, L] or E matrices [I, L] each; down_proj: [E, L_out, I] or E matrices.
        options: the fields of `ExpertActivation`.

    Everything runs in float32 (float64 when any float tensor is float64), the activation being rounded as said above.
    Returns [N, L_out] in that dtype. Raises OperatorError on anything outside this contract.
    """
    activation = ExpertActivation(**options)
    activation.check()
    check_experts(x, expert_idx, weights, gate_proj, up_proj, down_proj)
    dtype = accumulation_dtype(x, weights, *gate_proj, *up_proj, *down_proj)
    kept = narrow_dtype(x, *gate_proj, *up_proj, *down_proj) or dtype
    result = x.new_zeros((x.shape[0], width_of(down_proj)), dtype=dtype)
    named = expert_idx[(expert_idx >= 0) & (expert_idx < count_experts("gate_proj", gate_proj))]
    with torch.autocast(x.device.type, enabled=False):
        for expert in named.unique().tolist():
            gate, up, down = (_matrix(proj, expert).to(dtype) for proj in (gate_proj, up_proj, down_proj))
            step = max(1, _BLOCK_ELEMENTS // max(1, *gate.shape, down.shape[0]))
            for block in torch.nonzero(expert_idx == expert).split(step):
                tokens, slots = block.unbind(1)
                rows = x[tokens].to(dtype)
                out = activate(rows @ gate.T, rows @ up.T, activation).to(kept).to(dtype) @ down.T
                result.index_add_(0, tokens, out * weights[tokens, slots, None].to(dtype))
    return result


def _matrix(matrices: Sequence[torch.Tensor], expert: int) -> torch.Tensor:
    return matrices[0][expert] if matrices[0].dim() == 3 else matrices[expert]


def activate(gate: torch.Tensor, up: torch.Tensor, options: ExpertActivation) -> torch.Tensor:
    """SwiGLU, or SiTU: both factors bent by a tanh."""
    if options.activation == SWIGLU:
        return gate * torch.sigmoid(gate) * up
    if options.linear_beta is not None:
        up = options.linear_beta * torch.tanh(up / options.linear_beta)
    return options.situ_beta * torch.tanh(gate / options.situ_beta) * torch.sigmoid(gate) * up


OPERATOR = register_operator(
    SCHEMA,
    fake=grouped_experts_fake,
    reference=grouped_experts_reference,
    providers=(experts_provider(),),
)
