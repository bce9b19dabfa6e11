"""Experts in loops over data, as their authors publish them: shapes and branches depend on which tokens chose whom."""

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, INNER, EXPERTS, SLOTS = 24, 10, 6, 2


class Expert(nn.Module):
    """SwiGLU."""

    def __init__(self, bias=False):
        super().__init__()
        self.w1 = nn.Linear(WIDTH, INNER, bias=bias)
        self.w2 = nn.Linear(INNER, WIDTH, bias=bias)
        self.w3 = nn.Linear(WIDTH, INNER, bias=bias)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class BoundedExpert(nn.Module):
    """SiTU with bounds that are attributes; gate and up in one matrix."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Linear(WIDTH, 2 * INNER, bias=False)
        self.down_proj = nn.Linear(INNER, WIDTH, bias=False)
        self.beta, self.linear_beta = 3.0, 20.0

    def forward(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        bounded = self.beta * torch.tanh(gate / self.beta) * torch.sigmoid(gate)
        return self.down_proj(bounded * (self.linear_beta * torch.tanh(up / self.linear_beta)))


class Gate(nn.Module):
    """Sigmoid scores with a bias for the choice alone."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH) / WIDTH**0.5)
        self.bias = nn.Parameter(torch.randn(EXPERTS) / 4)

    def forward(self, x):
        scores = F.linear(x.float(), self.weight.float()).sigmoid()
        indices = torch.topk(scores + self.bias, SLOTS, dim=-1)[1]
        weights = scores.gather(1, indices)
        return (weights / weights.sum(-1, keepdim=True) * 2.5).type_as(x), indices


class Layer(nn.Module):
    """What most layers have."""

    def __init__(self, expert=Expert, **how):
        super().__init__()
        self.gate = Gate()
        self.experts = nn.ModuleList(expert(**how) for _ in range(EXPERTS))
        self.shared_experts = Expert()


class Counted(Layer):
    """Counts first, experts without tokens skipped, += on indexed rows."""

    def forward(self, x):
        shape = x.size()
        x = x.view(-1, WIDTH)
        weights, indices = self.gate(x)
        y = torch.zeros_like(x)
        counts = torch.bincount(indices.flatten(), minlength=EXPERTS).tolist()
        for i in range(EXPERTS):
            if counts[i] == 0:
                continue
            expert = self.experts[i]
            idx, top = torch.where(indices == i)
            y[idx] += expert(x[idx]) * weights[idx, top, None]
        return (y + self.shared_experts(x)).view(shape)


class OneHot(Layer):
    """A softmax router; one-hot masks with experts in front; index_add_ into zeros of given sizes."""

    def forward(self, hidden_states):
        batch_size, sequence_length, hidden_dim = hidden_states.shape
        hidden_states = hidden_states.view(-1, hidden_dim)
        routing_weights = F.softmax(F.linear(hidden_states, self.gate.weight), dim=1, dtype=torch.float)
        routing_weights, selected_experts = torch.topk(routing_weights, SLOTS, dim=-1)
        routing_weights /= routing_weights.sum(dim=-1, keepdim=True)
        routing_weights = routing_weights.to(hidden_states.dtype)
        final = torch.zeros(
            (batch_size * sequence_length, hidden_dim), dtype=hidden_states.dtype, device=hidden_states.device
        )
        expert_mask = F.one_hot(selected_experts, num_classes=EXPERTS).permute(2, 1, 0)
        for expert_idx in range(EXPERTS):
            idx, top_x = torch.where(expert_mask[expert_idx])
            current_state = hidden_states[None, top_x].reshape(-1, hidden_dim)
            current = self.experts[expert_idx](current_state) * routing_weights[top_x, idx, None]
            final.index_add_(0, top_x, current.to(hidden_states.dtype))
        return final.reshape(batch_size, sequence_length, hidden_dim)


