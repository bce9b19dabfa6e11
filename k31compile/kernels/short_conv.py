"""``k31::short_conv``: causal convolution over time, per channel, with the inputs that came before (K3.1 spec 2.6).

    y[b, t, c] = act(sum_i weight[c, i] * window[b, t + i, c] + bias[c]),    window = cat(state, x)

The new state is the end of the window.
"""

from __future__ import annotations

import torch

from k31compile.kernels.arguments import taking
from k31compile.kernels.checks import accumulation_dtype
from k31compile.kernels.cpu.short_conv import short_conv_provider
from k31compile.kernels.library import register_operator
from k31compile.kernels.short_conv_arguments import ShortConv

SCHEMA = (
    "short_conv(Tensor x, Tensor weight, *, Tensor? bias=None, Tensor? state=None, "
    "Tensor? actual_seq_lengths=None, str activation='silu') -> (Tensor, Tensor)"
)


@taking(ShortConv, sizes=False)
def short_conv_fake(call: ShortConv) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapes and dtypes of the results; sizes may be symbolic and stay so."""
    return call.new_results()


@taking(ShortConv)
def short_conv_reference(call: ShortConv) -> tuple[torch.Tensor, torch.Tensor]:
    """Convolve; the definition of the operator (arguments: see `ShortConv`).

    Products are added in float32 (float64 for float64 tensors), the oldest first and the bias last, and rounded once
    to the dtype of x. Returns y [B, T, C] and the W-1 inputs up to the last valid token, [B, W-1, C]; padding never
    enters the state, and a request without valid tokens keeps the one it had. Raises OperatorError on anything
    outside this contract.
    """
    dtype = accumulation_dtype(call.x, call.weight, call.bias, call.state)
    result, state = call.new_results()
    kept, length = state.shape[1], call.x.shape[1]
    before = torch.zeros_like(state) if call.state is None else call.state
    window = torch.cat((before.to(dtype), call.x.to(dtype)), dim=1)
    taps = call.weight.to(dtype).unbind(1)
    y = window[:, :length] * taps[0]
    for i, tap in enumerate(taps[1:], 1):
        y = y + window[:, i : i + length] * tap
    if call.bias is not None:
        y = y + call.bias.to(dtype)
    result.copy_(torch.nn.functional.silu(y) if call.activation == "silu" else y)
    rows = torch.arange(kept, device=window.device)[None] + _valid(call)[:, None]
    return result, state.copy_(window.gather(1, rows[..., None].expand(state.shape)))


def _valid(call: ShortConv) -> torch.Tensor:
    batch, length, _ = call.x.shape
    if call.actual_seq_lengths is None:
        return torch.full((batch,), length, device=call.x.device)
    return call.actual_seq_lengths.to(call.x.device, torch.int64).clamp(0, length)


OPERATOR = register_operator(
    SCHEMA,
    fake=short_conv_fake,
    reference=short_conv_reference,
    providers=(short_conv_provider(),),
)
