"""The delta rule by operators that somebody has written: torch_npu's, one of ours, fla_npu's (K3.1 spec 2.4, 2.5)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from k31compile.kernels.delta_checks import VALUE_FIRST
from k31compile.targets.ascend import provider_calls
from k31compile.targets.ascend.constraints import violations
from k31compile.targets.ascend.lowerings.registry import known, lowers
from k31compile.targets.ascend.own_operators import current_place
from k31compile.targets.ascend.profiles import Profile
from k31compile.targets.ascend.providers import FLA_NPU, OURS, SGL_KERNEL_NPU, TORCH_NPU, VLLM_ASCEND

_HALF_OPERANDS = ("query dtype", "key dtype", "value dtype", "beta dtype")


def _broken(
    function: str, profile: Profile, query: Tensor, key: Tensor, value: Tensor, beta: Tensor, state: Tensor | None
) -> list[str]:
    """What a function of the delta rule does not take of a call."""
    values: dict[str, Any] = {
        "query dtype": query.dtype, "key dtype": key.dtype, "value dtype": value.dtype, "beta dtype": beta.dtype,
        "tokens": query.shape[1], "heads": query.shape[2], "key dim": query.shape[3], "value dim": value.shape[3],
    }  # fmt: skip
    if state is not None:
        values["state dtype"] = state.dtype
    if profile.may_round:
        values = {what: value for what, value in values.items() if what not in _HALF_OPERANDS}
    return violations(function, profile, values)


def _torch_npu_objections(
    profile: Profile, query: Tensor, key: Tensor, value: Tensor, gate: Tensor, beta: Tensor, initial_state: Tensor,
    **_: Any,
) -> Sequence[str]:  # fmt: skip
    return _broken("npu_recurrent_gated_delta_rule", profile, query, key, value, beta, initial_state)


@lowers("kda_recurrent", TORCH_NPU, _torch_npu_objections, calls="npu_recurrent_gated_delta_rule_functional")
@lowers("gated_delta_recurrent", TORCH_NPU, _torch_npu_objections, calls="npu_recurrent_gated_delta_rule_functional")
def recur_by_torch_npu(
    _profile: Profile,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    *,
    scale: float = 1.0,
    state_layout: str = "KV",
) -> tuple[Tensor, Tensor]:
    """npu_recurrent_gated_delta_rule: tokens in a row, the state of each in a slot [Dv, Dk] of its own.

    A request reads the slot of its first token and leaves its last state in that of its last one. Called in its
    functional form: torchair converts no other.
    """
    batch, tokens, heads, _width = query.shape
    half = torch.bfloat16
    q, k, v = (x.to(half).reshape(batch * tokens, heads, -1) for x in (query, key, value))
    slots = initial_state if state_layout == VALUE_FIRST else initial_state.mT
    slots = slots.to(half)[:, None].expand(batch, tokens, *slots.shape[1:]).reshape(batch * tokens, *slots.shape[1:])
    decay = {"g" if gate.dim() == 3 else "gk": gate.float().reshape(batch * tokens, *gate.shape[2:])}
    output, slots = torch.ops.npu.npu_recurrent_gated_delta_rule_functional(
        q, k, v, slots, beta=beta.to(half).reshape(batch * tokens, heads), scale=scale,
        actual_seq_lengths=torch.full((batch,), tokens, dtype=torch.int32, device=query.device),
        ssm_state_indices=torch.arange(batch * tokens, dtype=torch.int32, device=query.device), **decay,
    )  # fmt: skip
    last = slots.view(batch, tokens, *slots.shape[1:])[:, -1].float()
    last = last if state_layout == VALUE_FIRST else last.mT.contiguous()
    return output.view(batch, tokens, heads, -1).float(), last


@lowers("kda_recurrent", OURS, calls="k31_npu::kda_recurrent_")
def recur_by_ours(
    _profile: Profile,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    *,
    scale: float = 1.0,
    state_layout: str = "KV",
) -> tuple[Tensor, Tensor]:
    """One node; in the cache where the states lie there, else on a copy of them."""
    place, operands = current_place(), (query, key, value, gate, beta)
    options: dict[str, Any] = {"scale": scale, "state_layout": state_layout}
    if place is not None and place.cache.dtype == torch.float32:
        place.taken = True
        rows = place.rows.to(torch.int32)
        return torch.ops.k31_npu.kda_recurrent_(*operands, place.cache, rows, **options), initial_state
    last = initial_state.float().clone(memory_format=torch.contiguous_format)
    rows = torch.arange(last.shape[0], dtype=torch.int32, device=last.device)
    return torch.ops.k31_npu.kda_recurrent_(*operands, last, rows, **options), last


def _fla_recurrent_objections(
    profile: Profile, query: Tensor, key: Tensor, value: Tensor, gate: Tensor, beta: Tensor, initial_state: Tensor,
    **_: Any,
) -> Sequence[str]:  # fmt: skip
    return _broken("fla_npu.recurrent_kda", profile, query, key, value, beta, initial_state)


@lowers(
    "kda_recurrent", FLA_NPU, _fla_recurrent_objections, calls="ops.ascendc.recurrent_kda",
    function=provider_calls.RECURRENT_KDA,
)  # fmt: skip
def recur_by_fla_npu(_profile: Profile, *args: Any, **options: Any) -> Any:
    """fla_npu's kernel of a step, with a float32 state."""
    return torch.ops.k31_npu.fla_recurrent_kda(*args, **options)


