"""The core of a KDA layer in one piece: conv, unit vectors, gates, delta rule, gated norm (K3.1 spec 2.3 to 2.6).

Where the whole is not taken for one operator, its parts are one short_conv, one kda_recurrent and one gated_rms_norm
each; three convolutions where q, k and v have their own.
"""

import torch
import torch.nn.functional as F
from operands import EPS, LOG2E, LOWER_BOUND, H, K, V
from records import speller

STREAMS = "qkv conv_weight conv_state raw_g a_log dt_bias raw_beta s0 out_gate norm_weight"

spelling = speller("mega_kda", arguments=STREAMS, results="y state conv_state", phase="unrolled", lengths=(1, 5))


def unit(x):
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


@spelling(half=True)
def layer_core(qkv, taps, conv_state, raw_g, a_log, dt_bias, raw_beta, s, out_gate, weight):
    """One packed stream through slices of its window; the delta rule by einsum; everything in float32."""
    dtype, length = qkv.dtype, qkv.shape[1]
    window = torch.cat([conv_state, qkv], dim=1)
    y = sum(window[:, i : i + length].float() * taps[:, i] for i in range(taps.shape[1]))
    q, k, v = F.silu(y).split([H * K, H * K, H * V], dim=-1)
    q, k, v = unit(q.unflatten(-1, (H, K))) * K**-0.5, unit(k.unflatten(-1, (H, K))), v.unflatten(-1, (H, V))
    g = LOWER_BOUND * torch.sigmoid(a_log.exp()[:, None] * (raw_g.float() + dt_bias))
    beta, out = raw_beta.float().sigmoid(), []
    for t in range(length):
        s = s * g[:, t].exp().unsqueeze(-1)
        u = beta[:, t].unsqueeze(-1) * (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], s))
        s = s + k[:, t].unsqueeze(-1) * u.unsqueeze(-2)
        out.append(torch.einsum("bhk,bhkv->bhv", q[:, t], s))
    o = torch.stack(out, dim=1)
    o = o * torch.rsqrt(o.pow(2).mean(-1, keepdim=True) + EPS) * weight * out_gate.float().sigmoid()
    return o.to(dtype), s, window[:, length:]


@spelling(
    arguments="qkv_one conv_weight conv_full_bct raw_g_one a_log dt_bias raw_beta_one s0_vk out_gate_one norm_weight",
    results="y_one",
    updates={"conv_full_bct": "conv_full_bct", "s0_vk": "state_vk"},
    options={"gate": "softplus"},
    phase="decode",
    lengths=(1,),
)
def decode_step_in_place(qkv, taps, cache, raw_g, a_log, dt_bias, raw_beta, s, out_gate, weight):
    """One token; the window and the [V, K] state are overwritten; the gate is unbounded."""
    cache.copy_(torch.cat([cache[..., 1:], qkv.unsqueeze(-1)], dim=-1))
    q, k, v = F.silu((cache * taps).sum(-1)).split([H * K, H * K, H * V], -1)
    q, k, v = q.view(-1, H, K), k.view(-1, H, K), v.view(-1, H, V)
    q, k = (x / torch.sqrt(x.square().sum(-1, True) + 1e-6) for x in (q, k))
    decay = torch.exp(-a_log.exp()[:, None] * F.softplus(raw_g + dt_bias))
    s.mul_(decay.unsqueeze(-2))
    gap = v - (s @ k.unsqueeze(-1)).squeeze(-1)
    s.add_((raw_beta.sigmoid().unsqueeze(-1) * gap).unsqueeze(-1) * k.unsqueeze(-2))
    o = (s @ q.unsqueeze(-1)).squeeze(-1) / K**0.5
    return F.rms_norm(o, (V,), weight, EPS) * torch.sigmoid(out_gate)


