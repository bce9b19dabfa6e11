"""What a stranger is: one module in somebody's own style, what should be fused in it, and what became of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import k31compile

TOLERANCE = 1e-4


@dataclass(frozen=True)
class Stranger:
    """One spelling: `build` returns what is compiled and its arguments; `limit` says why it is not fused today.

    `meaning` takes from a result what its author did not ask for, the order of a selection for one.
    """

    name: str
    build: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]
    expected: dict[str, int]
    limit: str = ""
    meaning: Callable[[Any], Any] = lambda result: result


def sorted_choice(indices: torch.Tensor) -> torch.Tensor:
    """Return a selection as the set that it is: a top-k's order is not part of what an indexer promises."""
    return indices.sort(dim=-1).values


def seen_choice(indices: torch.Tensor) -> torch.Tensor:
    """Return what rows 0, 1, ... choose among the keys that they see; scores of -inf are in no order."""
    rows = torch.arange(indices.shape[-2])[:, None]
    return sorted_choice(indices.masked_fill(indices > rows, -1))


@dataclass
class Outcome:
    """What a compile made of a stranger: counts, sentences, and the worst relative distance from eager."""

    name: str
    expected: dict[str, int]
    fused: dict[str, int] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    worst: float = 0.0

    @property
    def complete(self) -> bool:
        return all(self.fused.get(name, 0) == count for name, count in self.expected.items())


def distance(mine: Any, theirs: Any) -> float:
    """Return the worst distance of all tensors, relative to each one's largest value; NaN and inf must agree."""
    if isinstance(mine, torch.Tensor):
        assert mine.shape == theirs.shape
        assert mine.dtype == theirs.dtype
        mine, theirs = mine.double(), theirs.double()
        unlike = ~((mine == theirs) | (mine.isnan() & theirs.isnan()))
        if not unlike.any():
            return 0.0
        if not (mine[unlike].isfinite().all() and theirs[unlike].isfinite().all()):
            return float("inf")
        scale = theirs[theirs.isfinite()].abs().max().clamp_min(1e-30)
        return float((mine - theirs)[unlike].abs().max() / scale)
    if isinstance(mine, (list, tuple)):
        assert len(mine) == len(theirs)
        return max((distance(a, b) for a, b in zip(mine, theirs, strict=True)), default=0.0)
    assert mine == theirs
    return 0.0


def measure(stranger: Stranger, changes: tuple[Callable[[Any], Any], ...] = (lambda args: args,)) -> Outcome:
    """Compile a stranger and compare with eager on its arguments, each time changed by one of `changes`.

    Everything written in place counts: arguments and buffers are compared after the call too.
    """
    torch.manual_seed(20)
    torch._dynamo.reset()
    function, arguments = stranger.build()
    outcome = Outcome(stranger.name, stranger.expected)
    compiled_from = copy.deepcopy(function)
    compiled = torch.compile(compiled_from, backend="k31", options={"codegen": "ops"}, dynamic=False)
    with torch.no_grad():
        for change in changes:
            mine, theirs = (copy.deepcopy(change(arguments)) for _ in range(2))
            got, wanted = compiled(*mine), function(*theirs)
            pairs = [(stranger.meaning(got), stranger.meaning(wanted)), (mine, theirs)]
            if isinstance(function, nn.Module):
                pairs.append((list(compiled_from.buffers()), list(function.buffers())))
            outcome.worst = max(outcome.worst, *(distance(a, b) for a, b in pairs))
    report = k31compile.last_report()
    outcome.fused = dict(report.fused)
    outcome.refused = [str(refusal) for refusal in report.near_misses_first()]
    return outcome
