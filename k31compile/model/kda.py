"""Kimi Delta Attention: one layer around the delta rule (K3.1 spec 2.3 to 2.5)."""

import torch
from torch import Tensor, nn

from k31compile.model.caches import KdaCache, Step
from k31compile.model.config import K31Config
from k31compile.model.delta_rule import kda_chunk, kda_gate, kda_recurrent
from k31compile.model.norms import GatedRMSNorm, l2_normalize
from k31compile.model.short_conv import ShortConv

__all__ = ["RECURRENT_MAX_TOKENS", "KimiDeltaAttention", "kda_chunk", "kda_gate", "kda_recurrent"]

RECURRENT_MAX_TOKENS = 8


class KimiDeltaAttention(nn.Module):
    """One KDA layer: projections, short conv, gates, delta rule, gated norm, output (K3.1 spec 2.3)."""

    float32_parameters = ("A_log", "dt_bias")

    def __init__(self, config: K31Config) -> None:
        """Parameters of one layer; A_log [H] and dt_bias [H, K] are kept in float32."""
        super().__init__()
        heads, key_dim, value_dim = config.kda_num_heads, config.kda_key_dim, config.kda_value_dim
        hidden, rank = config.hidden_size, config.kda_gate_rank
        self.num_heads, self.key_dim, self.value_dim = heads, key_dim, value_dim
        self.lower_bound = config.gate_lower_bound
        self.anchored = config.kda_pairwise == "anchored"
        self.qkv_proj = nn.Linear(hidden, config.conv_channels, bias=False)
        self.conv = ShortConv(config.conv_channels, config.short_conv_kernel_size)
        self.f_a_proj = nn.Linear(hidden, rank, bias=False)
        self.f_b_proj = nn.Linear(rank, heads * key_dim, bias=False)
        self.b_proj = nn.Linear(hidden, heads, bias=False)
        self.g_proj = nn.Linear(hidden, heads * value_dim, bias=False)
        self.A_log = nn.Parameter(torch.zeros(heads))
        self.dt_bias = nn.Parameter(torch.zeros(heads, key_dim))
        self.o_norm = GatedRMSNorm(value_dim, config.rms_norm_eps)
        self.o_proj = nn.Linear(heads * value_dim, hidden, bias=False)

    def forward(self, x: Tensor, cache: KdaCache, step: Step) -> Tensor:
        """x [B, T, D], the normed layer input -> [B, T, D]; both states are updated in place."""
        batch, length, _ = x.shape
        conv_state = cache.conv[step.state_rows]
        qkv, conv_state = self.conv(self.qkv_proj(x), conv_state, step.lengths)
        cache.conv[step.state_rows] = conv_state.to(cache.conv.dtype)
        q, k, v = self._heads(qkv)
        raw_gate = self.f_b_proj(self.f_a_proj(x)).view(batch, length, self.num_heads, self.key_dim)
        raw_beta = self.b_proj(x)
        if step.valid is not None:
            # A padding token must neither decay nor write: g = 0 and beta = 0 come from raw values of -inf,
            # and 0 * NaN from whatever lies in its k and v must not arise.
            pad = ~step.valid[..., None]
            raw_beta = raw_beta.masked_fill(pad, float("-inf"))
            pad = pad[..., None]
            raw_gate = raw_gate.masked_fill(pad, float("-inf"))
            q, k, v = (y.masked_fill(pad, 0.0) for y in (q, k, v))
        g = kda_gate(raw_gate, self.A_log, self.dt_bias, self.lower_bound)
        beta = torch.sigmoid(raw_beta.to(g.dtype))
        state = cache.state[step.state_rows].transpose(-1, -2)
        if length <= RECURRENT_MAX_TOKENS:
            o, state = kda_recurrent(q, k, v, g, beta, state)
        else:
            o, state = kda_chunk(q, k, v, g, beta, state, anchored=self.anchored)
        cache.state[step.state_rows] = state.transpose(-1, -2).to(cache.state.dtype)
        gate = self.g_proj(x).view(batch, length, self.num_heads, self.value_dim)
        out: Tensor = self.o_proj(self.o_norm(o, gate).flatten(-2))
        return out

    def _heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split [B, T, C] in heads; q and k are L2-normalised and q is scaled by K^-0.5."""
        keys, values = self.num_heads * self.key_dim, self.num_heads * self.value_dim
        q, k, v = torch.split(qkv, [keys, keys, values], dim=-1)
        q = l2_normalize(q.reshape(*q.shape[:-1], self.num_heads, self.key_dim)) * self.key_dim**-0.5
        k = l2_normalize(k.reshape(*k.shape[:-1], self.num_heads, self.key_dim))
        return q, k, v.reshape(*v.shape[:-1], self.num_heads, self.value_dim)