@spelling(
    arguments="qkv_bct conv_weight conv_state_bct raw_g a_log dt_bias raw_beta s0 out_gate norm_weight",
    results="y state conv_state_bct",
)
def three_convolutions(qkv, taps, conv_state, raw_g, a_log, dt_bias, raw_beta, s, out_gate, weight):
    """q, k and v each through their own grouped conv1d, [B, C, T]; heads first in the recurrence."""
    sizes = [H * K, H * K, H * V]
    streams = []
    for x, w, before in zip(qkv.split(sizes, 1), taps.split(sizes), conv_state.split(sizes, 1), strict=True):
        y = F.silu(F.conv1d(torch.cat([before, x], -1), w.unsqueeze(1), groups=w.shape[0]))
        streams.append(y.unflatten(1, (H, -1)).transpose(2, 3))
    q, k, v = streams
    q, k = unit(q) * q.shape[-1] ** -0.5, unit(k)
    decay = (LOWER_BOUND * ((raw_g + dt_bias) * a_log.exp().unsqueeze(-1)).sigmoid()).exp().transpose(1, 2)
    beta, out = raw_beta.sigmoid().transpose(1, 2), []
    for t in range(q.shape[2]):
        s = s * decay[:, :, t, :, None]
        u = (v[:, :, t] - (s * k[:, :, t, :, None]).sum(-2)) * beta[:, :, t, None]
        s = s + k[:, :, t, :, None] * u[:, :, None]
        out.append((s * q[:, :, t, :, None]).sum(-2))
    o = torch.stack(out, 1)
    y = weight * (o / (o.square().mean(-1, keepdim=True) + EPS).sqrt()) * out_gate.sigmoid()
    return y, s, torch.cat([conv_state, qkv], -1)[..., -conv_state.shape[-1] :]


@spelling(arguments=f"{STREAMS.replace('out_gate', 'out_gate_flat')}", results="y_flat state conv_state", lengths=(5,))
def token_by_token(qkv, taps, conv_state, raw_g, a_log, dt_bias, raw_beta, s, out_gate, weight):
    """The whole chain inside the loop over tokens, the window shifted by cat, the heads flat at the end."""
    window, out = conv_state, []
    for t in range(qkv.shape[1]):
        window = torch.cat([window, qkv[:, t : t + 1]], dim=1)
        y = torch.einsum("bwc,cw->bc", window, taps)
        q, k, v = torch.split(y * y.sigmoid(), [H * K, H * K, H * V], dim=1)
        q, k, v = q.reshape(-1, H, K), k.reshape(-1, H, K), v.reshape(-1, H, V)
        g = LOWER_BOUND * torch.sigmoid(torch.exp(a_log).view(-1, 1) * (raw_g[:, t] + dt_bias))
        s = torch.exp(g).unsqueeze(-1) * s
        k, q = unit(k), unit(q)
        s = s + torch.einsum("bh,bhk,bhv->bhkv", raw_beta[:, t].sigmoid(), k, v - torch.einsum("bhkv,bhk->bhv", s, k))
        o = torch.einsum("bhkv,bhk->bhv", s, q * K**-0.5)
        o = weight * o * torch.rsqrt(o.pow(2).mean(-1, keepdim=True) + EPS)
        out.append(o.flatten(1) * torch.sigmoid(out_gate[:, t]))
        window = window[:, 1:]
    return torch.stack(out, dim=1), s, window


@spelling(options={"gate": "softplus"}, lengths=(1, 5))
def state_read_once_in_a_layer(qkv, taps, conv_state, raw_g, a_log, dt_bias, raw_beta, s, out_gate, weight):
    """unfold for the windows, exp2 gates, and o mended by (q . k) u."""
    window = torch.cat([conv_state, qkv], dim=1)
    q, k, v = F.silu((window.unfold(1, taps.shape[1], 1) * taps).sum(-1)).split([H * K, H * K, H * V], -1)
    q, k, v = unit(q.unflatten(-1, (H, -1))) / K**0.5, unit(k.unflatten(-1, (H, -1))), v.unflatten(-1, (H, -1))
    bits = -a_log.exp()[:, None] * F.softplus(raw_g + dt_bias) * LOG2E
    beta, rows = torch.sigmoid(raw_beta), []
    for t in range(qkv.shape[1]):
        s = s * bits[:, t].exp2().unsqueeze(-1)
        seen, read = torch.stack([k[:, t], q[:, t]], 2).matmul(s).unbind(2)
        u = beta[:, t].unsqueeze(-1) * (v[:, t] - seen)
        rows.append(read + (q[:, t] * k[:, t]).sum(-1, True) * u)
        s = s + k[:, t].unsqueeze(-1) @ u.unsqueeze(-2)
    return (
        F.rms_norm(torch.stack(rows, 1), weight.shape, weight, EPS) * out_gate.sigmoid(),
        s,
        window[:, 1 - taps.shape[1] :],
    )
