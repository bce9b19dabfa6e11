"""`k31::moe_gating_top_k` by the C++ kernel: check, describe, call."""

from __future__ import annotations

from typing import Any

import torch

from k31compile.kernels.cpu import calls, loader
from k31compile.kernels.expert_checks import Gating
from k31compile.kernels.registry import Provider


def gating_provider(variant: str = "fast") -> Provider:
    """The provider that runs one build variant of the kernel."""

    def run(x: torch.Tensor, k: int, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        gating = Gating(**options)
        gating.check(x, k)
        shape = (x.shape[0], k)
        weights, experts = x.new_empty(shape, dtype=torch.float32), x.new_empty(shape, dtype=torch.int32)
        if weights.numel() == 0:
            return weights, experts
        x = calls.readable(x)
        bias = None if gating.bias is None else gating.bias.float().contiguous()
        arguments = calls.GatingCall(
            calls.plane(x),
            0 if bias is None else bias.data_ptr(),
            *x.shape,
            k,
            gating.group_count,
            gating.k_group,
            gating.group_select_mode,
            gating.renorm,
            gating.norm_type,
            gating.fill,
            gating.routed_scaling_factor,
            gating.eps,
            torch.get_num_threads(),
            weights.data_ptr(),
            experts.data_ptr(),
        )
        loader.call(variant, "k31_moe_gating", arguments, 0)
        return weights, experts

    return Provider(f"cpu-{variant}", lambda: loader.available(variant), run, _declines)


def _declines(x: torch.Tensor, *_args: object, bias: torch.Tensor | None = None, **_kwargs: object) -> str | None:
    return calls.unread(x=x) or (None if bias is None else calls.unread(bias=bias))
