"""How far two results are apart, and how good a selection is."""

from __future__ import annotations

import torch


def relative_error(got: torch.Tensor, gold: torch.Tensor) -> float:
    """Largest difference over the largest magnitude; infinite where one is not finite and the other differs."""
    if got.shape != gold.shape:
        return float("inf")
    if gold.numel() == 0:
        return 0.0
    wide, gold = got.to(torch.float64), gold.to(torch.float64)
    finite = gold.isfinite()
    same = (wide == gold) | (wide.isnan() & gold.isnan())
    if not bool((finite | same).all()) or not bool(wide[finite].isfinite().all()):
        return float("inf")
    if not bool(finite.any()):
        return 0.0
    scale = float(gold[finite].abs().max())
    difference = float((wide[finite] - gold[finite]).abs().max())
    return difference / scale if scale else difference


def regret(scores: torch.Tensor, chosen: torch.Tensor) -> float:
    """How much better, relative to the largest score, the best key left out is than the worst one chosen.

    scores [R, S] with -inf where a key is hidden, chosen int64 [R, K]. Zero where the selection is one of the best;
    infinite where a hidden key was chosen while a visible one was left out.
    """
    inside = torch.zeros_like(scores, dtype=torch.bool).scatter(1, chosen, True)
    best_left = scores.masked_fill(inside, -torch.inf).amax(1)
    worst_chosen = scores.masked_fill(~inside, torch.inf).amin(1)
    decided = best_left > -torch.inf
    if not bool(decided.any()):
        return 0.0
    missed = float((best_left - worst_chosen)[decided].max())
    finite = scores[scores.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 1.0
    return max(0.0, missed) / (scale or 1.0)


def overlap(left: torch.Tensor, right: torch.Tensor, positions: int, hidden: torch.Tensor | None = None) -> float:
    """The part of the keys in `left` that `right` has too; negative ones and `hidden` [R, S] ones do not count."""
    sets = []
    for chosen in (left, right):
        rows = torch.zeros(chosen.shape[0], positions + 1, dtype=torch.bool)
        rows.scatter_(1, torch.where(chosen < 0, positions, chosen).long(), True)
        sets.append(rows[:, :positions] if hidden is None else rows[:, :positions] & ~hidden)
    wanted = int(sets[0].sum())
    return int((sets[0] & sets[1]).sum()) / wanted if wanted else 1.0


def filled_up(chosen: torch.Tensor, positions: int) -> torch.Tensor:
    """Replace each -1 in a row of [R, K] by the lowest positions that the row did not choose, ascending."""
    inside = torch.zeros(chosen.shape[0], positions + 1, dtype=torch.bool)
    inside.scatter_(1, torch.where(chosen < 0, positions, chosen), True)
    free = inside[:, :positions].to(torch.uint8).argsort(dim=1, stable=True)
    empty = chosen < 0
    rank = (empty.long().cumsum(1) - 1).clamp(min=0)
    return torch.where(empty, free.gather(1, rank), chosen)