def _fla_chunk_objections(
    profile: Profile, query: Tensor, key: Tensor, value: Tensor, gate: Tensor, beta: Tensor,
    initial_state: Tensor | None = None, *, cu_seqlens: Tensor | None = None, **_: Any,
) -> Sequence[str]:  # fmt: skip
    found = _broken("fla_npu.chunk_kda_fwd", profile, query, key, value, beta, initial_state)
    if cu_seqlens is not None:
        found.append("fla_npu.chunk_kda_fwd takes limits as numbers of the host, and these are a tensor of the graph")
    return found


@lowers(
    "kda_chunk", FLA_NPU, _fla_chunk_objections, calls="ops.ascendc.chunk_kda_fwd",
    function=provider_calls.CHUNK_KDA_FWD,
)  # fmt: skip
def chunk_by_fla_npu(_profile: Profile, *args: Any, **options: Any) -> Any:
    """fla_npu's kernel of a prefill, in chunks of 64."""
    options.pop("cu_seqlens", None)
    return torch.ops.k31_npu.fla_chunk_kda(*args, **options)


_GATES = "it takes gates of -1 to 0, and what a gate holds is not known while a graph is made"


def _chunk_objections(
    profile: Profile, query: Tensor, key: Tensor, value: Tensor, gate: Tensor, beta: Tensor,
    initial_state: Tensor | None = None, **_: Any,
) -> Sequence[str]:  # fmt: skip
    found = _broken("npu_chunk_gated_delta_rule", profile, query, key, value, beta, initial_state)
    if profile.path == "ge":
        found.append("npu_chunk_gated_delta_rule has a GE converter that refuses; a graph for npugraph_ex can call it")
    return found or [_GATES]


def _never(*_args: Any, **_kwargs: Any) -> Any:
    raise AssertionError("it always has an objection")


lowers("gated_delta_chunk", TORCH_NPU, _chunk_objections, calls="npu_chunk_gated_delta_rule", never=_GATES)(_never)
known("kda_chunk", TORCH_NPU, "npu_chunk_gated_delta_rule", "takes one gate a head, and KDA has one a channel")
for _operator, _function in (("kda_recurrent", "run_recurrent_kda"), ("kda_chunk", "run_chunk_kda")):
    known(_operator, VLLM_ASCEND, f"ops.kda.{_function}", "calls fla_npu, which is asked for itself")
known(
    "gated_delta_recurrent", VLLM_ASCEND, "_C_ascend.npu_recurrent_gated_delta_rule",
    "is registered by vllm as it starts, and by no import that was seen",
)  # fmt: skip
known(
    "kda_recurrent", SGL_KERNEL_NPU, "fla.kda_decode_pto.kda_decode_pto",
    "makes gate and beta itself from raw values, with a softplus; these are made already",
)  # fmt: skip
known(
    "mega_kda", SGL_KERNEL_NPU, "fla.kda_decode_pto.kda_decode_pto",
    "has no bounded gate and no convolution, and wants the lengths as prefix sums",
)  # fmt: skip
known(
    "kda_chunk",
    SGL_KERNEL_NPU,
    "fla.kda_prefill",
    "exports parts (recompute_w_u_fwd_npu, chunk_gla_fwd_o_gk_npu), not the whole",
)
