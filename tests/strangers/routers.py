"""Routers, as four people write them."""

import torch
import torch.nn.functional as F
from stranger import Stranger
from torch import nn


# 1. A serving engine's grouped top-k: two best a group, others at -inf, an in-place renormalisation.
class GroupedRouter(nn.Module):
    def __init__(self, hidden=16, experts=24, groups=4, topk_group=2, top_k=5, scale=2.5):
        super().__init__()
        self.experts, self.groups, self.topk_group, self.top_k, self.scale = experts, groups, topk_group, top_k, scale
        self.weight = nn.Parameter(torch.randn(experts, hidden))
        self.e_score_correction_bias = nn.Parameter(torch.randn(experts) * 0.2)

    def forward(self, hidden_states):
        gating_output = F.linear(hidden_states.float(), self.weight.float())
        scores = gating_output.sigmoid()
        num_token = scores.size(0)
        original_scores = scores
        scores = scores + self.e_score_correction_bias.unsqueeze(0)
        group_scores = scores.view(num_token, self.groups, -1).topk(2, dim=-1)[0].sum(dim=-1)
        group_idx = torch.topk(group_scores, k=self.topk_group, dim=-1, sorted=False)[1]
        group_mask = torch.zeros_like(group_scores)
        group_mask.scatter_(1, group_idx, 1)
        score_mask = (
            group_mask.unsqueeze(-1)
            .expand(num_token, self.groups, scores.size(-1) // self.groups)
            .reshape(num_token, -1)
        )
        tmp_scores = scores.masked_fill(~score_mask.bool(), float("-inf"))
        topk_ids = torch.topk(tmp_scores, k=self.top_k, dim=-1, sorted=False)[1]
        topk_weights = original_scores.gather(1, topk_ids)
        topk_weights = topk_weights / topk_weights.sum(dim=-1, keepdim=True)
        topk_weights *= self.scale
        return topk_weights.to(torch.float32), topk_ids.to(torch.int32)


# 2. Somebody who likes modules: logits by nn.Linear, [B, T], bias as a buffer, F.one_hot nowhere.
class PlainGate(nn.Module):
    def __init__(self, n_embd=14, n_routed=10, n_active=3):
        super().__init__()
        self.gate = nn.Linear(n_embd, n_routed, bias=False)
        self.register_buffer("expert_bias", torch.randn(n_routed) * 0.1)
        self.n_active = n_active
        self.route_scale = 1.7

    def forward(self, x):
        B, T, _C = x.shape
        affinity = torch.sigmoid(self.gate(x))
        _, index = (affinity + self.expert_bias).topk(self.n_active, dim=-1)
        weight = affinity.gather(-1, index)
        weight = weight / (weight.sum(-1, keepdim=True) + 1e-20) * self.route_scale
        return index.view(B * T, -1), weight.view(B * T, -1)


# 3. Top-k first, a softmax of what was chosen, as in the models of mixtures of eight.
class ChosenSoftmax(nn.Module):
    def __init__(self, hidden=18, experts=8, k=2):
        super().__init__()
        self.router = nn.Linear(hidden, experts)
        self.k = k

    def forward(self, x):
        router_logits = self.router(x.reshape(-1, x.shape[-1]))
        router_top_value, router_indices = torch.topk(router_logits, self.k, dim=-1)
        router_top_value = torch.nn.functional.softmax(router_top_value, dim=1, dtype=router_top_value.dtype)
        return router_top_value, router_indices


# 4. From JAX: softmax over all, weights by a product with one-hot rows, renormalised with a floor.
class OneHotGate(nn.Module):
    def __init__(self, features=20, experts=9, k=4):
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(features, experts) * 0.3)
        self.experts, self.k = experts, k

    def forward(self, x):
        logits = torch.tensordot(x, self.kernel, dims=1).reshape(-1, self.experts)
        e = torch.exp(logits - logits.max(dim=-1, keepdim=True).values)
        probabilities = e / e.sum(-1, keepdim=True)
        indices = torch.argsort(probabilities, dim=-1, descending=True)[:, : self.k]
        chosen = torch.einsum("nke,ne->nk", F.one_hot(indices, self.experts).to(x.dtype), probabilities)
        return chosen / (chosen.sum(dim=-1, keepdim=True) + 1e-9), indices


def by_expert(result):
    weights, indices = result
    order = indices.argsort(dim=-1)
    return weights.gather(-1, order), indices.gather(-1, order)


ONE = {"moe_gating_top_k": 1}
STRANGERS = [
    Stranger("engine_grouped", lambda: (GroupedRouter(), (torch.randn(7, 16),)), ONE, meaning=by_expert),
    Stranger("plain_gate", lambda: (PlainGate(), (torch.randn(2, 5, 14),)), ONE),
    Stranger("chosen_softmax", lambda: (ChosenSoftmax(), (torch.randn(2, 3, 18),)), ONE),
    Stranger("one_hot_gate", lambda: (OneHotGate(), (torch.randn(2, 4, 20),)), ONE),
]
