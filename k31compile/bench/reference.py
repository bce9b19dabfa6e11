"""What a whole model is compared with: eager in float32, with ties told apart in either of two ways.

Where scores are nearly equal the last bit of a weight decides which key is selected, and of a long prompt some rows
change by a third of their size. So most rows must be as near as rounding alone leaves them, and all together as near as
the model is to itself with its weights moved by about their last bit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from k31compile.entry import Entry

_LEAST = 2e-3  # relative distance that float32 sums in another order may make, nearly equal scores included
_TIMES, _ROUNDED = 1.5, 1e-2  # of eager's own distance in bfloat16 or with moved weights; on top of that in bfloat16
_MOVED = 2  # copies of a model with moved weights


class LowestFirst(TorchDispatchMode):
    """Inside, `topk` takes the lowest positions of equal values. torch's own takes any, and not the same ones always.

    An indexer's ReLU gives exact zeros, and where the edge of a selection lies among them both ways are the model that
    its author wrote. One other key in one row is far more than any rounding in that row and in all that follow from it.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.ops.aten.topk.default:
            return func(*args, **kwargs)
        return _lowest_first(*args, **kwargs)


def _lowest_first(
    values: torch.Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    ranked, positions = values.sort(dim=dim, descending=largest, stable=True)
    return ranked.narrow(dim, 0, k).clone(), positions.narrow(dim, 0, k).clone()


def write_reference(entry: Entry, file: Path) -> None:
    """Write what the model gives in float32, both ways of telling ties apart, and how far off a result may be."""
    model = entry.model
    weights = list(model.parameters()) if isinstance(model, torch.nn.Module) else []
    in_bfloat16 = any(weight.dtype == torch.bfloat16 for weight in weights)
    run = _in_float32 if in_bfloat16 else _as_it_is
    wide = run(entry)
    with LowestFirst():  # type: ignore[no-untyped-call]
        lowest = run(entry)
        others = [_moved(entry, seed) for seed in range(_MOVED if weights and not in_bfloat16 else 0)]
    if in_bfloat16:
        rows = allowed = _LEAST + _TIMES * _farthest(_as_it_is(entry), wide) + _ROUNDED
    else:
        rows, allowed = _LEAST, _LEAST + _TIMES * max((_farthest(other, lowest) for other in others), default=0.0)
    torch.save({"ways": [wide, lowest], "rows": rows, "allowed": allowed}, file)


def differs(results: Sequence[torch.Tensor], file: Path) -> str:
    """What is wrong with results in one line, "" where they are as near as they must be to one of the references."""
    known = torch.load(file, weights_only=True)
    found = [_differs_from(results, way, known["rows"], known["allowed"]) for way in known["ways"]]
    return "" if "" in found else found[0]


def distance(one: torch.Tensor, right: torch.Tensor) -> float:
    """The norm of the difference over that of what is right; NaN where anything is NaN."""
    return float((one.double() - right.double()).norm() / right.double().norm())


def numbers_of(result: Any) -> list[torch.Tensor]:
    """The floating tensors of a result; of one with logits these alone, for its caches were given to it."""
    found = getattr(result, "logits", result)
    leaves = pytree.tree_leaves(found)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def _differs_from(results: Sequence[torch.Tensor], way: Sequence[torch.Tensor], rows: float, allowed: float) -> str:
    if len(results) != len(way):
        return f"{len(results)} results instead of {len(way)}"
    for place, (one, right) in enumerate(zip(results, way, strict=True)):
        if one.shape != right.shape:
            return f"result {place} is {list(one.shape)}, not {list(right.shape)}"
        if not (off := distance(one, right)) <= allowed:
            return f"result {place} is {off:.1e} away from eager in float32, more than {allowed:.1e}"
        if not (off := _middle_row(one, right)) <= rows:
            return f"half of the rows of result {place} are {off:.1e} away from eager in float32, more than {rows:.1e}"
    return ""


def _middle_row(one: torch.Tensor, right: torch.Tensor) -> float:
    """The median of the rows' distances; NaN where anything is NaN."""
    off = (one.double() - right.double()).norm(dim=-1) / right.double().norm(dim=-1)
    return float(off.median())


def _farthest(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> float:
    return max(distance(one, right) for one, right in zip(some, others, strict=True))


def _moved(entry: Entry, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def move(model: torch.nn.Module, given: Any) -> tuple[torch.nn.Module, Any]:
        with torch.no_grad():
            for weight in model.parameters():
                if weight.is_floating_point():
                    noise = torch.randn(weight.shape, generator=generator).to(weight.device, weight.dtype)
                    weight.mul_(1 + torch.finfo(weight.dtype).eps * noise)
        return model, given

    return _called(entry, move)


def _as_it_is(entry: Entry) -> list[torch.Tensor]:
    return _called(entry, lambda model, given: (model, given))


def _in_float32(entry: Entry) -> list[torch.Tensor]:
    return _called(entry, lambda model, given: (model.float(), pytree.tree_map(_widened, given)))


def _called(entry: Entry, change: Callable[[Any, Any], tuple[Any, Any]]) -> list[torch.Tensor]:
    """What copies of model and arguments give: a call may write into its caches."""
    model, given = change(*copy.deepcopy((entry.model, (entry.args, dict(entry.kwargs)))))
    with entry.grad_mode():
        return numbers_of(model(*given[0], **given[1]))


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16 else value
