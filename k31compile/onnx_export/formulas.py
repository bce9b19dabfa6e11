"""What each k31 operator is in plain operators that ONNX has: the formulas of the Ascend target, and a few of our own.

Ours are those that would grow with the length of a call: a recurrence over tokens is one `Scan`, whatever its length.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.scan import scan

import k31compile.targets.ascend.lowerings  # noqa: F401  (registers them)
from k31compile.errors import TargetError
from k31compile.kernels.checks import accumulation_dtype
from k31compile.kernels.delta_checks import KEY_FIRST, state_shape
from k31compile.targets.ascend.lowerings.attention import index_by_formula
from k31compile.targets.ascend.lowerings.delta_rule import around_recurrence
from k31compile.targets.ascend.lowerings.registry import FORMULA, LOWERINGS
from k31compile.targets.ascend.profiles import PROFILES

Formula = Callable[..., Any]
_LOWEST = "lowest"


def formula_of(operator: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Formula:
    """The formula of a call of `k31::operator`.

    Raises:
        TargetError: there is none for these arguments, with the reason.
    """
    if operator in OURS:
        _refuse_ragged(operator, kwargs)
        return OURS[operator]
    profile = next(iter(PROFILES.values()))  # a formula knows no product
    reasons: list[str] = []
    for lowering in LOWERINGS.get(operator, ()):
        if lowering.provider == FORMULA:
            objections = list(lowering.objections(profile, *args, **kwargs))
            if not objections:
                run = lowering.run
                return lambda *inputs, **options: run(profile, *inputs, **options)
            reasons += objections
    why = "; ".join(reasons) or "it has no formula"
    raise TargetError(f"k31::{operator} cannot become an ONNX function: {why}", hint="leave its fusion out")


def _refuse_ragged(operator: str, kwargs: dict[str, Any]) -> None:
    if kwargs.get("cu_seqlens") is not None:
        raise TargetError(
            f"k31::{operator} with cu_seqlens cannot become an ONNX function: its sequences have no fixed sizes",
            hint="export a call with one sequence a row of the batch",
        )


def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    scale: float = 1.0,
    state_layout: str = "KV",
) -> tuple[Tensor, Tensor]:
    """S <- exp(g) S;  S <- S + k (beta (v - S^T k))^T;  o = scale S^T q, one step of a scan a token."""
    wide = accumulation_dtype(query, key, value, gate, beta, initial_state)
    key_dim, value_dim = (-2, -1) if state_layout == KEY_FIRST else (-1, -2)
    if initial_state is None:
        initial_state = query.new_zeros(state_shape(query, value, None, state_layout))

    def step(state: Tensor, token: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        q, k, v, g, b = token
        state = state * torch.exp(g).unsqueeze(value_dim)
        address = k.unsqueeze(value_dim)
        correction = b[..., None] * (v - (state * address).sum(key_dim))
        state = state + address * correction.unsqueeze(key_dim)
        return state, (state * q.unsqueeze(value_dim)).sum(key_dim)

    tokens = tuple(x.to(wide).transpose(0, 1) for x in (query, key, value, gate, beta))
    last, read = scan(step, initial_state.to(wide), tokens, dim=0)
    return read.transpose(0, 1) * scale, last


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, gate: Tensor, beta: Tensor, *states: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor]:
    """The same with one decay a head: gate is [B, T, H]."""
    return delta_rule(query, key, value, gate[..., None].expand(key.shape), beta, *states, **options)


def lightning_indexer(query: Tensor, key: Tensor, weights: Tensor, **options: Any) -> Tensor:
    """The formula of the Ascend target; with `tail="lowest"` empty slots get the lowest positions not selected."""
    places: Tensor = index_by_formula(query, key, weights, **options)
    if options.get("tail") != _LOWEST:
        return places
    rows, table = places[:, :, 0].to(torch.int64), options.get("block_table")
    limit = key.shape[1] if table is None else table.shape[1] * key.shape[1]
    named = rows >= 0
    taken = torch.zeros((*rows.shape[:2], limit + 1), dtype=torch.int64, device=query.device)
    taken = taken.scatter(-1, rows.masked_fill(~named, limit), 1)[..., :limit]
    # keys that differ, those not taken first: ONNX has no stable sort
    rest = (taken * limit + torch.arange(limit, device=query.device)).sort(dim=-1).values % limit
    slot = torch.arange(rows.shape[2], device=query.device)
    filler = rest.gather(-1, (slot - named.sum(-1, keepdim=True)).clamp(0, limit - 1))
    filled: Tensor = torch.where(named, rows, filler).to(torch.int32)[:, :, None]
    return filled


OURS: dict[str, Formula] = {
    "kda_recurrent": delta_rule,
    "kda_chunk": delta_rule,
    "gated_delta_recurrent": gated_delta_rule,
    "gated_delta_chunk": gated_delta_rule,
    "mega_kda": functools.partial(around_recurrence, delta_rule),
    "lightning_indexer": lightning_indexer,
}
"""Operator -> its formula, where it is not the Ascend target's."""
