"""The short convolution: other spellings of it, and its window across calls."""

import pytest
import torch

from k31compile.model.short_conv import ShortConv, last_inputs, short_conv

B, C, W = 2, 6, 4


def made(length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    window = torch.randn(B, W - 1 + length, C, generator=generator, dtype=torch.float64)
    return window, torch.randn(C, 1, W, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("length", [1, 2, 3, 5, 19])
def test_equals_conv1d_and_unfold(length):
    window, weight = made(length)
    y = short_conv(window, weight)
    conv = torch.nn.functional.conv1d(window.mT, weight, groups=C).mT
    unfolded = (window.unfold(1, W, 1) * weight.squeeze(1)).sum(-1)
    assert y.shape == (B, length, C)
    for other in (conv, unfolded):
        torch.testing.assert_close(y, other * torch.sigmoid(other), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("pieces", [[1] * 9, [2, 1, 3, 3], [1, 8], [7, 2]])
def test_any_split_gives_the_same(pieces):
    window, weight = made(9)
    conv = ShortConv(C, W).double()
    conv.weight.copy_(weight)
    x, state = window[:, W - 1 :], window[:, : W - 1]
    whole, last = conv(x, state, None)
    parts, start = [], 0
    for size in pieces:
        y, state = conv(x[:, start : start + size], state, None)
        parts.append(y)
        start += size
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-14, atol=1e-15)
    assert torch.equal(state, last)


def test_state_is_the_last_valid_inputs_whatever_the_padding_holds():
    window, weight = made(5)
    conv = ShortConv(C, W).double()
    conv.weight.copy_(weight)
    lengths = torch.tensor([0, 2])
    x = window[:, W - 1 :].clone()
    x[0], x[1, 2:] = torch.nan, torch.nan
    y, state = conv(x, window[:, : W - 1], lengths)
    assert torch.equal(state[0], window[0, : W - 1])
    assert torch.equal(state[1], window[1, 2:5])
    torch.testing.assert_close(y[1, :2], short_conv(window, weight)[1, :2], rtol=1e-14, atol=1e-15)


def test_full_lengths_equal_no_lengths():
    window, _ = made(5)
    assert torch.equal(last_inputs(window, W - 1, torch.tensor([5, 5])), last_inputs(window, W - 1, None))


def test_bfloat16_is_accumulated_in_float32():
    window, weight = made(64)
    y = short_conv(window.bfloat16(), weight.float())
    exact = short_conv(window.bfloat16().double(), weight.float().double())
    assert y.dtype == torch.bfloat16
    # A result near the middle of two bfloat16 values may fall either way; a bfloat16 sum would do so often.
    assert (y == exact.bfloat16()).double().mean() > 0.98
    torch.testing.assert_close(y.double(), exact, rtol=2**-8, atol=0)
