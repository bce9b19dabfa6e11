"""Random short convolutions (K3.1 spec 2.6 and 3.7), and random near misses with exactly one lie, from axes.

`spellings` and `near_misses` are hypothesis strategies; `compose` makes one program of named choices.
"""

import torch
import torch.nn.functional as F
from drawing import record, settled, strategies
from operands import CHANNELS, TAPS

# The window [B, T + W - 1, C] and the tap rows [C, W] give the sums [B, T, C].


def by_conv1d(window, weight):
    """A convolution with a group for each channel."""
    return F.conv1d(window.mT, weight.unsqueeze(1), groups=window.shape[-1]).mT


def by_conv2d(window, weight):
    """The same on a picture one column wide."""
    picture = window.mT.unsqueeze(-1)
    return F.conv2d(picture, weight[:, None, :, None], groups=weight.shape[0]).squeeze(-1).mT


def by_slices(window, weight):
    """One slice for each tap, added up."""
    length = window.shape[1] - weight.shape[1] + 1
    y = window[:, :length] * weight[:, 0]
    for tap in range(1, weight.shape[1]):
        y = y + window[:, tap : tap + length] * weight[:, tap]
    return y


def by_narrow(window, weight):
    """The same from Python's sum, the newest tap first."""
    length = window.shape[1] - weight.shape[1] + 1
    taps = reversed(list(enumerate(weight.unbind(-1))))
    return sum(window.narrow(1, place, length) * tap for place, tap in taps)


def by_unfold(window, weight):
    """A weighted sum over windows."""
    return (window.unfold(1, weight.shape[1], 1) * weight).sum(-1)


def by_einsum(window, weight):
    """The same as a product."""
    return torch.einsum("btcw,cw->btc", window.unfold(1, weight.shape[1], 1), weight)


def by_index(window, weight):
    """Windows gathered by places."""
    length = window.shape[1] - weight.shape[1] + 1
    places = torch.arange(length)[:, None] + torch.arange(weight.shape[1])
    return (window[:, places].mT * weight).sum(-1)


def by_stack(window, weight):
    """Slices stacked on a last axis, then a product with a column."""
    length = window.shape[1] - weight.shape[1] + 1
    stacked = torch.stack([window[:, i : i + length] for i in range(weight.shape[1])], dim=-1)
    return (stacked.unsqueeze(-2) @ weight.unsqueeze(-1)).flatten(2)


SUMS = {
    "conv1d": by_conv1d,
    "conv2d": by_conv2d,
    "slices": by_slices,
    "narrow": by_narrow,
    "unfold": by_unfold,
    "einsum": by_einsum,
    "index": by_index,
    "stack": by_stack,
}

ACTIVATIONS = {
    "silu": F.silu,
    "module": torch.nn.SiLU(),
    "product": lambda y: y * torch.sigmoid(y),
    "quotient": lambda y: y / (1 + torch.exp(-y)),
    "none": lambda y: y,
}

# How the new state [B, W - 1, C] is cut from the window.
STATES = {
    "from the end": lambda window, length: window[:, 1 - TAPS :],
    "from the length": lambda window, length: window[:, length:],
    "narrow": lambda window, length: window.narrow(1, length, TAPS - 1),
    "copied": lambda window, length: window[:, -(TAPS - 1) :].clone(),
    "not returned": lambda window, length: None,
}

AXES = {
    "layout": ("btc", "bct"),
    "start": ("state", "full state", "zeros", "padded", "padded in the convolution"),
    "sum": tuple(SUMS),
    "activation": tuple(ACTIVATIONS),
    "state": tuple(STATES),
    "length": (11, 5, 1),
}

# Each lie, from which other operands the operator could serve it all the same, and what it gets right anyway.
RIGHT = ("conv_state",)
LIES = {
    "taps reversed": ("the weight flipped", RIGHT),
    "taps moved by one": ("the weight rolled", RIGHT),
    "oldest tap left out": ("a weight with zeros", RIGHT),
    "one token late": ("x and the state one token later", RIGHT),
    "silu on each product": ("", RIGHT),
    "silu on the inputs": ('activation "none" on silu of the window', RIGHT),
    "silu twice": ("silu behind it", RIGHT),
    "gelu": ('activation "none", gelu behind it', RIGHT),
    "steeper sigmoid": ('activation "none", the rest behind it', RIGHT),
    "largest product": ("", RIGHT),
    "channels mixed": ("x plus its neighbours", RIGHT),
    "weight of the next channel": ("the weight rolled", RIGHT),
    "taps of the token": ("", RIGHT),
    "squared inputs": ("the window squared", RIGHT),
    "residual beside": ("the result plus x", RIGHT),
    "state without the newest": ("y as it is, another slice", ("y",)),
    "outputs for the state": ("y as it is, another state", ("y",)),
}

