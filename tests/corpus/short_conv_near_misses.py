"""Almost the short convolution: other windows, other places for SiLU, other states."""

import torch
import torch.nn.functional as F
from operands import TAPS
from records import misser

near_miss = misser(
    "short_conv",
    right="conv_state",
    arguments="x conv_weight conv_state",
    results="y conv_state",
    phase="prefill",
    lengths=(5, 11),
)


def window_of(x, state):
    return torch.cat([state, x], dim=1)


def taps_of(window, weight, length, places=range(TAPS)):
    """sum_i weight[:, i] window[t + places[i]]."""
    return sum(window[:, place : place + length] * weight[:, i] for i, place in enumerate(places))


@near_miss(served_by="the weight flipped")
def taps_reversed(x, weight, state):
    """The first tap meets the newest input; the operator's last tap does."""
    window = window_of(x, state)
    return F.silu(taps_of(window, weight.flip(-1), x.shape[1])), window[:, x.shape[1] :]


@near_miss(
    arguments="x conv_weight",
    results="y",
    options={"start": False},
    right="",
    served_by="a row of zeros behind x, y from its second row",
)
def centred_window(x, weight):
    """The padding is shared between both ends, so a row sees later tokens; the operator pads in front only."""
    window = F.pad(x, (0, 0, 2, 1))
    return F.silu(taps_of(window, weight, x.shape[1]))


@near_miss(served_by="x and the state one token later")
def one_token_late(x, weight, state):
    """The window ends at the token before; the operator's ends at the token itself."""
    before = torch.cat([torch.zeros_like(state[:, :1]), state, x[:, :-1]], dim=1)
    return F.silu(taps_of(before, weight, x.shape[1])), window_of(x, state)[:, x.shape[1] :]


@near_miss()
def silu_on_each_tap(x, weight, state):
    """Each product passes SiLU before the sum; the operator sums first."""
    window, length = window_of(x, state), x.shape[1]
    y = sum(F.silu(window[:, i : i + length] * weight[:, i]) for i in range(TAPS))
    return y, window[:, length:]


@near_miss(served_by='activation "none" on silu of the window')
def silu_on_the_input(x, weight, state):
    """SiLU on the inputs and none on the sum; the operator activates the sum."""
    window = window_of(x, state)
    return taps_of(F.silu(window), weight, x.shape[1]), window[:, x.shape[1] :]


@near_miss(served_by='activation "none", gelu after it')
def gelu_for_silu(x, weight, state):
    """GELU on the sum; the operator's activation is SiLU."""
    window = window_of(x, state)
    return F.gelu(taps_of(window, weight, x.shape[1])), window[:, x.shape[1] :]


@near_miss(served_by="y as it is, the state its own input", right="y")
def state_not_advanced(x, weight, state):
    """The state is returned as it came; the operator moves it on by T inputs."""
    return F.silu(taps_of(window_of(x, state), weight, x.shape[1])), state


@near_miss(right="y")
def state_without_the_newest(x, weight, state):
    """The state ends one input early; the operator's holds the newest input."""
    window = window_of(x, state)
    return F.silu(taps_of(window, weight, x.shape[1])), window[:, -TAPS:-1]


@near_miss(right="y")
def outputs_for_state(x, weight, state):
    """The state keeps what came out of the convolution; the operator keeps what went in."""
    y = F.silu(taps_of(window_of(x, state), weight, x.shape[1]))
    return y, torch.cat([state, y], dim=1)[:, x.shape[1] :]


@near_miss(served_by="x plus its neighbours")
def channels_mixed(x, weight, state):
    """Each channel also takes its neighbour's inputs; the operator's channels do not meet."""
    window = window_of(x, state)
    return F.silu(taps_of(window + window.roll(1, -1), weight, x.shape[1])), window[:, x.shape[1] :]


@near_miss(
    arguments="x conv_weight",
    results="y",
    options={"start": False},
    served_by="a weight of 7 taps with zeros",
    right="",
)
def every_other_input(x, weight):
    """A dilation of 2; the operator takes neighbours."""
    window = F.pad(x, (0, 0, 2 * (TAPS - 1), 0))
    return F.silu(taps_of(window, weight, x.shape[1], range(0, 2 * TAPS, 2)))


@near_miss(served_by="one call a token, the outputs as its state")
def recurrent_output(x, weight, state):
    """The window is fed with the outputs so far; the operator is fed with inputs only."""
    past, out = list(state.unbind(1)), []
    for row in x.unbind(1):
        window = torch.stack([*past[1 - TAPS :], row], dim=-1)
        out.append(F.silu((window * weight).sum(-1)))
        past.append(out[-1])
    return torch.stack(out, 1), window_of(x, state)[:, x.shape[1] :]


@near_miss()
def largest_tap(x, weight, state):
    """The largest of a window's products goes on; the operator adds them up."""
    window, length = window_of(x, state), x.shape[1]
    products = torch.stack([window[:, i : i + length] * weight[:, i] for i in range(TAPS)])
    return F.silu(products.amax(0)), window[:, length:]


@near_miss()
def taps_of_the_token(x, weight, state):
    """Each token bends the taps by its own gate; the operator's taps are the same for all tokens."""
    window, length = window_of(x, state), x.shape[1]
    y = sum(window[:, i : i + length] * torch.tanh(weight[:, i] + x) for i in range(TAPS))
    return F.silu(y), window[:, length:]


@near_miss()
def window_brought_to_length_one(x, weight, state):
    """The window of a channel is divided by its norm; the operator takes it as it is."""
    window = window_of(x, state)
    y = (F.normalize(window.unfold(1, TAPS, 1), dim=-1) * weight).sum(-1)
    return F.silu(y), window[:, x.shape[1] :]
