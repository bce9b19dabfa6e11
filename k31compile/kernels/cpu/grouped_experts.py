"""`k31::grouped_experts` by the C++ kernel: check, describe, call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from k31compile.kernels.cpu import calls, loader
from k31compile.kernels.expert_checks import PROJECTIONS, SITU, ExpertActivation, check_experts, count_experts, width_of
from k31compile.kernels.registry import Provider


def experts_provider(variant: str = "fast") -> Provider:
    """The provider that runs one build variant of the kernel."""

    def run(
        x: torch.Tensor,
        expert_idx: torch.Tensor,
        weights: torch.Tensor,
        gate_proj: Sequence[torch.Tensor],
        up_proj: Sequence[torch.Tensor],
        down_proj: Sequence[torch.Tensor],
        **options: Any,
    ) -> torch.Tensor:
        activation = ExpertActivation(**options)
        activation.check()
        check_experts(x, expert_idx, weights, gate_proj, up_proj, down_proj)
        result = x.new_zeros((x.shape[0], width_of(down_proj)), dtype=torch.float32)
        inner = gate_proj[0].shape[-2]
        if 0 in (result.numel(), expert_idx.numel(), inner, x.shape[1]):
            return result
        if expert_idx.dtype not in (torch.int32, torch.int64):
            expert_idx = expert_idx.to(torch.int32)
        x, gate, up = calls.readable(x), same_layout(gate_proj), same_layout(up_proj)
        if calls.is_transposed(gate[0]) != calls.is_transposed(up[0]):
            gate, up = ([matrix.contiguous() for matrix in matrices] for matrices in (gate, up))
        down = same_layout(down_proj)
        tables = [calls.pointers(matrices) for matrices in (gate, up, down)]
        arguments = calls.ExpertsCall(
            calls.plane(x),
            calls.plane(weights),
            expert_idx.data_ptr(),
            expert_idx.element_size(),
            *expert_idx.stride(),
            *(calls.matrices(part, table) for part, table in zip((gate, up, down), tables, strict=True)),
            *expert_idx.shape,
            count_experts("gate_proj", gate_proj),
            x.shape[1],
            inner,
            result.shape[1],
            activation.activation == SITU,
            activation.situ_beta,
            activation.linear_beta or 0.0,
            torch.get_num_threads(),
            result.data_ptr(),
        )
        loader.call(variant, "k31_grouped_experts", arguments, 0)
        return result

    return Provider(f"cpu-{variant}", lambda: loader.available(variant), run, _declines)


def same_layout(matrices: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The matrices as they are when all have the dtype and strides of the first and numbers side by side; else copies.

    Side by side may be the rows or the columns.
    """
    first = matrices[0]
    kind = (first.stride(), first.dtype)
    if 1 in kind[0][-2:] and all((matrix.stride(), matrix.dtype) == kind for matrix in matrices[1:]):
        return matrices
    dtype = first.dtype if all(matrix.dtype == first.dtype for matrix in matrices) else torch.float32
    return [matrix.to(dtype).contiguous() for matrix in matrices]


def _declines(
    x: torch.Tensor,
    _expert_idx: torch.Tensor,
    weights: torch.Tensor,
    *projections: Sequence[torch.Tensor],
    **_kwargs: object,
) -> str | None:
    why = calls.unread(x=x, weights=weights)
    for name, matrices in zip(PROJECTIONS, projections, strict=False):
        for matrix in matrices:
            why = why or calls.unread(**{name: matrix})
    return why
