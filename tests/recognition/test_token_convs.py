"""The short convolution written token by token, its window moved on by hand: fused as one, its bugs left alone."""

import pytest
import torch
import torch.nn.functional as F
from running import relative_error, run

B, C, W = 2, 12, 4
OPERATOR = "short_conv"


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def joined(x, weight, state):
    out = []
    for t in range(x.shape[1]):
        window = torch.cat([state, x[:, t, :, None]], -1)
        out.append(F.silu((window * weight).sum(-1)))
        state = window[..., 1:]
    return torch.stack(out, 1), state


def activated_at_the_end(x, weight, state):
    out = []
    for t in range(x.shape[1]):
        state = torch.cat([state[..., 1 - W :], x[:, t].unsqueeze(-1)], -1)
        out.append(torch.einsum("bcw,cw->bc", state, weight))
    return F.silu(torch.stack(out, 1)), state[..., 1:]


def joined_along_the_tokens(x, weight, state):
    out = []
    for token in x.split(1, 1):
        state = torch.cat([state, token.transpose(1, 2)], -1)[..., -W:]
        out.append(torch.einsum("bcw,cw->bc", state, weight).unsqueeze(1))
    y = torch.cat(out, 1)
    return y * y.sigmoid(), state[..., 1:]


def from_zeros(x, weight, state):
    window, out = torch.zeros(B, C, W), []
    for t in range(x.shape[1]):
        window = torch.cat([window[..., 1:], x[:, t].unsqueeze(-1)], -1)
        out.append((window * weight).sum(-1))
    return F.silu(torch.stack(out, 1)), state


def cut_from_a_padded_row(x, weight, state):
    padded = F.pad(x, (0, 0, W - 1, 0))
    rows = [torch.einsum("bwc,cw->bc", padded[:, t : t + W], weight) for t in range(x.shape[1])]
    return F.silu(torch.stack(rows, 1)), state


def rolled_with_a_bias(x, weight, state):
    window, bias, out = F.pad(state, (1, 0)), weight.sum(-1), []
    for t in range(x.shape[1]):
        window = torch.roll(window, -1, -1)
        window[..., -1] = x[:, t]
        out.append(F.silu((window * weight).sum(-1) + bias))
    return torch.stack(out, 1), window[..., 1:]


FUSED = [joined, activated_at_the_end, joined_along_the_tokens, from_zeros, cut_from_a_padded_row, rolled_with_a_bias]


def measure(program, length, dtype=torch.float32):
    made = [random(B, length, C), random(C, W, seed=1), random(B, C, W - 1, seed=2)]
    ran = run(program, *(x.to(dtype) for x in made), stable=False)
    for got, want in zip(ran.got, ran.want, strict=True):
        assert got.dtype == want.dtype
        assert relative_error(got, want) < (1e-5 if dtype == torch.float32 else 2e-2)
    return ran


@pytest.mark.parametrize("program", FUSED)
@pytest.mark.parametrize("length", [2, 3, 9])
def test_a_loop_over_tokens(program, length):
    ran = measure(program, length)
    assert ran.fused == {OPERATOR: 1}, ran.reasons


def test_one_token_is_one_convolution_too():
    assert measure(joined, 1).fused == {OPERATOR: 1}


def test_a_loop_in_bfloat16():
    measure(joined, 5, torch.bfloat16)


def lied_order(x, weight, state):
    """The results of the tokens are put side by side in another order."""
    out = joined(x, weight, state)[0].unbind(1)
    return torch.stack([out[1], out[0], *out[2:]], 1), state


def lied_order_inside(x, weight, state):
    out = []
    for t in (1, 0, 2, 3):
        state = torch.cat([state[..., 1 - W :], x[:, t].unsqueeze(-1)], -1)
        out.append(F.silu((state * weight).sum(-1)))
    return torch.stack(out, 1), state


def lied_token(x, weight, state):
    """The third token does not enter the window."""
    out = []
    for t in range(x.shape[1]):
        window = torch.cat([state, x[:, t].unsqueeze(-1)], -1)
        out.append(F.silu((window * weight).sum(-1)))
        state = state if t == 2 else window[..., 1:]
    return torch.stack(out, 1), state


def lied_taps(x, weight, state):
    """One token meets the taps turned round."""
    out = []
    for t in range(x.shape[1]):
        window = torch.cat([state, x[:, t].unsqueeze(-1)], -1)
        out.append(F.silu((window * (weight.flip(-1) if t == 1 else weight)).sum(-1)))
        state = window[..., 1:]
    return torch.stack(out, 1), state


def lied_activation(x, weight, state):
    """One token passes no activation."""
    out = []
    for t in range(x.shape[1]):
        window = torch.cat([state, x[:, t].unsqueeze(-1)], -1)
        total = (window * weight).sum(-1)
        out.append(total if t == 1 else F.silu(total))
        state = window[..., 1:]
    return torch.stack(out, 1), state


def lied_roll(x, weight, state):
    """The window is rolled the other way."""
    window, out = F.pad(state, (1, 0)), []
    for t in range(x.shape[1]):
        window = torch.roll(window, 1, -1)
        window[..., -1] = x[:, t]
        out.append(F.silu((window * weight).sum(-1)))
    return torch.stack(out, 1), window


def lied_feedback(x, weight, state):
    """What comes out enters the window."""
    out = []
    for t in range(x.shape[1]):
        window = torch.cat([state, x[:, t].unsqueeze(-1)], -1)
        out.append(F.silu((window * weight).sum(-1)))
        state = torch.cat([window[..., 1:-1], out[-1].unsqueeze(-1)], -1)
    return torch.stack(out, 1), state


def lied_batch(x, weight, state):
    """The second token is the other request's."""
    mixed = torch.cat([x[:, :1], x[:, 1:2].flip(0), x[:, 2:]], 1)
    out = joined(mixed, weight, state)[0]
    return torch.cat([out[:, :1], out[:, 1:].flip(0)], 1), state


LIES = [lied_order_inside, lied_token, lied_taps, lied_activation, lied_roll, lied_feedback]


@pytest.mark.parametrize("program", [*LIES, lied_order, lied_batch])
def test_a_lie_keeps_its_numbers(program):
    """A part may be served token by token; never the whole as what it is not."""
    measure(program, 4)
