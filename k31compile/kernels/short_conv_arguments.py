"""Arguments of ``k31::short_conv``: names, defaults, checks, and the tensors that hold its results."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import torch

from k31compile.errors import OperatorError
from k31compile.kernels.checks import check_floats, check_shape, check_word
from k31compile.kernels.visibility import check_integers


@dataclass(slots=True, eq=False)
class ShortConv:
    """A causal convolution over time, per channel (K3.1 spec 2.6).

    Args:
        x: [B, T, C], any strides; weight: [C, W] with W >= 1; bias: [C]. Any mix of float dtypes.
        state: [B, W-1, C], the inputs before the first token; zeros without one.
        actual_seq_lengths: integers [B], the valid tokens of each request, clamped to [0, T]; all without one.
        activation: "silu" or "none".
    """

    x: torch.Tensor
    weight: torch.Tensor
    _: KW_ONLY
    bias: torch.Tensor | None = None
    state: torch.Tensor | None = None
    actual_seq_lengths: torch.Tensor | None = None
    activation: str = "silu"

    def check_words(self) -> None:
        """Check ranks and the activation."""
        if self.x.dim() != 3:
            raise OperatorError(f"x must be [B, T, C], not {list(self.x.shape)}")
        if self.weight.dim() != 2:
            raise OperatorError(f"weight must be [C, W], not {list(self.weight.shape)}")
        check_word("activation", self.activation, ("silu", "none"))

    def check(self) -> None:
        """Check dtypes, devices and sizes."""
        batch, _, channels = self.x.shape
        check_floats(("x", self.x), ("weight", self.weight))
        if self.weight.shape[1] < 1:
            raise OperatorError("weight must have at least one tap, has shape [C, 0]")
        check_shape("weight", self.weight, (channels, self.weight.shape[1]))
        if self.bias is not None:
            check_floats(("x", self.x), ("bias", self.bias))
            check_shape("bias", self.bias, (channels,))
        if self.state is not None:
            check_floats(("x", self.x), ("state", self.state))
            check_shape("state", self.state, (batch, self.weight.shape[1] - 1, channels))
        if self.actual_seq_lengths is not None:
            check_integers("actual_seq_lengths", self.actual_seq_lengths)
            check_shape("actual_seq_lengths", self.actual_seq_lengths, (batch,))

    def new_results(self) -> tuple[torch.Tensor, torch.Tensor]:
        """y [B, T, C] in the dtype of x, and the new state [B, W-1, C] in the state's (x's without one)."""
        batch, _, channels = self.x.shape
        like = self.x if self.state is None else self.state
        state = like.new_empty((batch, self.weight.shape[1] - 1, channels))
        return self.x.new_empty(self.x.shape), state
