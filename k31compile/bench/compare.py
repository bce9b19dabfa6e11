"""Whether a result is right: tensors within a tolerance, selections by the scores of what they picked."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree


class InPlace:
    """A tensor of a result that was there before the call and holds what the call wrote: no memory of the call."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def tensors_differ(results: Any, expected: Any, tolerance: float) -> str | None:
    """What is wrong with tensors, in one line; None where each is within `tolerance` of the expected one's largest."""
    found, wanted = (_tensors_of(tree) for tree in (results, expected))
    if len(found) != len(wanted):
        return f"{len(found)} tensors instead of {len(wanted)}"
    for place, (one, right) in enumerate(zip(found, wanted, strict=True)):
        if one.numel() != right.numel():
            return f"result {place} is {list(one.shape)}, not {list(right.shape)}"
        distance = (one.double().reshape(-1) - right.double().reshape(-1)).abs().max() / right.double().abs().max()
        if not float(distance) <= tolerance:  # NaN is not
            return f"result {place} is {float(distance):.1e} away from the reference, more than {tolerance:.0e}"
    return None


def selection_differs(picked: torch.Tensor, scores: torch.Tensor, count: int, tolerance: float) -> str | None:
    """What is wrong with the positions that were picked, in one line; None where they are a best selection.

    picked: integers [rows, any], what is negative or not visible names nothing. scores: [rows, positions], -inf where
    a position is not visible. A pick may score less than the `count`-th best one by `tolerance` times the largest
    score: equal and nearly equal scores may be told apart either way.
    """
    visible = scores != -torch.inf
    chosen = torch.zeros(scores.shape[0], scores.shape[1] + 1, dtype=torch.bool)
    inside = (picked >= 0) & (picked < scores.shape[1])
    chosen.scatter_(1, torch.where(inside, picked, scores.shape[1]).long(), True)
    chosen = chosen[:, :-1] & visible
    wanted = visible.sum(1).clamp(max=count)
    short = (chosen.sum(1) != wanted).nonzero()
    if len(short):
        row = int(short[0])
        return f"row {row} picked {int(chosen[row].sum())} positions, not {int(wanted[row])}"
    ranked = scores.topk(min(count, scores.shape[1]), dim=1).values
    # the worst that a row should have picked: the last of its `count` best, or of all that it sees
    edge = ranked.gather(1, (wanted - 1).clamp(min=0)[:, None])[:, 0]
    slack = tolerance * float(scores[visible].abs().max())
    missed = edge - slack - scores.masked_fill(~chosen, torch.inf).amin(1)
    if float(missed.max()) > 0:
        return f"row {int(missed.argmax())} picked a score {float(missed.max() + slack):.1e} below its edge"
    return None


def _tensors_of(tree: Any) -> list[torch.Tensor]:
    leaves = (leaf.tensor if isinstance(leaf, InPlace) else leaf for leaf in pytree.tree_leaves(tree))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
