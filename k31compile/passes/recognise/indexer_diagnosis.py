"""Why a score is not the indexer's: known relatives are tried, so that a refusal names the difference."""

import torch

_LIMIT = 1e-9


def diagnose(
    got: torch.Tensor, hidden: torch.Tensor, query: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor
) -> str:
    """The sentence for scores `got` [B, T, S] that are not the indexer's.

    `query` [B, T, H, D], `keys` [B, S, D], `weights` [B, T, H]; `hidden` marks what a mask took out.
    """
    dots = torch.einsum("bthd,bsd->bths", query, keys)
    weight = weights[..., None]
    relatives = {
        "the relu is missing: scores are sum_h w * (q . k)": (weight * dots).sum(2),
        "the relu is squared: scores are sum_h w * relu(q . k)^2": (weight * dots.relu().square()).sum(2),
        "the relu comes after the weights: scores are sum_h relu(w * (q . k))": (weight * dots).relu().sum(2),
        "the relu comes after the sum over heads": (weight * dots).sum(2).relu(),
        "the weights are missing: scores are sum_h relu(q . k)": dots.relu().sum(2),
        "an absolute value stands for the relu": (weight * dots.abs()).sum(2),
        "the smallest scores are selected: the sign is reversed": -(weight * dots.relu()).sum(2),
        "a softmax over the keys stands for the relu": _softmax(weight, dots, hidden),
        "a sigmoid stands for the relu": (weight * dots.sigmoid()).sum(2),
        "a silu stands for the relu": (weight * torch.nn.functional.silu(dots)).sum(2),
        "a gelu stands for the relu": (weight * torch.nn.functional.gelu(dots)).sum(2),
    }
    alive = ~hidden
    for sentence, scores in relatives.items():
        if _proportional(got, scores, alive):
            return sentence
    return "the scores are not sum_h w * relu(q . k)"


def _softmax(weight: torch.Tensor, dots: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    return (weight * dots.softmax(-1)).sum(2)


def _proportional(got: torch.Tensor, scores: torch.Tensor, alive: torch.Tensor) -> bool:
    size = scores.abs().amax(-1, keepdim=True).clamp_min(1e-300)
    left, right = torch.where(alive, got, 0.0) / size, torch.where(alive, scores, 0.0) / size
    factor = float((left * right).sum() / right.square().sum().clamp_min(1e-300))
    return factor > 0 and bool(((left - factor * right).abs() <= _LIMIT * max(1.0, factor)).all())
