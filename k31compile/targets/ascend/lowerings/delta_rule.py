"""Short convolution, delta rule and a KDA layer's core as formulas (K3.1 spec 2.3 to 2.6)."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from k31compile.kernels.checks import accumulation_dtype
from k31compile.kernels.delta_checks import KEY_FIRST
from k31compile.targets.ascend.lowerings.delta_chunk import kda_chunk, too_long
from k31compile.targets.ascend.lowerings.norms import gated_rms_norm
from k31compile.targets.ascend.lowerings.registry import FORMULA, Decision, choose, lowers
from k31compile.targets.ascend.profiles import Profile

MOST_TOKENS = 8
"""Up to this many tokens a recurrence is written out token by token; a longer one runs in chunks."""


@lowers("kda_recurrent", FORMULA, too_long)
def kda_recurrent(
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
    """S <- exp(g) S;  S <- S + k (beta (v - S^T k))^T;  o = scale S^T q, for each token and head."""
    if query.shape[1] > MOST_TOKENS:
        chunked: tuple[Tensor, Tensor] = kda_chunk(
            query, key, value, gate, beta, initial_state, scale=scale, state_layout=state_layout
        )
        return chunked
    wide = accumulation_dtype(query, key, value, gate, beta, initial_state)
    q, k, v, g, b, state = (x.to(wide) for x in (query, key, value, gate, beta, initial_state))
    key_dim, value_dim = (-2, -1) if state_layout == KEY_FIRST else (-1, -2)
    outputs = []
    for t in range(query.shape[1]):
        state = state * torch.exp(g[:, t]).unsqueeze(value_dim)
        k_t = k[:, t].unsqueeze(value_dim)
        correction = b[:, t, :, None] * (v[:, t] - (state * k_t).sum(key_dim))
        state = state + k_t * correction.unsqueeze(key_dim)
        outputs.append((state * q[:, t].unsqueeze(value_dim)).sum(key_dim) * scale)
    return torch.stack(outputs, dim=1), state


@lowers("gated_delta_recurrent", FORMULA, too_long)
def gated_delta_recurrent(
    query: Tensor, key: Tensor, value: Tensor, gate: Tensor, beta: Tensor, initial_state: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """The same with one decay a head: gate is [B, T, H]."""
    spread = gate[..., None].expand(*gate.shape, key.shape[-1])
    outputs, state = kda_recurrent(query, key, value, spread, beta, initial_state, **options)
    return outputs, state


@lowers("short_conv", FORMULA)
def short_conv(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    state: Tensor | None = None,
    actual_seq_lengths: Tensor | None = None,
    activation: str = "silu",
) -> tuple[Tensor, Tensor]:
    """A causal convolution over time, the oldest product first, and the last inputs as its new state."""
    wide = accumulation_dtype(x, weight, bias, state)
    batch, length, channels = x.shape
    kept = weight.shape[1] - 1
    before = x.new_zeros((batch, kept, channels)) if state is None else state
    window = torch.cat((before.to(wide), x.to(wide)), dim=1)
    y = window[:, :length] * weight[:, 0].to(wide)
    for i in range(1, kept + 1):
        y = y + window[:, i : i + length] * weight[:, i].to(wide)
    if bias is not None:
        y = y + bias.to(wide)
    if activation == "silu":
        y = y * torch.sigmoid(y)
    if actual_seq_lengths is None:
        last = window[:, length:]
    else:
        rows = torch.arange(kept, device=x.device)[None] + actual_seq_lengths.to(torch.int64).clamp(0, length)[:, None]
        last = window.gather(1, rows[..., None].expand(batch, kept, channels))
    return y.to(x.dtype), last.to(before.dtype)


def _mega_too_long(_profile: Any, x: Sequence[Tensor], *_args: Any, **_kwargs: Any) -> Sequence[str]:
    return too_long(_profile, x[0])


def _core(profile: Profile, x: Sequence[Tensor], *args: Any, **options: Any) -> tuple[Decision, ...]:
    """How the recurrence inside of a layer's core runs: the choice for operands of the shapes that it will have."""
    raw_gate, state, out_gate = args[2], args[6], args[7]
    wide = accumulation_dtype(*x, *args[0], *(args[1] or ()), *(t for t in args[2:9] if t is not None))
    rows, heads, width = raw_gate.shape[:2], raw_gate.shape[2], raw_gate.shape[3]
    key = raw_gate.new_empty((*rows, heads, width), dtype=wide)
    value = raw_gate.new_empty((*rows, heads, out_gate.shape[3]), dtype=x[0].dtype)
    beta = raw_gate.new_empty((*rows, heads), dtype=wide)
    kept = {name: options[name] for name in ("scale", "state_layout") if name in options}
    return (choose("kda_recurrent", profile, key, key, value, key, beta, state, **kept)[1],)


