"""Short causal convolution over time, per channel, with a window of past inputs (K3.1 spec 2.6)."""

import torch
from torch import Tensor, nn

from k31compile.model.norms import accumulate_dtype


def short_conv(window: Tensor, weight: Tensor) -> Tensor:
    """y[t, c] = SiLU(sum_i weight[c, i] * window[t + i, c]).

    window [B, W-1+T, C]: the W-1 inputs before the first token, then T inputs; weight [C, 1, W].
    Returns [B, T, C] in the dtype of the window; the sum is taken in the accumulation dtype.
    """
    dtype = accumulate_dtype(window.dtype)
    taps = weight.to(dtype).squeeze(1).unbind(-1)
    length = window.shape[1] - len(taps) + 1
    x = window.to(dtype)
    y = sum((x[:, i : i + length] * tap for i, tap in enumerate(taps[1:], 1)), start=x[:, :length] * taps[0])
    return nn.functional.silu(y).to(window.dtype)


def last_inputs(window: Tensor, size: int, lengths: Tensor | None) -> Tensor:
    """The `size` inputs that the next call must see: those up to the last valid one.

    window [B, size+T, C]; lengths int [B], the valid tokens among the T, or None when all are.
    Returns [B, size, C]; with lengths[b] = 0 that is the old state itself.
    """
    if lengths is None:
        return window[:, window.shape[1] - size :]
    rows = lengths[:, None] + torch.arange(size, device=window.device)
    return window.gather(1, rows[..., None].expand(-1, -1, window.shape[2]))


class ShortConv(nn.Module):
    """Depthwise causal convolution with SiLU, no bias; the state is the last W-1 inputs (K3.1 spec 2.6)."""

    float32_parameters = ("weight",)

    def __init__(self, channels: int, kernel_size: int) -> None:
        """Weight [channels, 1, kernel_size], kept in float32."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel_size))

    def forward(self, x: Tensor, state: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        """x [B, T, C], state [B, W-1, C] -> (y [B, T, C], new state); padding never enters the state."""
        window = torch.cat([state.to(x.dtype), x], dim=1)
        return short_conv(window, self.weight), last_inputs(window, state.shape[1], lengths)
