"""An exported model run by onnxruntime beside the model as it is written: results, and every cache that it updates.

Where scores are equal ONNX's TopK takes the lower position, as k31's operators do, and torch.topk may take any of them;
eager runs with that rule.
"""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from k31compile.entry import Entry
from k31compile.errors import CheckError, TargetError
from k31compile.onnx_export.export import OnnxGraph
from k31compile.onnx_export.libraries import require_onnx
from k31compile.onnx_export.names import argument_tensors

BOUND = 1e-4
"""The largest difference that is allowed, relative to the largest value of what is compared (floats of 32 bits)."""


@dataclass(frozen=True)
class Compared:
    """One output of the model: how far it is from eager's, relative to eager's largest value; integers 0 or inf."""

    name: str
    difference: float

    @property
    def ok(self) -> bool:
        """Whether it is within the bound; NaN is not."""
        return self.difference <= BOUND


def compare_with_eager(entry: Entry, graph: OnnxGraph, path: Path) -> list[Compared]:
    """Run a written model and the entry's own on copies of the call's tensors, and compare every output.

    Raises:
        TargetError: onnxruntime has no kernel for a part of the model, as for bfloat16 on the CPU.
        CheckError: the results cannot be set against each other.
    """
    require_onnx()
    results = _run_onnx(entry, graph, path)
    call = dataclasses.replace(entry, args=copy.deepcopy(entry.args), kwargs=copy.deepcopy(dict(entry.kwargs)))
    said, state = _call_and_restore(call)
    expected = dict(zip(_plain(results, graph), _matching(results, graph, said), strict=True))
    after = {**dict(argument_tensors(call)), **state}
    expected |= {output: after[name] for name, output in graph.written.items()}
    return [Compared(name, _difference(results[name], value)) for name, value in expected.items()]


def require_same(compared: list[Compared]) -> None:
    """Raise CheckError with the output that is furthest beyond the bound."""
    wrong = [one for one in compared if not one.ok]
    if wrong:
        worst = max(wrong, key=lambda one: one.difference)
        raise CheckError(
            f"onnxruntime's {worst.name} differs from eager's by {worst.difference:.1e} of its largest value, "
            f"at most {BOUND:.0e} is allowed; {len(wrong)} of {len(compared)} outputs differ",
            hint="selections among nearly equal scores can do that; k31 check TARGET compares stage by stage",
        )


def _run_onnx(entry: Entry, graph: OnnxGraph, path: Path) -> dict[str, Tensor]:
    import onnxruntime

    tensors: dict[str, Tensor] = dict(argument_tensors(entry))
    if isinstance(entry.model, nn.Module):
        tensors |= dict(entry.model.named_buffers())
    feeds = {}
    for value in graph.model.graph.inputs:
        if value.name not in tensors:
            raise CheckError(f"the input {value.name} is not among the arguments of {entry.name}", hint="")
        if tensors[value.name].dtype == torch.bfloat16:
            raise TargetError("onnxruntime has no bfloat16 kernels for the CPU", hint="add --dtype fp32")
        feeds[value.name] = tensors[value.name].detach().numpy(force=True).copy()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        made = session.run(None, feeds)
    except Exception as error:  # onnxruntime's own classes have no common one
        what = str(error).strip().splitlines()[0]
        raise TargetError(f"onnxruntime does not run the model: {what}", where=entry.name) from error
    return {output.name: torch.from_numpy(value) for output, value in zip(session.get_outputs(), made, strict=True)}


class _LowerPositionFirst(TorchDispatchMode):
    """Inside of it a top-k gives equal values to the lower position, as ONNX says it must."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.topk.default:
            return _topk(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _topk(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Tensor, Tensor]:
    values, indices = torch.sort(x, dim=dim, descending=largest, stable=True)
    return values.narrow(dim, 0, k), indices.narrow(dim, 0, k)


def _call_and_restore(call: Entry) -> tuple[Any, dict[str, Tensor]]:
    """What a call returns and the buffers after it; the buffers are put back."""
    buffers = dict(call.model.named_buffers()) if isinstance(call.model, nn.Module) else {}
    before = {name: buffer.clone() for name, buffer in buffers.items()}
    with _LowerPositionFirst():  # type: ignore[no-untyped-call]
        said = call.call()
    after = {name: buffer.clone() for name, buffer in buffers.items()}
    with torch.no_grad():
        for name, buffer in buffers.items():
            buffer.copy_(before[name])
    return said, after


def _plain(results: dict[str, Tensor], graph: OnnxGraph) -> list[str]:
    written = set(graph.written.values())
    return [name for name in results if name not in written]


def _matching(results: dict[str, Tensor], graph: OnnxGraph, said: Any) -> list[Tensor]:
    """For each output of the model the tensor of eager's result that it stands for: in order, by shape and dtype."""
    leaves = [leaf for leaf in pytree.tree_leaves(said) if isinstance(leaf, Tensor)]
    found = []
    for name in _plain(results, graph):
        made = results[name]
        match = next((leaf for leaf in leaves if (leaf.shape, leaf.dtype) == (made.shape, made.dtype)), None)
        if match is None:
            raise CheckError(f"{name} {list(made.shape)} is none of eager's results", where=graph.name, hint="")
        leaves = [leaf for leaf in leaves if leaf is not match]
        found.append(match)
    return found


def _difference(made: Tensor, expected: Tensor) -> float:
    if not expected.is_floating_point():
        return 0.0 if torch.equal(made, expected) else float("inf")
    made, expected = made.double(), expected.detach().double()
    if expected.numel() == 0:
        return 0.0
    scale = max(float(expected.abs().max()), torch.finfo(torch.float32).tiny)
    return float((made - expected).abs().max()) / scale
