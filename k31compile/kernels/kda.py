"""``k31::kda_recurrent`` and ``k31::kda_chunk``: the delta rule with a decay per key channel (K3.1 spec 2.4, 2.5).

Per token and head, with S the state [K, V]:

    S <- exp(gate) * S;  u = beta * (value - S^T key);  S <- S + key u^T;  out = scale * S^T query

`kda_chunk` is the same function with optional state and ragged sequences, computed several tokens at a time.
"""

from __future__ import annotations

import torch

from k31compile.kernels.checks import accumulation_dtype
from k31compile.kernels.cpu.delta_rule import chunk_provider, recurrent_in_place_provider, recurrent_provider
from k31compile.kernels.delta_checks import check_ranks, state_shape
from k31compile.kernels.delta_rule import by_chunk, by_token, run_form
from k31compile.kernels.in_place import register_in_place_form
from k31compile.kernels.library import register_operator

RECURRENT_SCHEMA = (
    "kda_recurrent(Tensor query, Tensor key, Tensor value, Tensor gate, Tensor beta, Tensor initial_state, *, "
    "float scale=1.0, str state_layout='KV') -> (Tensor, Tensor)"
)
IN_PLACE_SCHEMA = (
    "kda_recurrent_(Tensor query, Tensor key, Tensor value, Tensor gate, Tensor beta, Tensor(a!) state, *, "
    "Tensor? rows=None, float scale=1.0, str state_layout='KV') -> Tensor"
)
CHUNK_SCHEMA = (
    "kda_chunk(Tensor query, Tensor key, Tensor value, Tensor gate, Tensor beta, Tensor? initial_state=None, *, "
    "Tensor? cu_seqlens=None, float scale=1.0, str state_layout='KV') -> (Tensor, Tensor)"
)


def kda_recurrent_fake(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    gate: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    *,
    scale: float = 1.0,
    state_layout: str = "KV",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapes and dtypes of output and last state; sizes may be symbolic and stay so."""
    return kda_chunk_fake(query, key, value, gate, beta, initial_state, scale=scale, state_layout=state_layout)


def kda_chunk_fake(
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
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapes and dtypes of output and last state; sizes may be symbolic and stay so."""
    check_ranks(query, value, gate, state_layout)
    dtype = accumulation_dtype(query, key, value, gate, beta, initial_state)
    output = query.new_empty((*query.shape[:3], value.shape[3]), dtype=dtype)
    return output, query.new_empty(state_shape(query, value, cu_seqlens, state_layout), dtype=dtype)


def kda_recurrent_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    gate: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    *,
    scale: float = 1.0,
    state_layout: str = "KV",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the rule token by token; the definition of all operators of this family.

    Args:
        query, key: [B, T, H, K]; value: [B, T, H, V]; beta: [B, T, H].
        gate: [B, T, H, K], the natural logarithm of each channel's decay; -inf forgets the channel.
        initial_state: [B, H, K, V], or [B, H, V, K] with `state_layout='VK'`.
        scale: factor on what is read.

    Any mix of float dtypes; everything runs and comes out in float32, in float64 when any argument is float64.
    Returns the output [B, T, H, V] and the last state in the layout given, a new tensor. Raises OperatorError on
    anything outside this contract.
    """
    return run_form(by_token, query, key, value, gate, beta, initial_state, None, scale, state_layout)


def kda_chunk_reference(
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
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the rule chunk by chunk: what `kda_recurrent_reference` returns, to rounding.

    Args as there, and in addition:
        initial_state: [B, H, K, V] (or 'VK'); None stands for zeros.
        cu_seqlens: integers [N + 1] that ascend from 0 to T, with B = 1: tokens cu_seqlens[n] up to
            cu_seqlens[n + 1] are sequence n, and the states are [N, H, K, V] (or 'VK').
    """
    return run_form(by_chunk, query, key, value, gate, beta, initial_state, cu_seqlens, scale, state_layout)


def kda_recurrent_in_place_fake(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    gate: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    *,
    rows: torch.Tensor | None = None,
    scale: float = 1.0,
    state_layout: str = "KV",
) -> torch.Tensor:
    """Shape and dtype of the output of `kda_recurrent_`."""
    return kda_recurrent_fake(query, key, value, gate, beta, state, scale=scale, state_layout=state_layout)[0]


RECURRENT = register_operator(
    RECURRENT_SCHEMA,
    fake=kda_recurrent_fake,
    reference=kda_recurrent_reference,
    providers=(recurrent_provider(),),
)
CHUNK = register_operator(
    CHUNK_SCHEMA,
    fake=kda_chunk_fake,
    reference=kda_chunk_reference,
    providers=(chunk_provider(),),
)
register_in_place_form(RECURRENT, IN_PLACE_SCHEMA, 5, kda_recurrent_in_place_fake, (recurrent_in_place_provider(),))
