"""``k31::gated_delta_recurrent`` and ``k31::gated_delta_chunk``: the delta rule with one decay for a whole head.

The gated DeltaNet. Everything is as in `kda.py` with the gate [B, T, H] repeated over the key channels, which costs
no memory: the repetition is a stride of 0, and the kernels take one exponential for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from k31compile.kernels import kda
from k31compile.kernels.cpu.delta_rule import chunk_provider, recurrent_provider
from k31compile.kernels.delta_checks import check_scalar_gate
from k31compile.kernels.library import register_operator
from k31compile.kernels.registry import Provider

Pair = tuple[torch.Tensor, torch.Tensor]


def repeat_gate(gate: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """[B, T, H] -> [B, T, H, K] as a view."""
    return gate[..., None].expand(-1, -1, -1, key.shape[-1])


def with_scalar_gate(run: Callable[..., Pair]) -> Callable[..., Pair]:
    """The implementation of a gated_delta operator that an implementation of its kda operator makes."""

    def scalar_gated(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, gate: torch.Tensor, *rest: Any, **options: Any
    ) -> Pair:
        check_scalar_gate(gate)
        return run(query, key, value, repeat_gate(gate, key), *rest, **options)

    return scalar_gated


def scalar_gated_provider(provider: Provider) -> Provider:
    """The same provider for the gated_delta operator."""
    return Provider(provider.name, provider.available, with_scalar_gate(provider.run), provider.declines)


def gated_delta_recurrent_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    gate: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    *,
    scale: float = 1.0,
    state_layout: str = "KV",
) -> Pair:
    """Run the rule token by token: `kda_recurrent_reference` with gate [B, T, H], one decay a head."""
    run = with_scalar_gate(kda.kda_recurrent_reference)
    return run(query, key, value, gate, beta, initial_state, scale=scale, state_layout=state_layout)


def gated_delta_chunk_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    gate: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    *,
    cu_seqlens: torch.Tensor | None = None,
    scale: float = 1.0,
    state_layout: str = "KV",
) -> Pair:
    """Run the rule chunk by chunk: `kda_chunk_reference` with gate [B, T, H], one decay a head."""
    run = with_scalar_gate(kda.kda_chunk_reference)
    options = {"cu_seqlens": cu_seqlens, "scale": scale, "state_layout": state_layout}
    return run(query, key, value, gate, beta, initial_state, **options)


RECURRENT = register_operator(
    kda.RECURRENT_SCHEMA.replace("kda_recurrent", "gated_delta_recurrent"),
    fake=with_scalar_gate(kda.kda_recurrent_fake),
    reference=gated_delta_recurrent_reference,
    providers=(scalar_gated_provider(recurrent_provider()),),
)
CHUNK = register_operator(
    kda.CHUNK_SCHEMA.replace("kda_chunk", "gated_delta_chunk"),
    fake=with_scalar_gate(kda.kda_chunk_fake),
    reference=gated_delta_chunk_reference,
    providers=(scalar_gated_provider(chunk_provider()),),
)
