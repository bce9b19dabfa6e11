"""What a whole model is compared with: eager in float32, with ties told apart in either of two ways."""

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
_TIMES, _ROUNDED = 1.5, 1e-2  # of eager's own distance in bfloat16, and on top of that


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
    """Write what the model gives in float32, both ways of telling ties apart, and how far off its own dtype is."""
    model = entry.model
    in_bfloat16 = isinstance(model, torch.nn.Module) and any(p.dtype == torch.bfloat16 for p in model.parameters())
    run = _in_float32 if in_bfloat16 else _as_it_is
    wide = run(entry)
    with LowestFirst():  # type: ignore[no-untyped-call]
        ways = [wide, run(entry)]
    allowed = _LEAST
    if in_bfloat16:
        own = max(distance(one, right) for one, right in zip(_as_it_is(entry), wide, strict=True))
        allowed += _TIMES * own + _ROUNDED
    torch.save({"ways": ways, "allowed": allowed}, file)


def differs(results: Sequence[torch.Tensor], file: Path) -> str:
    """What is wrong with results in one line, "" where they are as near as they must be to one of the references."""
    known = torch.load(file, weights_only=True)
    found = [_differs_from(results, way, known["allowed"]) for way in known["ways"]]
    return "" if "" in found else found[0]


def distance(one: torch.Tensor, right: torch.Tensor) -> float:
    """The norm of the difference over that of what is right; NaN where anything is NaN."""
    return float((one.double() - right.double()).norm() / right.double().norm())


def numbers_of(result: Any) -> list[torch.Tensor]:
    """The floating tensors of a result; of one with logits these alone, for its caches were given to it."""
    found = getattr(result, "logits", result)
    leaves = pytree.tree_leaves(found)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def _differs_from(results: Sequence[torch.Tensor], way: Sequence[torch.Tensor], allowed: float) -> str:
    if len(results) != len(way):
        return f"{len(results)} results instead of {len(way)}"
    for place, (one, right) in enumerate(zip(results, way, strict=True)):
        if one.shape != right.shape:
            return f"result {place} is {list(one.shape)}, not {list(right.shape)}"
        if not (off := distance(one, right)) <= allowed:
            return f"result {place} is {off:.1e} away from eager in float32, more than {allowed:.1e}"
    return ""


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
