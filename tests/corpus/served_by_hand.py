"""Near misses that the operator serves with more than other operands: called several times, or something behind it.

Each function takes the program and its operands and gives the program's results by means of the definition.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from definitions import define, short_conv
from kda_chunk_near_misses import CHUNK
from operands import FACTOR, B, H

BY_HAND = {}


def by_hand(fn):
    BY_HAND[fn.__name__] = fn
    return fn


def told(program, **options):
    """The same program held against another variant of its operator."""
    return replace(program, options=dict(program.options) | options)


@by_hand
def two_steps_a_token(program, made):
    doubled = {name: made[name].repeat_interleave(2, 1) for name in ("q", "k", "v", "beta", "g")}
    doubled["g"][:, 1::2] = 0
    twice = define(program, made | doubled)
    return twice | {"o": twice["o"][:, 1::2]}


@by_hand
def decays_after_the_write(program, made):
    before = made["g"].roll(1, 1)
    before[:, 0] = 0
    late = define(program, made | {"g": before, "q": made["q"] * made["g"].exp()})
    return late | {"state": late["state"] * made["g"][:, -1].exp().unsqueeze(-1)}


@by_hand
def state_is_normalised(program, made):
    state, out = made["s0"], []
    for t in range(made["q"].shape[1]):
        token = {name: made[name][:, t : t + 1] for name in ("q", "k", "v", "beta", "g")}
        state = F.normalize(define(program, made | token | {"s0": state})["state"], dim=-2)
        out.append(torch.einsum("bhkv,bhk->bhv", state, made["q"][:, t]))
    return {"o": torch.stack(out, 1), "state": state}


@by_hand
def chunks_forget(program, made):
    chunks = made["q"].shape[1] // CHUNK
    parts = {name: made[name].unflatten(1, (chunks, CHUNK)).flatten(0, 1) for name in ("q", "k", "v", "beta", "g")}
    alone = made | parts | {"s0": made["s0"].repeat_interleave(chunks, 0)}
    alone |= {"pool": alone["s0"].mT, "rows": torch.arange(B * chunks)}
    each = define(program, alone)
    return {
        "o": each["o"].unflatten(0, (B, chunks)).flatten(1, 2),
        "state": each["state"].unflatten(0, (B, chunks))[:, -1],
    }


@by_hand
def silu_on_the_input(program, made):
    activated = {"x": F.silu(made["x"]), "conv_full": F.silu(made["conv_full"])}
    return define(program, made) | {"y": short_conv(made | activated, silu=False)["y"]}


@by_hand
def gelu_for_silu(program, made):
    return define(program, made) | {"y": F.gelu(short_conv(made, silu=False)["y"])}


@by_hand
def state_not_advanced(program, made):
    return define(program, made) | {"conv_state": made["conv_state"]}


@by_hand
def one_token_late(program, made):
    inputs = torch.cat([torch.zeros_like(made["conv_state"][:, :1]), made["conv_state"], made["x"][:, :-1]], 1)
    split = made["conv_state"].shape[1]
    full = torch.cat([torch.zeros_like(inputs[:, :1]), inputs[:, :split]], 1)
    late = short_conv(made | {"x": inputs[:, split:], "conv_full": full})
    return define(program, made) | {"y": late["y"]}


@by_hand
def centred_window(program, made):
    longer = define(program, made | {"x": F.pad(made["x"], (0, 0, 0, 1))})
    return {"y": longer["y"][:, 1:]}


@by_hand
def channels_mixed(program, made):
    mixed = {name: made[name] + made[name].roll(1, -1) for name in ("x", "conv_full")}
    return define(program, made) | {"y": short_conv(made | mixed)["y"]}


@by_hand
def recurrent_output(program, made):
    full, out = made["conv_full"], []
    for t in range(made["x"].shape[1]):
        y = short_conv(made | {"x": made["x"][:, t : t + 1], "conv_full": full})["y"]
        full = torch.cat([full[:, 1:], y], 1)
        out.append(y)
    return define(program, made) | {"y": torch.cat(out, 1)}


@by_hand
def norm_over_all_heads(program, made):
    flat = {name: made[name].flatten(-2) for name in ("x", "gate")}
    y = define(program, made | flat | {"norm_weight": made["norm_weight"].repeat(H)})["y"]
    return {"y": y.view_as(made["x"])}


@by_hand
def residual_kept_beside(program, made):
    return {"h": define(program, made)["h"] + made["prefix"]}


@by_hand
def softmax_over_chosen_scores(program, made):
    plain = define(told(program, renorm=False, factor=1.0), made)
    return plain | {"weights": plain["weights"].softmax(-1) * FACTOR}


@by_hand
def best_one_kept_whole(program, made):
    plain = define(told(program, renorm=False), made)
    return plain | {"weights": plain["weights"] / plain["weights"].amax(-1, keepdim=True) * FACTOR}


@by_hand
def sigmoid_chosen_by_softmax(program, made):
    experts = define(told(program, norm="softmax"), made)["experts"]
    scores = made["logits"].sigmoid().gather(-1, experts)
    return {"experts": experts, "weights": scores / scores.sum(-1, keepdim=True) * FACTOR}


def pairs_as_tokens(program, made, weigh_input):
    """[N, k, L]: what each pair gives by itself, weighed before or after its expert."""
    rows = made["y"].unsqueeze(1).expand(-1, made["experts"].shape[1], -1)
    if weigh_input:
        rows = rows * made["weights"].unsqueeze(-1)
    experts, weights = made["experts"].reshape(-1, 1), made["weights"].reshape(-1, 1)
    weights = torch.ones_like(weights) if weigh_input else weights
    pairs = {"y": rows.flatten(0, 1), "experts": experts, "weights": weights}
    return define(program, made | pairs)["z"].view_as(rows)


@by_hand
def weight_on_the_input(program, made):
    return {"z": pairs_as_tokens(program, made, weigh_input=True).sum(1)}


@by_hand
def largest_expert_wins(program, made):
    return {"z": pairs_as_tokens(program, made, weigh_input=False).amax(1)}


@by_hand
def bias_of_the_expert(program, made):
    return {"z": define(program, made)["z"] + (made["weights"] * made["experts"]).sum(-1, keepdim=True)}


@by_hand
def token_kept_beside(program, made):
    return {"z": define(program, made)["z"] + made["y"]}
