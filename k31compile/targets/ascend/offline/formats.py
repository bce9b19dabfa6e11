"""Which graph inputs are stored as FRACTAL_NZ, written where torchair writes it: on the input's Data node."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

ND, FRACTAL_NZ = 2, 29
"""GE's numbers of the two formats."""


@dataclass(frozen=True)
class _Stored:
    """An input as torchair looks at it at the first run: a tensor on the device, and its format."""

    shape: torch.Size
    dtype: torch.dtype
    npu_format: int
    is_npu: bool = True


def mark_formats(graph: Any, inputs: Sequence[Any], nz: Collection[int]) -> None:
    """Let torchair mark the inputs of these positions FRACTAL_NZ, and all others ND, in its own graph."""
    import torch_npu
    from torchair._ge_concrete_graph.fx2ge_converter import _update_internal_format_from_inputs

    stored = [
        _Stored(value.shape, value.dtype, FRACTAL_NZ if position in nz else ND)
        for position, value in enumerate(inputs)
        if isinstance(value, torch.Tensor)
    ]
    asked = torch_npu.get_npu_format
    torch_npu.get_npu_format = lambda tensor: tensor.npu_format
    try:
        _update_internal_format_from_inputs(graph, stored)
    finally:
        torch_npu.get_npu_format = asked
