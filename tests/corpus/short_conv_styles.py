"""The short causal convolution as different authors would write it (K3.1 spec 2.6 and 3.7)."""

import torch
import torch.nn.functional as F
from records import speller

spelling = speller(
    "short_conv", arguments="x conv_weight conv_state", results="y conv_state", phase="prefill", lengths=(1, 5, 11)
)


@spelling(arguments="x_bct conv_weight conv_state_bct", results="y_bct conv_state_bct")
def grouped_conv1d_after_cat(x, weight, state):
    """F.conv1d with a group for each channel on cat(state, x), everything [B, C, T]."""
    window = torch.cat([state, x], dim=-1)
    y = F.conv1d(window, weight.unsqueeze(1), groups=x.shape[1])
    return F.silu(y), window[..., -state.shape[-1] :]


@spelling(arguments="x conv_weight", results="y", options={"start": False}, half=True)
def padded_both_sides_then_cut(x, weight):
    """conv1d that pads W - 1 on both sides and drops the right end; [B, T, C] turned there and back."""
    t, taps = x.shape[1], weight.shape[-1]
    turned = x.transpose(1, 2).to(weight.dtype)
    y = F.conv1d(turned, weight[:, None, :], bias=None, padding=taps - 1, groups=turned.shape[1])[..., :t]
    return F.silu(y).to(x.dtype).transpose(1, 2)


@spelling(arguments="x conv_weight", results="y conv_state", options={"start": False}, lengths=(5, 11))
def zeros_in_front(x, weight):
    """F.pad in front, unfold and a weighted sum over the windows; the new state by a negative slice."""
    window = F.pad(x, (0, 0, weight.shape[1] - 1, 0))
    y = (window.unfold(1, weight.shape[1], 1) * weight).sum(-1)
    return y * torch.sigmoid(y), window[:, 1 - weight.shape[1] :]


@spelling(half=True)
def four_shifted_slices(x, weight, state):
    """One slice of the window for each tap, added up in float32."""
    window, length = torch.cat((state, x), 1).float(), x.shape[1]
    y = window[:, :length] * weight[:, 0]
    for tap in range(1, weight.shape[1]):
        y = y + window[:, tap : tap + length] * weight[:, tap]
    return F.silu(y).to(x.dtype), window[:, length:].to(state.dtype)


@spelling(arguments="x conv_weight conv_full_bct", results="y", updates={"conv_full_bct": "conv_full_bct"})
def rolled_window_by_token(x, weight, cache):
    """A cache of W inputs rolled by one and overwritten at its end, token by token, in place."""
    out = []
    for t in range(x.shape[1]):
        cache.copy_(torch.roll(cache, -1, dims=-1))
        cache[:, :, -1] = x[:, t]
        out.append(F.silu((cache * weight).sum(-1)))
    return torch.stack(out, dim=1)


@spelling(arguments="x_one conv_weight conv_full_bct", results="y_one conv_full_bct", phase="decode", lengths=(1,))
def one_token_by_einsum(x, weight, cache):
    """A decode step: the window is the cache without its oldest input and x; einsum over the taps."""
    window = torch.cat([cache[..., 1:], x.unsqueeze(-1)], dim=-1)
    return torch.nn.SiLU()(torch.einsum("bcw,cw->bc", window, weight)), window


@spelling(arguments="x_bct conv_weight conv_state_bct", results="y_bct", updates={"conv_state_bct": "conv_state_bct"})
def state_overwritten_before(x, weight, state):
    """The state is overwritten before the convolution, which reads the cat and keeps its last T columns."""
    both = torch.cat([state, x], dim=-1).to(weight.dtype)
    state.copy_(both[:, :, -state.shape[-1] :])
    y = F.conv1d(both, weight.unsqueeze(1), None, padding=0, groups=x.shape[1])
    return F.silu(y[:, :, -x.shape[-1] :])


@spelling(results="y conv_state", options={"silu": False})
def no_activation(x, weight, state):
    """Only the sum, without SiLU; matmul over windows that were gathered by index."""
    window = torch.cat([state, x], dim=1)
    places = torch.arange(x.shape[1])[:, None] + torch.arange(weight.shape[1])
    y = (window[:, places].permute(0, 1, 3, 2).unsqueeze(-2) @ weight.unsqueeze(-1)).flatten(2)
    return y, window[:, x.shape[1] :]


@spelling(arguments="x conv_weight", results="y", options={"start": False}, lengths=(5, 11))
def two_dimensional(x, weight):
    """conv2d over a [T, 1] picture, as ported image code has it."""
    picture = F.pad(x.mT.unsqueeze(-1), (0, 0, weight.shape[1] - 1, 0))
    return F.silu(F.conv2d(picture, weight[:, None, :, None], groups=weight.shape[0]).squeeze(-1).mT)


@spelling(arguments="x conv_weight", results="y", options={"start": False}, lengths=(11,))
def rolled_and_masked(x, weight):
    """The whole sequence rolled by each lag, what came around the end set to 0; the newest tap first."""
    y, place = torch.zeros_like(x), torch.arange(x.shape[1])[:, None]
    for lag, tap in enumerate(weight.flip(-1).unbind(-1)):
        y = y + x.roll(lag, 1).masked_fill(place < lag, 0.0) * tap
    return y.div(1 + torch.exp(-y))
