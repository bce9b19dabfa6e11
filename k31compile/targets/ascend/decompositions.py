"""ATen operators that torchair does not convert, in terms of those that it does."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from k31compile.targets.ascend.lowerings.delta_rule import softplus
from k31compile.targets.ascend.own_operators import register_converters

ATEN = torch.ops.aten


def decomposition_table() -> dict[Any, Callable[..., Any]]:
    """Operator -> its formula: torchair's own table, then ours."""
    from torchair.configs.compiler_config import CompilerConfig
    from torchair.npu_fx_compiler import _get_merged_decompositions

    register_converters()
    return {**_get_merged_decompositions(CompilerConfig()), **OURS}


def _softplus(x: Tensor, beta: float = 1, threshold: float = 20) -> Tensor:
    scaled = x * beta
    return torch.where(scaled > threshold, x, softplus(scaled) / beta)


def _amax(x: Tensor, dim: Any = (), keepdim: bool = False) -> Tensor:
    dims = list(dim) if isinstance(dim, list | tuple) else [dim]
    for one in sorted((d % x.dim() for d in dims or range(x.dim())), reverse=True):
        x = x.max(one, keepdim=keepdim).values
    return x


def _exp2(x: Tensor) -> Tensor:
    return torch.exp(x * 0.6931471805599453)


OURS: dict[Any, Callable[..., Any]] = {
    ATEN.softplus.default: _softplus,
    ATEN.amax.default: _amax,
    ATEN.exp2.default: _exp2,
}
"""Formulas of this module; each is held to its operator by a test."""
