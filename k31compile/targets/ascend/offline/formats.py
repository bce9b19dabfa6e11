"""Which graph inputs are stored as FRACTAL_NZ, written where torchair writes it: on the input's Data node."""

from collections.abc import Collection, Mapping
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


def mark_formats(graph: Any, inputs: Mapping[str, Any], nz: Collection[str]) -> None:
    """Let torchair mark the inputs of these names FRACTAL_NZ, and all others ND, in its own graph.

    torchair drops the Data node of an input that nothing reads and numbers the others anew; their names stay.
    """
    import torch_npu
    from torchair._ge_concrete_graph.fx2ge_converter import _update_internal_format_from_inputs

    left = sorted((node for node in graph.op if node.type == "Data"), key=lambda node: int(node.attr["index"].i))
    stored = [
        _Stored(inputs[node.name].shape, inputs[node.name].dtype, FRACTAL_NZ if node.name in nz else ND)
        for node in left
    ]
    asked = torch_npu.get_npu_format
    torch_npu.get_npu_format = lambda tensor: tensor.npu_format
    try:
        _update_internal_format_from_inputs(graph, stored)
    finally:
        torch_npu.get_npu_format = asked