class SortedTokens(Layer):
    """Tokens sorted by expert, counts as numbers, the order undone; a method of its own without gradients."""

    def forward(self, hidden_states):
        orig_shape = hidden_states.shape
        topk_weight, topk_idx = self.gate(hidden_states.view(-1, orig_shape[-1]))
        flat = hidden_states.view(-1, orig_shape[-1])
        y = self.moe_infer(flat, topk_idx, topk_weight).view(*orig_shape)
        return y + self.shared_experts(hidden_states)

    @torch.no_grad()
    def moe_infer(self, x, topk_ids, topk_weight):
        cnts = topk_ids.new_zeros((topk_ids.shape[0], len(self.experts)))
        cnts.scatter_(1, topk_ids, 1)
        tokens_per_expert = cnts.sum(dim=0)
        idxs = topk_ids.view(-1).argsort()
        sorted_tokens = x[idxs // topk_ids.shape[1]]
        tokens_per_expert = tokens_per_expert.cpu().numpy()
        outputs = []
        start_idx = 0
        for i, num_tokens in enumerate(tokens_per_expert):
            end_idx = start_idx + num_tokens
            if num_tokens == 0:
                continue
            outputs.append(self.experts[i](sorted_tokens[start_idx:end_idx]))
            start_idx = end_idx
        outs = torch.cat(outputs, dim=0) if len(outputs) else sorted_tokens.new_empty(0)
        new_x = torch.empty_like(outs)
        new_x[idxs] = outs
        return (
            new_x.view(*topk_ids.shape, -1)
            .type(topk_weight.dtype)
            .mul_(topk_weight.unsqueeze(dim=-1))
            .sum(dim=1)
            .type(new_x.dtype)
        )


class MaskedRows(Layer):
    """Rows of tokens by a mask, where any are in it; SiTU."""

    def __init__(self):
        super().__init__(BoundedExpert)

    def forward(self, x):
        b, t, c = x.shape
        x = x.reshape(-1, c)
        w, idx = self.gate(x)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            mask = idx == i
            rows = mask.any(dim=-1)
            if rows.any():
                out[rows] += expert(x[rows]) * (w * mask).sum(-1)[rows].unsqueeze(-1)
        return out.reshape(b, t, c)


class OnlyHit(Layer):
    """A loop over the experts that were hit, read from stacks of matrices."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * INNER) / WIDTH**0.5)
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) / INNER**0.5)

    def forward(self, x):
        flat = x.reshape(-1, WIDTH)
        weights, indices = self.gate(flat)
        return self.experts_of(flat, indices, weights).reshape(x.shape)

    def experts_of(self, hidden_states, indices, weights):
        out = torch.zeros_like(hidden_states)
        with torch.no_grad():
            mask = F.one_hot(indices, EXPERTS).permute(2, 1, 0)
            hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        for one in hit:
            e = one[0]
            slot, token = torch.where(mask[e])
            gate, up = (hidden_states[token] @ self.gate_up_proj[e]).chunk(2, dim=-1)
            out.index_add_(0, token, ((F.silu(gate) * up) @ self.down_proj[e]) * weights[token, slot, None])
        return out


class Unflattened(Layer):
    """Tokens [B, T, L] that are never flattened; triple indices."""

    def forward(self, x):
        weights, indices = self.gate(x.flatten(0, 1))
        weights, indices = weights.view(*x.shape[:2], -1), indices.view(*x.shape[:2], -1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            b, t, slot = torch.where(indices == e)
            if b.numel() == 0:
                continue
            out[b, t] = out[b, t] + expert(x[b, t]) * weights[b, t, slot].unsqueeze(-1)
        return out


class NumberedExperts(Layer):
    """Experts in a dictionary by their numbers as text; the activation is a static method."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleDict({str(e): Expert() for e in range(EXPERTS)})

    @staticmethod
    def activate(gate, up):
        return F.silu(gate) * up

    def forward(self, x):
        flat = x.view(-1, WIDTH)
        weights, indices = self.gate(flat)
        out = torch.zeros_like(flat)
        for e in range(EXPERTS):
            rows, slot = (indices == e).nonzero(as_tuple=True)
            expert = self.experts[str(e)]
            inner = self.activate(expert.w1(flat[rows]), expert.w3(flat[rows]))
            out.index_add_(0, rows, expert.w2(inner) * weights[rows, slot].unsqueeze(-1))
        return out.view_as(x)


class WeightsOfAll(Layer):
    """The loop reads a dense row of scores, those of experts that were not chosen among them."""

    def forward(self, x):
        flat = x.view(-1, WIDTH)
        scores = F.linear(flat.float(), self.gate.weight.float()).softmax(-1).to(x.dtype)
        chosen = scores.topk(SLOTS, dim=-1).indices
        out = torch.zeros_like(flat)
        for e in chosen.unique().tolist():
            rows = (chosen == e).any(-1).nonzero(as_tuple=True)[0]
            out[rows] += self.experts[e](flat[rows]) * scores[rows, e].unsqueeze(-1)
        return out.view_as(x)


STYLES = (Counted, OneHot, SortedTokens, MaskedRows, OnlyHit, Unflattened, NumberedExperts)
