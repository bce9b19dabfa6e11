"""A decode step of 64 tiny layers: next to no arithmetic, so what shows is the cost of guards, wrappers and calls."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from k31compile.bench.goals import Bound, Goals
from k31compile.bench.models.case import ModelCase
from k31compile.entry import Entry
from k31compile.model import K31Config
from k31compile.model.delta_rule import kda_gate, kda_recurrent
from k31compile.model.moe import FeedForward
from k31compile.model.norms import GatedRMSNorm, RMSNorm, l2_normalize

_DEPTHS = (4, 16, 64)
_HELD = 64  # layers for which something is asked: fewer show how the cost grows


def cases() -> list[ModelCase]:
    """The step with all guards, and with those alone that arguments need."""
    made = []
    for guards, goal in (("safe", 1.0), ("none", 2.0)):
        for layers in _DEPTHS:
            held = Goals({"inductor": Bound(goal)} if layers == _HELD else {}, extra_bytes=None)
            label = f"{layers} layers, decode fp32, guards={guards}"
            series = f"tiny layers, decode fp32, guards={guards}"
            make = partial(tiny_step, layers)
            made.append(
                ModelCase(
                    "tiny", label, make, 1, held, series, layers, layers == min(_DEPTHS), whole=True,
                    options={"guards": guards},
                )
            )  # fmt: skip
    return made


class TinyLayer(nn.Module):
    """A KDA layer without its convolution, and a feed-forward, each added to the stream; returns only new tensors."""

    def __init__(self, config: K31Config) -> None:
        """Parameters of one layer."""
        super().__init__()
        self.heads, self.width, self.bound = config.kda_num_heads, config.kda_key_dim, config.gate_lower_bound
        inner, hidden = self.heads * self.width, config.hidden_size
        self.first_norm, self.second_norm = (RMSNorm(hidden, config.rms_norm_eps) for _ in range(2))
        self.qkv_proj, self.gates_proj = nn.Linear(hidden, 3 * inner), nn.Linear(hidden, 2 * inner)
        self.beta_proj, self.o_proj = nn.Linear(hidden, self.heads), nn.Linear(inner, hidden)
        self.a_log, self.dt_bias = (
            nn.Parameter(torch.zeros(self.heads)),
            nn.Parameter(torch.zeros(self.heads, self.width)),
        )
        self.o_norm = GatedRMSNorm(self.width, config.rms_norm_eps)
        self.mlp = FeedForward(config, config.intermediate_size)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, T, D], state [B, H, K, V] -> both after this layer."""
        h = self.first_norm(x)
        q, k, v = self.qkv_proj(h).unflatten(-1, (3, self.heads, self.width)).unbind(-3)
        raw_gate, out_gate = self.gates_proj(h).unflatten(-1, (2, self.heads, self.width)).unbind(-3)
        gate = kda_gate(raw_gate, self.a_log, self.dt_bias, self.bound)
        beta = torch.sigmoid(self.beta_proj(h))
        core, state = kda_recurrent(l2_normalize(q) * self.width**-0.5, l2_normalize(k), v, gate, beta, state)
        x = x + self.o_proj(self.o_norm(core, out_gate).flatten(-2))
        return x + self.mlp(self.second_norm(x)), state


class TinyStack(nn.Module):
    """Such layers, each with weights of its own."""

    def __init__(self, layers: int) -> None:
        """Weights from the seed of the moment."""
        super().__init__()
        config = K31Config()
        self.layers = nn.ModuleList(TinyLayer(config) for _ in range(layers))

    def forward(self, x: Tensor, states: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """x [B, T, D] and a state for each layer -> the stream and the new states."""
        new = []
        for layer, state in zip(self.layers, states, strict=True):
            x, last = layer(x, state)
            new.append(last)
        return x, tuple(new)


def tiny_step(layers: int) -> Entry:
    """One token through so many layers."""
    torch.manual_seed(0)
    config = K31Config()
    shape = (1, config.kda_num_heads, config.kda_key_dim, config.kda_value_dim)
    states = tuple(torch.randn(shape) for _ in range(layers))
    return Entry("step", TinyStack(layers).eval(), (torch.randn(1, 1, config.hidden_size), states))