@lowers("mega_kda", FORMULA, _mega_too_long, parts=_core)
def mega_kda(profile: Profile, *args: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """A layer's core with the recurrence that the product has."""

    def recur(*operands: Tensor, **kept: Any) -> tuple[Tensor, Tensor]:
        chosen, _ = choose("kda_recurrent", profile, *operands, **kept)
        made: tuple[Tensor, Tensor] = chosen.run(profile, *operands, **kept)
        return made

    return around_recurrence(recur, *args, **options)


def around_recurrence(
    recur: Callable[..., tuple[Tensor, Tensor]],
    x: Sequence[Tensor],
    conv_weight: Sequence[Tensor],
    conv_state: Sequence[Tensor] | None,
    raw_gate: Tensor,
    a_log: Tensor,
    dt_bias: Tensor | None,
    raw_beta: Tensor,
    state: Tensor,
    out_gate: Tensor,
    norm_weight: Tensor,
    *,
    norm_eps: float,
    lower_bound: float | None = None,
    l2_eps: float = 1e-6,
    beta_factor: float = 1.0,
    scale: float = 1.0,
    state_layout: str = "KV",
    beta_dtype: torch.dtype | None = None,
    core_dtype: torch.dtype | None = None,
    norm_activation: str = "sigmoid",
    norm_before_gate: bool = True,
    weight_cast: str = "before",
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Convolution, unit vectors, gates, recurrence and gated norm, one after the other."""
    wide = accumulation_dtype(
        *x, *conv_weight, *(conv_state or ()), raw_gate, a_log, dt_bias, raw_beta, state, out_gate, norm_weight
    )
    heads, width, depth = raw_gate.shape[2], raw_gate.shape[3], out_gate.shape[3]
    states: Sequence[Tensor | None] = conv_state or [None] * len(x)
    runs = [short_conv(part, weight, state=before) for part, weight, before in zip(x, conv_weight, states, strict=True)]
    kept = torch.cat([last for _, last in runs], -1) if len(runs) > 1 else runs[0][1]
    y = torch.cat([part for part, _ in runs], -1) if len(runs) > 1 else runs[0][0]
    streams = y.split([heads * width, heads * width, heads * depth], dim=-1)
    query, key, value = (stream.unflatten(-1, (heads, -1)) for stream in streams)
    gate = log_decay(raw_gate, a_log, dt_bias, lower_bound, wide)
    beta = torch.sigmoid(raw_beta.to(wide)).to(beta_dtype or wide).to(wide) * beta_factor
    operands = (_unit(query.to(wide), l2_eps), _unit(key.to(wide), l2_eps), value, gate, beta, state)
    core, last = recur(*operands, scale=scale, state_layout=state_layout)
    result = gated_rms_norm(
        core.to(core_dtype or wide), out_gate, norm_weight, eps=norm_eps, activation=norm_activation,
        norm_before_gate=norm_before_gate, weight_cast=weight_cast, dtype=dtype or core_dtype or wide,
    )  # fmt: skip
    return result, kept, last.to(wide)


def log_decay(
    raw: Tensor, a_log: Tensor, dt_bias: Tensor | None, lower_bound: float | None, wide: torch.dtype
) -> Tensor:
    """lower_bound sigmoid(exp(a_log) (raw + bias)), or -exp(a_log) softplus(raw + bias)."""
    rate = torch.exp(a_log.to(wide))[:, None]
    shifted = raw.to(wide) if dt_bias is None else raw.to(wide) + dt_bias.to(wide)
    if lower_bound is not None:
        return torch.sigmoid(rate * shifted) * lower_bound
    return -rate * softplus(shifted)


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)) without an overflow: torchair converts no operator of this name."""
    return torch.relu(x) + torch.log(1 + torch.exp(-torch.abs(x)))


def _unit(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps)
