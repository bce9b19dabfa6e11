"""The delta rule over many tokens as a formula of products, sums and exponentials (K3.1 spec 2.5).

A chunk of 64 tokens is built up by doubling: two neighbouring runs of tokens become one, and only what the second reads
of the first is new. Every decay is the exponential of a sum of gates, never of a difference, so a gate of -inf forgets
its channel and no more; and the triangular inverse grows block by block, which is forward substitution and no power
series, so that equal keys cost nothing (bug B3). From one chunk to the next only the state passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from k31compile.kernels.checks import accumulation_dtype
from k31compile.kernels.delta_checks import VALUE_FIRST
from k31compile.targets.ascend.lowerings.registry import FORMULA, lowers

CHUNK = 64
MOST_CHUNKED_TOKENS = 4096
"""64 chunks of about six nodes each, after about 120 nodes for all of them together."""


def too_long(_profile: Any, query: Tensor, *_args: Any, **options: Any) -> Sequence[str]:
    """Why a call does not become this formula."""
    tokens = query.shape[1]
    found = []
    if tokens > MOST_CHUNKED_TOKENS:
        found.append(
            f"{tokens} tokens in one call, at most {MOST_CHUNKED_TOKENS} are written out; prefill in pieces, or run "
            "the graph with npugraph_ex and a provider of this operator"
        )
    if options.get("cu_seqlens") is not None:
        found.append(
            "cu_seqlens are limits that are known only when the graph runs; give each sequence a row of its own"
        )
    return found


@lowers("kda_chunk", FORMULA, too_long)
def kda_chunk(
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
    """[B, T, H, V] and the last state, in float32 (float64 where an argument is)."""
    wide = accumulation_dtype(query, key, value, gate, beta, initial_state)
    batch, tokens, heads, width = query.shape
    if initial_state is None:
        state = query.new_zeros((batch, heads, width, value.shape[3]), dtype=wide)
    else:
        state = initial_state.to(wide)
        state = state.mT if state_layout == VALUE_FIRST else state
    size = min(CHUNK, 1 << (tokens - 1).bit_length())
    q, k, v, g, b = (_in_chunks(x.to(wide), size) for x in (query, key, value, gate, beta.unsqueeze(-1)))
    whole = _build_chunks(q, k, g, b)
    output, state = _pass_state(whole, q, k, b * v, b * k, state)
    output = (output * scale).movedim(1, 3).flatten(1, 2)[:, :tokens].contiguous()
    return output, state.mT.contiguous() if state_layout == VALUE_FIRST else state


@lowers("gated_delta_chunk", FORMULA, too_long)
def gated_delta_chunk(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """The same with one decay a head: gate is [B, T, H]."""
    spread = gate[..., None].expand(*gate.shape, key.shape[-1])
    outputs, state = kda_chunk(query, key, value, spread, beta, initial_state, **options)
    return outputs, state


def _in_chunks(x: Tensor, size: int) -> Tensor:
    """[B, T, H, D] -> [B, H, chunks, size, D], filled with zeros: such a token neither decays nor writes."""
    missing = -x.shape[1] % size
    if missing:
        x = torch.cat((x, x.new_zeros((x.shape[0], missing, *x.shape[2:]))), dim=1)
    divided: Tensor = x.unflatten(1, (-1, size))
    return divided.movedim(3, 1)


@dataclass(frozen=True)
class _Run:
    """Neighbouring tokens, all runs of one length side by side: [..., runs, length, .].

    Attributes:
        inverse: of the unit lower triangle that couples the updates of a run, [..., runs, length, length].
        readout: what each token reads of the updates up to its own, in the same shape.
        since: gates summed from the run's start up to and with each token.
        until: gates summed after each token up to the run's end.
        total: gates summed over the run, [..., runs, 1, K].

    """

    inverse: Tensor
    readout: Tensor
    since: Tensor
    until: Tensor
    total: Tensor


def _build_chunks(q: Tensor, k: Tensor, g: Tensor, b: Tensor) -> _Run:
    """Double runs of one token until they are whole chunks: [B, H, chunks, size, .] each."""
    size = q.shape[3]
    q, k, g, b = (x.flatten(2, 3).unsqueeze(3) for x in (q, k, g, b))
    run = _Run(torch.ones_like(b), (q * k).sum(-1, keepdim=True), g, torch.zeros_like(g), g)
    length = 1
    while length < size:
        run = _join(run, q, k, b)
        q, k, b = (x.unflatten(2, (-1, 2)).flatten(3, 4) for x in (q, k, b))
        length *= 2
    return run


def _join(run: _Run, q: Tensor, k: Tensor, b: Tensor) -> _Run:
    """Two runs as one; q, k and b are the runs' own."""
    first, second = _Run(*(_half(x, 0) for x in _fields(run))), _Run(*(_half(x, 1) for x in _fields(run)))
    decayed = (_half(k, 0) * torch.exp(first.until)).mT
    opened = torch.exp(second.since)
    coupling = (_half(b, 1) * _half(k, 1) * opened) @ decayed
    below = -(second.inverse @ (coupling @ first.inverse))
    return _Run(
        inverse=_lower_blocks(first.inverse, below, second.inverse),
        readout=_lower_blocks(first.readout, (_half(q, 1) * opened) @ decayed, second.readout),
        since=torch.cat((first.since, first.total + second.since), dim=3),
        until=torch.cat((first.until + second.total, second.until), dim=3),
        total=first.total + second.total,
    )


def _fields(run: _Run) -> tuple[Tensor, ...]:
    return run.inverse, run.readout, run.since, run.until, run.total


def _half(x: Tensor, which: int) -> Tensor:
    """Every second run: [B, H, runs, ...] -> [B, H, runs / 2, ...]."""
    pairs: Tensor = x.unflatten(2, (-1, 2))
    return pairs[:, :, :, which]


def _lower_blocks(first: Tensor, below: Tensor, second: Tensor) -> Tensor:
    """[[first, 0], [below, second]]."""
    upper = torch.cat((first, torch.zeros_like(below)), dim=4)
    return torch.cat((upper, torch.cat((below, second), dim=4)), dim=3)


def _pass_state(
    run: _Run, q: Tensor, k: Tensor, weighted_value: Tensor, weighted_key: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Output [B, H, chunks, size, V] and the last state [B, H, K, V]: the one loop, a step for each chunk."""
    opened = torch.exp(run.since)
    alone, reading = run.inverse @ weighted_value, run.inverse @ (weighted_key * opened)
    kept, written = torch.exp(run.total).mT, (k * torch.exp(run.until)).mT
    states, updates = [], []
    for own, read, keep, write in zip(*(x.unbind(2) for x in (alone, reading, kept, written)), strict=True):
        states.append(state)
        update = own - read @ state
        updates.append(update)
        state = keep * state + write @ update
    output = (q * opened) @ torch.stack(states, dim=2) + run.readout @ torch.stack(updates, dim=2)
    return output, state
