"""Stable LatentMoE with SiTU, and the dense feed-forward of the first layers (K3.1 spec 2.18)."""

import torch
from torch import Tensor, nn

from k31compile.model.config import K31Config
from k31compile.model.norms import RMSNorm, accumulate_dtype


def situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    """SiTU: beta tanh(g / beta) sigmoid(g) * lb tanh(u / lb), same shape and dtype (K3.1 spec 2.18)."""
    dtype = accumulate_dtype(gate.dtype)
    g, u = gate.to(dtype), up.to(dtype)
    if linear_beta is not None:
        u = linear_beta * torch.tanh(u / linear_beta)
    return (beta * torch.tanh(g / beta) * torch.sigmoid(g) * u).to(gate.dtype)


class FeedForward(nn.Module):
    """down(SiTU(gate(x), up(x))): [..., D] -> [..., D]; gate first in the packed weight (K3.1 spec 2.18)."""

    def __init__(self, config: K31Config, inner: int) -> None:
        """Parameters gate_up_proj [2 * inner, D] and down_proj [D, inner]."""
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * inner, bias=False)
        self.down_proj = nn.Linear(inner, config.hidden_size, bias=False)
        self.beta, self.linear_beta = config.situ_beta, config.situ_linear_beta

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        out: Tensor = self.down_proj(situ(gate, up, self.beta, self.linear_beta))
        return out


class Router(nn.Module):
    """Sigmoid router; a bias takes part in the choice of experts only (K3.1 spec 2.18)."""

    float32_parameters = ("weight", "e_score_correction_bias")

    def __init__(self, config: K31Config) -> None:
        """Parameters weight [E, D] and e_score_correction_bias [E], both kept in float32."""
        super().__init__()
        self.topk = config.num_experts_per_token
        self.groups, self.topk_group = config.num_expert_group, config.topk_group
        self.renormalize, self.factor = config.moe_renormalize, config.routed_scaling_factor
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.e_score_correction_bias = nn.Parameter(torch.zeros(config.num_experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [N, D] -> (experts int64 [N, k], their weights [N, k] in the accumulation dtype)."""
        dtype = accumulate_dtype(x.dtype)
        scores = torch.sigmoid(nn.functional.linear(x.to(dtype), self.weight.to(dtype)))
        choice = scores + self.e_score_correction_bias.to(dtype)
        if self.groups > 1:
            choice = self._best_groups(choice)
        experts = choice.topk(self.topk, dim=-1).indices
        weights = scores.gather(-1, experts)
        if self.renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return experts, weights * self.factor

    def _best_groups(self, choice: Tensor) -> Tensor:
        """-inf outside the topk_group groups whose two best experts have the largest sum."""
        grouped = choice.view(choice.shape[0], self.groups, -1)
        best = grouped.topk(2, dim=-1).values.sum(-1).topk(self.topk_group, dim=-1).indices
        kept = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best, True)
        return grouped.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(-2)


class Experts(nn.Module):
    """The routed experts in latent space (K3.1 spec 2.18); all forms but "grouped" have shapes free of the routing."""

    def __init__(self, config: K31Config) -> None:
        """Parameters gate_up_proj [E, 2 * I, L] (gate first) and down_proj [E, L, I]."""
        super().__init__()
        count, inner = config.num_experts, config.moe_intermediate_size
        latent = config.routed_expert_hidden_size
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * inner, latent))
        self.down_proj = nn.Parameter(torch.empty(count, latent, inner))
        self.beta, self.linear_beta, self.form = config.situ_beta, config.situ_linear_beta, config.moe_form

    def forward(self, y: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """y [N, L], experts int64 [N, k], weights [N, k] -> sum_k w_k e_k(y), [N, L] as weights."""
        few = experts.numel() <= self.gate_up_proj.shape[0]
        if self.form == "gather" or (self.form == "auto" and few):
            return self._gathered(y, experts, weights)
        if self.form == "grouped":
            return self._grouped(y, experts, weights)
        return self._dense(y, experts, weights)

    def _gathered(self, y: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Fetch the weights of each token's experts: reads k experts per token."""
        gate, up = torch.einsum("nkil,nl->nki", self.gate_up_proj[experts], y).chunk(2, dim=-1)
        inner = situ(gate, up, self.beta, self.linear_beta)
        out = torch.einsum("nkli,nki->nkl", self.down_proj[experts], inner)
        return (out.to(weights.dtype) * weights.unsqueeze(-1)).sum(1)

    def _grouped(self, y: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Sort the pairs of token and expert by expert, and run each expert on its tokens only."""
        order = experts.flatten().argsort(stable=True)
        tokens = order // experts.shape[1]
        counts = experts.flatten().bincount(minlength=self.gate_up_proj.shape[0]).tolist()
        out = []
        for expert, rows in enumerate(y[tokens].split(counts)):
            gate, up = (rows @ self.gate_up_proj[expert].mT).chunk(2, dim=-1)
            out.append(situ(gate, up, self.beta, self.linear_beta) @ self.down_proj[expert].mT)
        weighted = torch.cat(out).to(weights.dtype) * weights.flatten()[order, None]
        return weights.new_zeros(y.shape[0], weighted.shape[1]).index_add(0, tokens, weighted)

    def _dense(self, y: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Run all experts on all tokens and weigh those not chosen with 0."""
        gate, up = (y @ self.gate_up_proj.mT).chunk(2, dim=-1)
        out = situ(gate, up, self.beta, self.linear_beta) @ self.down_proj.mT
        spread = weights.new_zeros(y.shape[0], out.shape[0]).scatter(-1, experts, weights)
        return torch.einsum("ne,enl->nl", spread, out.to(weights.dtype))


class LatentMoE(nn.Module):
    """down -> routed experts -> norm -> up, beside a shared expert at full width (K3.1 spec 2.18).

    The norm follows the weighted sum, in latent space.
    """

    def __init__(self, config: K31Config) -> None:
        """Parameters of one MoE layer."""
        super().__init__()
        hidden, latent = config.hidden_size, config.routed_expert_hidden_size
        self.gate = Router(config)
        self.latent_down_proj = nn.Linear(hidden, latent, bias=False)
        self.experts = Experts(config)
        norm = config.latent_moe_use_norm
        self.latent_norm = RMSNorm(latent, config.rms_norm_eps) if norm else nn.Identity()
        self.latent_up_proj = nn.Linear(latent, hidden, bias=False)
        shared = config.num_shared_experts * config.moe_intermediate_size
        self.shared_experts = FeedForward(config, shared) if shared else None

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D] in the dtype of the input."""
        tokens = x.flatten(0, -2)
        experts, weights = self.gate(tokens)
        mixed = self.latent_norm(self.experts(self.latent_down_proj(tokens), experts, weights))
        out: Tensor = self.latent_up_proj(mixed.to(x.dtype)).view_as(x)
        return out if self.shared_experts is None else out + self.shared_experts(x)
