"""Each k31 operator against its own definition in float64, on the very inputs that it got."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from k31compile.check.distance import filled_up, overlap, regret, relative_error
from k31compile.check.interpret import Call
from k31compile.check.places import place_of
from k31compile.check.result import Stage, judged
from k31compile.check.selections import INDEXER
from k31compile.graph.evaluate import raised
from k31compile.kernels import OPERATORS, paging
from k31compile.kernels.visibility import masked_out, visible_lengths


def operator_stages(calls: Sequence[Call]) -> list[Stage]:
    """One stage per call of an operator."""
    return [_indexer(call) if str(call.node.target) == INDEXER else _floating(call) for call in calls]


def _name(call: Call) -> str:
    return f"{str(call.node.target).split('.')[1]} in {place_of(call.node) or call.node.name}"


def _floating(call: Call) -> Stage:
    """Judged by the worst of its results."""
    reference = OPERATORS[str(call.node.target).split(".")[1]].reference
    gold = _tensors(reference(*raised(call.args), **raised(call.kwargs)))
    own, got = _tensors(reference(*call.args, **call.kwargs)), _tensors(call.result)
    eager = max(relative_error(mine, exact) for mine, exact in zip(own, gold, strict=True))
    k31 = max(relative_error(result, exact) for result, exact in zip(got, gold, strict=True))
    return judged(_name(call), "operator", eager, k31, got[0].dtype)


def _tensors(result: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """The numbers among the results; choices are judged as selections."""
    results = (result,) if isinstance(result, torch.Tensor) else result
    return tuple(tensor for tensor in results if tensor.is_floating_point())


def _indexer(call: Call) -> Stage:
    """Its result is a set: judged by what it left out, since equal scores may be told apart by rounding."""
    reference = OPERATORS["lightning_indexer"].reference
    gold = reference(*raised(call.args), **raised(call.kwargs))
    own = reference(*call.args, **call.kwargs)
    scores = _scores(call)
    positions = scores.shape[1]
    errors = []
    for result in (own, call.result):
        rows = result.reshape(-1, result.shape[-1]).long()
        filled = filled_up(rows[:, :positions], positions)
        errors.append(float("inf") if _repeats(filled) else regret(scores, filled))
    share = overlap(call.result.flatten(0, 2), gold.flatten(0, 2), positions)
    return judged(_name(call), "operator", errors[0], errors[1], call.args[0].dtype, share)


def _repeats(rows: torch.Tensor) -> bool:
    ordered = rows.sort(dim=1).values
    return bool((ordered[:, 1:] == ordered[:, :-1]).any())


def _scores(call: Call) -> torch.Tensor:
    """The scores of every row in float64, [B * T, S], -inf where a key is hidden."""
    query, key, weights = (tensor.to(torch.float64) for tensor in call.args[:3])
    options: dict[str, Any] = call.kwargs
    table = options.get("block_table")
    limit = paging.positions(key, table)
    lengths = (options.get("actual_seq_lengths_query"), options.get("actual_seq_lengths_key"))
    batch, rows = query.shape[:2]
    visible = visible_lengths((batch, rows), limit, *lengths, options.get("sparse_mode", 3), query.device)
    place = torch.arange(limit)
    found = []
    for request in range(batch):
        keys = paging.slots(key, table, request, place, place < visible[request].max())[:, 0]
        dots = torch.einsum("thd,sd->ths", query[request], keys).relu()
        scores = torch.einsum("th,ths->ts", weights[request], dots)
        hidden = place >= visible[request][:, None]
        if (mask := options.get("mask")) is not None:
            part = mask.expand(batch, rows, limit)[request]
            hidden = hidden | masked_out(part)
            scores = scores if part.dtype == torch.bool else scores + part.to(scores.dtype)
        found.append(scores.masked_fill(hidden, -torch.inf))
    return torch.cat(found)
