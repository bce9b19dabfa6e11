"""Arguments of ``k31::mega_kda``: names, defaults, checks, and the tensors that hold its results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import pairwise

import torch

from k31compile.errors import OperatorError
from k31compile.kernels.checks import FLOATS, accumulation_dtype, check_floats, check_shape, check_word
from k31compile.kernels.delta_checks import KEY_FIRST, VALUE_FIRST

Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Result, last inputs of the convolution, last state."""


@dataclass(slots=True, eq=False)
class MegaKda:
    """The core of a KDA layer for a few tokens (K3.1 spec 2.3 to 2.6).

    Args:
        x: what goes into the convolution: one tensor [B, T, C] of query, key and value channels side by side, each
            head by head, C = 2 H K + H V; or three, [B, T, H K] twice and [B, T, H V]. conv_weight, [C, W], and
            conv_state, the inputs before, [B, W-1, C], are as many; zeros without a conv_state.
        raw_gate: [B, T, H, K]; a_log: [H]; dt_bias: [H, K], zeros without one; raw_beta: [B, T, H].
        state: [B, H, K, V], or [B, H, V, K] with state_layout='VK'.
        out_gate: [B, T, H, V]; norm_weight: [V] or [H, V].
        norm_eps, norm_activation, norm_before_gate, weight_cast: of the norm; see `gated_rms_norm`.
        lower_bound: of the log decay; without one it is -exp(a_log) softplus(raw_gate + dt_bias).
        l2_eps: added to the sum of the squares of a query or key.
        beta_factor: on beta; 2 allows negative eigenvalues. scale: on what is read.
        beta_dtype: what sigmoid(raw_beta) is rounded to. core_dtype: what the recurrence's output is rounded to
            before the norm, which then counts it as stored so. dtype: of the result, core_dtype without one.

    Any mix of float dtypes.
    """

    x: Sequence[torch.Tensor]
    conv_weight: Sequence[torch.Tensor]
    conv_state: Sequence[torch.Tensor] | None
    raw_gate: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor | None
    raw_beta: torch.Tensor
    state: torch.Tensor
    out_gate: torch.Tensor
    norm_weight: torch.Tensor
    _: KW_ONLY
    norm_eps: float
    lower_bound: float | None = None
    l2_eps: float = 1e-6
    beta_factor: float = 1.0
    scale: float = 1.0
    state_layout: str = "KV"
    beta_dtype: torch.dtype | None = None
    core_dtype: torch.dtype | None = None
    norm_activation: str = "sigmoid"
    norm_before_gate: bool = True
    weight_cast: str = "before"
    dtype: torch.dtype | None = None

    def check_words(self) -> None:
        """Check counts, ranks and words."""
        if len(self.x) not in (1, 3):
            raise OperatorError(f"x must be one tensor of packed channels or three, not {len(self.x)}")
        for name, tensors in (("conv_weight", self.conv_weight), ("conv_state", self.conv_state)):
            if tensors is not None and len(tensors) != len(self.x):
                raise OperatorError(f"{name} must be {len(self.x)} tensors as x is, not {len(tensors)}")
        for name, tensor, meaning in self._ranked():
            if tensor.dim() != meaning.count(",") + 1:
                raise OperatorError(f"{name} must be [{meaning}], not {list(tensor.shape)}")
        check_word("state_layout", self.state_layout, (KEY_FIRST, VALUE_FIRST))
        check_word("norm_activation", self.norm_activation, ("sigmoid", "silu"))
        check_word("weight_cast", self.weight_cast, ("before", "after", "between"))
        if self.weight_cast == "between" and not self.norm_before_gate:
            raise OperatorError("weight_cast='between' rounds between norm and gate: it needs norm_before_gate=True")
        for name, dtype in (("beta_dtype", self.beta_dtype), ("core_dtype", self.core_dtype), ("dtype", self.dtype)):
            if dtype not in (None, *FLOATS):
                raise OperatorError(f"{name} must be floating point (16 bits and up), not {dtype}")

    def _ranked(self) -> list[tuple[str, torch.Tensor, str]]:
        ranked = [("x", x, "B, T, C") for x in self.x]
        ranked += [("conv_weight", weight, "C, W") for weight in self.conv_weight]
        return [
            *ranked,
            ("raw_gate", self.raw_gate, "B, T, H, K"),
            ("raw_beta", self.raw_beta, "B, T, H"),
            ("out_gate", self.out_gate, "B, T, H, V"),
            ("state", self.state, "B, H, K, V"),
        ]

    def check(self, states: int | None = None) -> None:
        """Check dtypes, devices and sizes; of a pool of `states` each request has one."""
        batch, tokens, heads, width = self.raw_gate.shape
        depth, taps = self.out_gate.shape[3], self.conv_weight[0].shape[1]
        check_floats(*self.named())
        if taps < 1:
            raise OperatorError("conv_weight must have at least one tap, has shape [C, 0]")
        if self.lower_bound is not None and not self.lower_bound <= 0:
            raise OperatorError(f"lower_bound of a log decay must not be above 0, is {self.lower_bound}")
        for i, channels in enumerate(self.channels(heads, width, depth)):
            check_shape("x", self.x[i], (batch, tokens, channels))
            check_shape("conv_weight", self.conv_weight[i], (channels, taps))
            if self.conv_state is not None:
                check_shape("conv_state", self.conv_state[i], (batch, taps - 1, channels))
        for name, tensors in (("x", self.x), ("conv_state", self.conv_state or ())):
            if any(a.dtype != b.dtype for a, b in pairwise(tensors)):
                dtypes = ", ".join(str(tensor.dtype) for tensor in tensors)
                raise OperatorError(f"{name} must be tensors of one dtype, not of {dtypes}")
        check_shape("a_log", self.a_log, (heads,))
        if self.dt_bias is not None:
            check_shape("dt_bias", self.dt_bias, (heads, width))
        check_shape("raw_beta", self.raw_beta, (batch, tokens, heads))
        inner = (width, depth) if self.state_layout == KEY_FIRST else (depth, width)
        check_shape("state", self.state, (batch if states is None else states, heads, *inner))
        check_shape("out_gate", self.out_gate, (batch, tokens, heads, depth))
        check_shape("norm_weight", self.norm_weight, (depth,) if self.norm_weight.dim() == 1 else (heads, depth))

    def named(self) -> list[tuple[str, torch.Tensor]]:
        """All tensors with their names."""
        single = ("raw_gate", "a_log", "dt_bias", "raw_beta", "state", "out_gate", "norm_weight")
        named = [("x", x) for x in self.x] + [("conv_weight", weight) for weight in self.conv_weight]
        named += [("conv_state", state) for state in self.conv_state or ()]
        return named + [(name, getattr(self, name)) for name in single if getattr(self, name) is not None]

    def channels(self, heads: int, width: int, depth: int) -> tuple[int, ...]:
        """The channels of each tensor of x."""
        split = (heads * width, heads * width, heads * depth)
        return split if len(self.x) == 3 else (sum(split),)

    @property
    def wide(self) -> torch.dtype:
        """The dtype of what is not rounded."""
        return accumulation_dtype(*(tensor for _, tensor in self.named()))

    def new_outputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Result [B, T, H, V], and the inputs up to the last token, packed [B, W-1, C]."""
        x, (taps,) = self.x[0], self.conv_weight[0].shape[1:]
        channels = sum(part.shape[2] for part in self.x)
        like = x if self.conv_state is None else self.conv_state[0]
        result = self.out_gate.new_empty(self.out_gate.shape, dtype=self.dtype or self.core_dtype or self.wide)
        return result, like.new_empty((x.shape[0], taps - 1, channels))

    def new_results(self) -> Results:
        """What `new_outputs` gives, and the last state."""
        return *self.new_outputs(), self.state.new_empty(self.state.shape, dtype=self.wide)
