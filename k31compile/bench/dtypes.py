"""Names of dtypes in labels, and whether the machine multiplies in them."""

from __future__ import annotations

import torch


def short_name(dtype: torch.dtype) -> str:
    """bf16 or fp32."""
    return {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]


def has_bf16_products() -> bool:
    """Whether this machine multiplies bfloat16 itself; elsewhere an author upcasts first, and so do the baselines."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.ops.mkldnn._is_mkldnn_bf16_supported())
