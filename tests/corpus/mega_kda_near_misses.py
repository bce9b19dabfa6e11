"""Almost the core of a KDA layer: the delta rule itself is right, what stands around it is not.

The parts that are right may well become operators of their own; the core as a whole may not.
"""

import torch
import torch.nn.functional as F
from mega_kda_styles import STREAMS, unit
from operands import EPS, LOWER_BOUND, H, K, V
from records import misser

near_miss = misser(
    "mega_kda", right="conv_state", arguments=STREAMS, results="y state conv_state", phase="unrolled", lengths=(1, 5)
)


def convolved(qkv, taps, conv_state, activation=F.silu):
    """The honest convolution: q, k, v in heads and the next window."""
    window = torch.cat([conv_state, qkv], dim=1)
    y = activation((window.unfold(1, taps.shape[1], 1) * taps).sum(-1))
    q, k, v = y.split([H * K, H * K, H * V], dim=-1)
    return q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (H, V)), window[:, qkv.shape[1] :]


def bounded(raw_g, a_log, dt_bias):
    return LOWER_BOUND * torch.sigmoid(a_log.exp()[:, None] * (raw_g + dt_bias))


def delta_rule(q, k, v, g, beta, s):
    """The honest recurrence."""
    out = []
    for t in range(q.shape[1]):
        s = s * g[:, t].exp().unsqueeze(-1)
        u = beta[:, t].unsqueeze(-1) * (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], s))
        s = s + k[:, t].unsqueeze(-1) * u.unsqueeze(-2)
        out.append(torch.einsum("bhk,bhkv->bhv", q[:, t], s))
    return torch.stack(out, dim=1) * K**-0.5, s


def normed(o, weight):
    return o * torch.rsqrt(o.square().mean(-1, keepdim=True) + EPS) * weight


@near_miss(options={"gate": "softplus"})
def exp_for_softplus(qkv, taps, conv_state, raw_g, a_log, dt_bias, raw_beta, s, out_gate, weight):
    """The gate is -rate exp(raw); the operator's is -rate softplus(raw)."""
    q, k, v, window = convolved(qkv, taps, conv_state)
    g = -a_log.exp()[:, None] * torch.exp(raw_g + dt_bias)
    o, s = delta_rule(unit(q), unit(k), v, g, raw_beta.sigmoid(), s)
    return normed(o, weight) * out_gate.sigmoid(), s, window


@near_miss(options={"gate": "softplus"}, served_by="the raw gate already shifted and scaled, a_log = dt_bias = 0")
def rate_inside_softplus(qkv, taps, conv_state, raw_g, a_log, dt_bias, raw_beta, s, out_gate, weight):
    """The rate scales the argument of softplus; the operator scales its result."""
    q, k, v, window = convolved(qkv, taps, conv_state)
    g = -F.softplus(a_log.exp()[:, None] * (raw_g + dt_bias))
    o, s = delta_rule(unit(q), unit(k), v, g, raw_beta.sigmoid(), s)
    return normed(o, weight) * out_gate.sigmoid(), s, window


@near_miss(served_by="dt_bias / exp(a_log)")
def bias_outside_the_rate(qkv, taps, conv_state, raw_g, a_log, dt_bias, raw_beta, s, out_gate, weight):
    """dt_bias is added after the rate; the operator adds it before."""
    q, k, v, window = convolved(qkv, taps, conv_state)
    g = LOWER_BOUND * torch.sigmoid(a_log.exp()[:, None] * raw_g + dt_bias)
    o, s = delta_rule(unit(q), unit(k), v, g, raw_beta.sigmoid(), s)
    return normed(o, weight) * out_gate.sigmoid(), s, window


@near_miss(served_by="-raw_g and -dt_bias")
def gate_sign_turned(qkv, taps, conv_state, raw_g, a_log, dt_bias, raw_beta, s, out_gate, weight):
    """A large raw gate keeps the state; the operator's forgets it."""
    q, k, v, window = convolved(qkv, taps, conv_state)
    g = bounded(-raw_g, a_log, -dt_bias)
    o, s = delta_rule(unit(q), unit(k), v, g, raw_beta.sigmoid(), s)
    return normed(o, weight) * out_gate.sigmoid(), s, window


@near_miss()
def keys_not_normalised(qkv, taps, conv_state, raw_g, a_log, dt_bias, raw_beta, s, out_gate, weight):
    """Only the query is brought to unit length; the operator does both."""
    q, k, v, window = convolved(qkv, taps, conv_state)
    o, s = delta_rule(unit(q), k * 0.5, v, bounded(raw_g, a_log, dt_bias), raw_beta.sigmoid(), s)
    return normed(o, weight) * out_gate.sigmoid(), s, window


@near_miss()
def no_silu_after_the_window(qkv, taps, conv_state, raw_g, a_log, dt_bias, raw_beta, s, out_gate, weight):
    """The convolution is not activated; the operator's passes SiLU."""
    q, k, v, window = convolved(qkv, taps, conv_state, activation=torch.nn.Identity())
    o, s = delta_rule(unit(q), unit(k), v, bounded(raw_g, a_log, dt_bias), raw_beta.sigmoid(), s)
    return normed(o, weight) * out_gate.sigmoid(), s, window


@near_miss(right="state conv_state")
def output_gate_before_the_norm(qkv, taps, conv_state, raw_g, a_log, dt_bias, raw_beta, s, out_gate, weight):
    """The output gate goes in before the norm; the operator gates what is normed."""
    q, k, v, window = convolved(qkv, taps, conv_state)
    o, s = delta_rule(unit(q), unit(k), v, bounded(raw_g, a_log, dt_bias), raw_beta.sigmoid(), s)
    return normed(o * out_gate.sigmoid(), weight), s, window


@near_miss()
def beta_by_tanh(qkv, taps, conv_state, raw_g, a_log, dt_bias, raw_beta, s, out_gate, weight):
    """Beta is a tanh; the operator's is a sigmoid."""
    q, k, v, window = convolved(qkv, taps, conv_state)
    o, s = delta_rule(unit(q), unit(k), v, bounded(raw_g, a_log, dt_bias), raw_beta.tanh(), s)
    return normed(o, weight) * out_gate.sigmoid(), s, window


@near_miss(right="y state")
def window_of_activated_inputs(qkv, taps, conv_state, raw_g, a_log, dt_bias, raw_beta, s, out_gate, weight):
    """The window handed on holds SiLU of the inputs; the operator keeps the inputs themselves."""
    q, k, v, window = convolved(qkv, taps, conv_state)
    o, s = delta_rule(unit(q), unit(k), v, bounded(raw_g, a_log, dt_bias), raw_beta.sigmoid(), s)
    return normed(o, weight) * out_gate.sigmoid(), s, F.silu(window)


@near_miss(right="state conv_state")
def swish_output_gate(qkv, taps, conv_state, raw_g, a_log, dt_bias, raw_beta, s, out_gate, weight):
    """The output gate is SiLU; the operator's is a sigmoid."""
    q, k, v, window = convolved(qkv, taps, conv_state)
    o, s = delta_rule(unit(q), unit(k), v, bounded(raw_g, a_log, dt_bias), raw_beta.sigmoid(), s)
    return normed(o, weight) * F.silu(out_gate), s, window
