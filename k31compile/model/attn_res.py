"""Attention residuals: every sub-layer reads a mixture of the block sums so far (K3.1 spec 2.2)."""

import torch
from torch import Tensor, nn

from k31compile.model.config import K31Config
from k31compile.model.norms import RMSNorm, accumulate_dtype


def residual_dtype(config: K31Config, stream: torch.dtype) -> torch.dtype:
    """Dtype in which prefix and bank are kept (config field attn_res_dtype)."""
    return accumulate_dtype(stream) if config.attn_res_dtype == "float32" else stream


class AttnRes(nn.Module):
    """Attention over depth, for one token, with one learned query (K3.1 spec 2.2, original form).

    logit_i = <w_q * g, v_i> rsqrt(mean(v_i^2) + eps); h = sum_i softmax(logit)_i v_i over the frozen block
    sums and the running one. The values are not normalised; there is no 1/sqrt(D).
    """

    def __init__(self, config: K31Config) -> None:
        """Query proj.weight [1, D] and norm.weight [D]."""
        super().__init__()
        self.proj = nn.Linear(config.hidden_size, 1, bias=False)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, prefix: Tensor, bank: tuple[Tensor, ...]) -> Tensor:
        """Running sum [B, T, D] and n >= 0 frozen sums of that shape -> [B, T, D] in the stream dtype.

        With an empty bank the softmax is over the running sum alone, and h is that sum.
        """
        stream = self.proj.weight.dtype
        if not bank:
            return prefix.to(stream)
        values = torch.stack([*bank, prefix], dim=-2)
        values = values.to(accumulate_dtype(values.dtype))
        query = self.proj.weight.squeeze(0).to(values.dtype) * self.norm.weight.to(values.dtype)
        logits = (values * query).sum(-1) * torch.rsqrt(values.square().mean(-1) + self.norm.eps)
        return (logits.softmax(-1).unsqueeze(-1) * values).sum(-2).to(stream)
