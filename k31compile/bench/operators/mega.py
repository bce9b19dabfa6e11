"""`mega_kda`: a KDA layer between its projections for one token, 96 heads, states from DRAM."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from k31compile.bench.case import Case, Form, Thunk, Work
from k31compile.bench.compare import tensors_differ
from k31compile.bench.goals import Bound, Goals
from k31compile.bench.operators.delta import by_products
from k31compile.bench.places import Places
from k31compile.model.delta_rule import kda_gate, kda_recurrent
from k31compile.model.norms import l2_normalize, rms_normalize
from k31compile.model.short_conv import last_inputs, short_conv

_HEADS, _WIDTH, _TAPS = 96, 128, 4
_CHANNELS = 3 * _HEADS * _WIDTH
_BOUND, _EPS = -5.0, 1e-5
_ROTATED = 320 << 20


def cases() -> list[Case]:
    """One decode step."""
    held = Goals({"inductor": Bound(4.0)})
    return [Case("mega_kda", f"decode bf16 B=1 H={_HEADS}, states from DRAM", _make, held, is_quick=True)]


def _chain(
    rule: Callable[..., tuple[Tensor, Tensor]],
    x: Tensor,
    conv_weight: Tensor,
    conv_state: Tensor,
    raw_gate: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    raw_beta: Tensor,
    out_gate: Tensor,
    norm_weight: Tensor,
    state: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The core of the model's KDA layer, with the recurrence in the words of `rule`."""
    window = torch.cat([conv_state, x], dim=1)
    streams = short_conv(window, conv_weight.unsqueeze(1)).split(_HEADS * _WIDTH, dim=-1)
    q, k, v = (stream.unflatten(-1, (_HEADS, _WIDTH)) for stream in streams)
    gate = kda_gate(raw_gate, a_log, dt_bias, _BOUND)
    beta = torch.sigmoid(raw_beta.to(gate.dtype))
    core, state = rule(l2_normalize(q) * _WIDTH**-0.5, l2_normalize(k), v.to(gate.dtype), gate, beta, state)
    normed = rms_normalize(core, norm_weight, _EPS)
    result = (normed * torch.sigmoid(out_gate.to(normed.dtype))).to(out_gate.dtype)
    return result, last_inputs(window, _TAPS - 1, None), state


def _make() -> Work:
    heads = (1, 1, _HEADS, _WIDTH)
    x, conv_state = torch.randn(1, 1, _CHANNELS).bfloat16(), torch.randn(1, _TAPS - 1, _CHANNELS).bfloat16()
    conv_weight, norm_weight = torch.randn(_CHANNELS, _TAPS) * 0.5, torch.rand(_WIDTH) + 0.5
    raw_gate, out_gate = torch.randn(heads).bfloat16(), torch.randn(heads).bfloat16()
    a_log, dt_bias = torch.rand(_HEADS), -5 * torch.rand(_HEADS, _WIDTH)
    raw_beta, first = torch.randn(1, 1, _HEADS).bfloat16(), torch.randn(1, _HEADS, _WIDTH, _WIDTH)
    gates = (raw_gate, a_log, dt_bias, raw_beta)
    count = -(-_ROTATED // first.nbytes) + 1
    places = Places([first.clone() for _ in range(count)])
    # Ours in places of their own: what it writes in place is no other's state.
    own = Places([first.clone() for _ in range(count)]).walk()

    def bind(function: Callable[..., Any]) -> Thunk:
        states = places.walk()
        return lambda: function(x, conv_weight, conv_state, *gates, out_gate, norm_weight, next(states))

    def ours() -> Any:
        state = next(own)
        result, kept = torch.ops.k31.mega_kda_(
            [x], [conv_weight], [conv_state], *gates, state, out_gate, norm_weight, norm_eps=_EPS,
            lower_bound=_BOUND, scale=_WIDTH**-0.5, dtype=torch.bfloat16,
        )  # fmt: skip
        return result, kept, state

    # in float64 from the operands as they are stored; the convolution is rounded to the dtype of x by all
    named = (x, conv_weight, conv_state, *gates, out_gate, norm_weight, first)
    expected = _chain(kda_recurrent, *(tensor.double() for tensor in named))

    def check(result: Any, tolerance: float) -> str | None:
        return tensors_differ(result, expected, tolerance)

    # bound by name: torch.compile takes a partial of a function as it is
    forms = [
        Form("einsum", partial(_chain, kda_recurrent), bind),
        Form("products and sums", partial(_chain, by_products), bind),
    ]
    return Work(ours, forms, check, 2e-2, 2e-2, calls=1)
