"""``k31::mega_kda``: a KDA layer between its projections, as one operator for decode (K3.1 spec 2.3 to 2.6).

    query, key, value = heads of short_conv(x);  query, key <- unit(query), unit(key)
    gate = lower_bound sigmoid(exp(a_log) (raw_gate + dt_bias))  or  -exp(a_log) softplus(raw_gate + dt_bias)
    beta = beta_factor sigmoid(raw_beta)
    result = gated_rms_norm(kda_recurrent(query, key, value, gate, beta, state), out_gate)

with unit(y) = y rsqrt(sum(y^2) + l2_eps).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from k31compile.kernels.arguments import taking
from k31compile.kernels.cpu.mega_kda import mega_kda_in_place_provider, mega_kda_provider
from k31compile.kernels.gated_rms_norm import gated_rms_norm_reference
from k31compile.kernels.in_place import register_in_place_form
from k31compile.kernels.kda import kda_recurrent_reference
from k31compile.kernels.library import register_operator
from k31compile.kernels.mega_kda_arguments import MegaKda, Results
from k31compile.kernels.short_conv import short_conv_reference

_TENSORS = (
    "Tensor[] x, Tensor[] conv_weight, Tensor[]? conv_state, Tensor raw_gate, Tensor a_log, Tensor? dt_bias, "
    "Tensor raw_beta, {} state, Tensor out_gate, Tensor norm_weight, *, "
)
_OPTIONS = (
    "float norm_eps, float? lower_bound=None, float l2_eps=1e-6, float beta_factor=1.0, float scale=1.0, "
    "str state_layout='KV', ScalarType? beta_dtype=None, ScalarType? core_dtype=None, str norm_activation='sigmoid', "
    "bool norm_before_gate=True, str weight_cast='before', ScalarType? dtype=None"
)
SCHEMA = f"mega_kda({_TENSORS.format('Tensor')}{_OPTIONS}) -> (Tensor, Tensor, Tensor)"
IN_PLACE_SCHEMA = f"mega_kda_({_TENSORS.format('Tensor(a!)')}Tensor? rows=None, {_OPTIONS}) -> (Tensor, Tensor)"


@taking(MegaKda, sizes=False)
def mega_kda_fake(call: MegaKda) -> Results:
    """Shapes and dtypes of the results; sizes may be symbolic and stay so."""
    return call.new_results()


def mega_kda_in_place_fake(
    *args: Any, rows: torch.Tensor | None = None, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapes and dtypes of the results of `mega_kda_`."""
    call = MegaKda(*args, **options)
    call.check_words()
    return call.new_outputs()


@taking(MegaKda)
def mega_kda_reference(call: MegaKda) -> Results:
    """Run the parts one after the other; the definition of the operator (arguments: see `MegaKda`).

    The convolution's result is rounded to the dtype of x. Unit vectors, gates and recurrence are float32 (float64
    where any tensor is); beta and the recurrence's output are rounded where beta_dtype and core_dtype say so.

    Returns the result [B, T, H, V], the W-1 inputs up to the last token, packed [B, W-1, C] in the dtype of
    conv_state (x without one), and the last state. Raises OperatorError on anything outside this contract.
    """
    wide = call.wide
    result, kept, last = call.new_results()
    query, key, value = _convolved(call, kept)
    gate = _log_decay(call, wide)
    beta = torch.sigmoid(call.raw_beta.to(wide)).to(call.beta_dtype or wide).to(wide) * call.beta_factor
    core, state = kda_recurrent_reference(
        _unit(query.to(wide), call.l2_eps),
        _unit(key.to(wide), call.l2_eps),
        value,
        gate,
        beta,
        call.state,
        scale=call.scale,
        state_layout=call.state_layout,
    )
    normed = gated_rms_norm_reference(
        core.to(call.core_dtype or wide),
        call.out_gate,
        call.norm_weight,
        eps=call.norm_eps,
        activation=call.norm_activation,
        norm_before_gate=call.norm_before_gate,
        weight_cast=call.weight_cast,
        dtype=result.dtype,
    )
    return result.copy_(normed), kept, last.copy_(state)


def _convolved(call: MegaKda, kept: torch.Tensor) -> list[torch.Tensor]:
    """Query, key and value by heads; `kept` takes the last inputs."""
    _, _, heads, width = call.raw_gate.shape
    before: Sequence[torch.Tensor | None] = call.conv_state or [None] * len(call.x)
    runs = [
        short_conv_reference(x, weight, state=state)
        for x, weight, state in zip(call.x, call.conv_weight, before, strict=True)
    ]
    kept.copy_(torch.cat([state for _, state in runs], -1))
    y = torch.cat([y for y, _ in runs], -1)
    streams = y.split([heads * width, heads * width, heads * call.out_gate.shape[3]], dim=-1)
    return [stream.unflatten(-1, (heads, -1)) for stream in streams]


def _unit(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def _log_decay(call: MegaKda, wide: torch.dtype) -> torch.Tensor:
    rate = call.a_log.to(wide).exp()[:, None]
    shifted = call.raw_gate.to(wide)
    shifted = shifted if call.dt_bias is None else shifted + call.dt_bias.to(wide)
    if call.lower_bound is None:
        return -rate * torch.logaddexp(shifted, torch.zeros_like(shifted))
    return call.lower_bound * torch.sigmoid(rate * shifted)


def parts(x: list[Any], *_args: Any, **_kwargs: Any) -> Mapping[str, int]:
    """The operators that a call does the work of."""
    return Counter(short_conv=len(x), kda_recurrent=1, gated_rms_norm=1)


OPERATOR = register_operator(
    SCHEMA,
    fake=mega_kda_fake,
    reference=mega_kda_reference,
    providers=(mega_kda_provider(),),
    parts=parts,
)
register_in_place_form(OPERATOR, IN_PLACE_SCHEMA, 7, mega_kda_in_place_fake, (mega_kda_in_place_provider(),))