IN_STATE = {"state": {"not returned": "from the end"}}
SEVERAL = {"length": {1: 5}}
ACTIVE = {"activation": {"none": "silu"}}
OF_WINDOW = {"start": {"padded in the convolution": "padded"}}
# Which choices a lie cannot be told under, and what it is told under then.
NEEDS = {
    "oldest tap left out": OF_WINDOW | SEVERAL,
    "one token late": OF_WINDOW | SEVERAL,
    "silu on each product": OF_WINDOW | ACTIVE | SEVERAL,
    "silu on the inputs": OF_WINDOW | ACTIVE,
    "largest product": OF_WINDOW,
    "channels mixed": OF_WINDOW,
    "taps of the token": OF_WINDOW,
    "squared inputs": OF_WINDOW,
    "state without the newest": IN_STATE | SEVERAL,
    "outputs for the state": IN_STATE | SEVERAL,
}


class Conv:
    """The sums over a window by the choices made, with at most one lie."""

    def __init__(self, choice, lie):
        self.choice, self.lie = choice, lie

    def window(self, x, states):
        """[B, W - 1 + T, C]: the inputs before x and x."""
        if states:
            state = states[0].mT if self.choice["layout"] == "bct" else states[0]
            return torch.cat([state[:, 1 - TAPS :], x], dim=1)
        if self.choice["start"] == "zeros":
            return torch.cat([x.new_zeros(x.shape[0], TAPS - 1, x.shape[2]), x], dim=1)
        return F.pad(x, (0, 0, TAPS - 1, 0))

    def weight(self, weight):
        """The taps [C, W]."""
        if self.lie == "taps reversed":
            return weight.flip(-1)
        if self.lie == "taps moved by one":
            return weight.roll(1, -1)
        return weight.roll(1, 0) if self.lie == "weight of the next channel" else weight

    def sums(self, x, window, weight):
        """One sum over W inputs a channel and a token."""
        length = x.shape[1]
        products = [window[:, i : i + length] * weight[:, i] for i in range(TAPS)]
        if self.lie == "silu on each product":
            return sum(F.silu(product) for product in products)
        if self.lie == "largest product":
            return torch.stack(products).amax(0)
        if self.lie == "taps of the token":
            return sum(window[:, i : i + length] * torch.tanh(weight[:, i] + x) for i in range(TAPS))
        if self.lie == "oldest tap left out":
            window, weight = window[:, 1:], weight[:, 1:]
        if self.lie == "one token late":
            window = F.pad(window, (0, 0, 1, 0))[:, :-1]
        if self.lie == "silu on the inputs":
            window = F.silu(window)
        if self.lie == "channels mixed":
            window = window + window.roll(1, -1)
        if self.lie == "squared inputs":
            window = window.square()
        return SUMS[self.choice["sum"]](window, weight)

    def padded_sums(self, x, weight):
        """The same from a convolution that pads both ends and is cut."""
        padded = F.conv1d(x.mT, weight[:, None, :], bias=None, padding=TAPS - 1, groups=CHANNELS)
        return padded[..., : x.shape[1]].mT

    def activated(self, y):
        """What the sums become."""
        others = {
            "silu on each product": lambda y: y,
            "silu on the inputs": lambda y: y,
            "silu twice": lambda y: F.silu(F.silu(y)),
            "gelu": F.gelu,
            "steeper sigmoid": lambda y: y * torch.sigmoid(1.702 * y),
        }
        return others.get(self.lie, ACTIVATIONS[self.choice["activation"]])(y)

    def __call__(self, x, weight, states):
        """Outputs [B, T, C] and the new state or None."""
        window, weight = self.window(x, states), self.weight(weight)
        is_padded = self.choice["start"] == "padded in the convolution"
        y = self.activated(self.padded_sums(x, weight) if is_padded else self.sums(x, window, weight))
        if self.lie == "residual beside":
            y = y + x
        if self.lie == "state without the newest":
            return y, window[:, -TAPS:-1]
        if self.lie == "outputs for the state":
            return y, torch.cat([window[:, : TAPS - 1], y], dim=1)[:, x.shape[1] :]
        return y, STATES[self.choice["state"]](window, x.shape[1])


def compose(choice, lie=None):
    """The program of these choices: a `Spelling`, or a `NearMiss` where `lie` names one of `LIES`."""
    choice = settled(choice, NEEDS.get(lie, {}))
    conv, is_turned = Conv(choice, lie), choice["layout"] == "bct"

    def drawn(x, weight, *states):
        y, state = conv(x.mT if is_turned else x, weight, states)
        y = y.mT if is_turned else y
        if state is None:
            return y
        return y, state.mT if is_turned else state

    return record(drawn, "short_conv", choice, facts_of(choice), lie, LIES)


def facts_of(choice):
    """How to call the drawn function and how to judge it."""
    layout = "_bct" if choice["layout"] == "bct" else ""
    state = {"state": (f"conv_state{layout}",), "full state": (f"conv_full{layout}",)}.get(choice["start"], ())
    results = (f"y{layout}",) if choice["state"] == "not returned" else (f"y{layout}", f"conv_state{layout}")
    return {
        "arguments": (f"x{layout}", "conv_weight", *state),
        "results": results,
        "options": {"silu": choice["activation"] != "none", "start": bool(state)},
    }


spellings, near_misses = strategies(compose, AXES, LIES)
