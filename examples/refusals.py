"""Ten programs that are almost an operator, and what k31 says of each: `python examples/refusals.py`.

Every program computes what its author wrote; the sentence says what keeps it from being fused, where, and what to do.
"""

import torch
import torch.nn.functional as F

import k31compile

B, T, S, H, D = 2, 6, 40, 3, 16
_GENERATOR = torch.Generator().manual_seed(0)


def normal(*shape: int) -> torch.Tensor:
    """Numbers that are the same in every run."""
    return torch.randn(shape, generator=_GENERATOR)


INDEX = (normal(B, T, H, D), normal(B, S, D), normal(B, T, H).abs())
STEP = (normal(B, H, 6), F.normalize(normal(B, H, 6), dim=-1), normal(B, H, 7), -normal(B, H, 6).abs())
STATE = (normal(B, H).sigmoid(), normal(B, H, 6, 7))
ROUTER = (normal(9, D), normal(12, D), normal(12) * 0.1)
NORM = (normal(B, T, 20), normal(B, T, 20), normal(20))


def indexer_without_relu(q, k, w):
    return (torch.einsum("bthd,bsd->bths", q, k) * w[..., None]).sum(2).topk(4).indices


def indexer_with_relu_squared(q, k, w):
    return (torch.einsum("bthd,bsd->bths", q, k).relu().square() * w[..., None]).sum(2).topk(4).indices


def indexer_of_the_worst(q, k, w):
    return (torch.einsum("bthd,bsd->bths", q, k).relu() * w[..., None]).sum(2).topk(4, largest=False).indices


def indexer_whose_scores_are_kept(q, k, w):
    scores = (torch.einsum("bthd,bsd->bths", q, k).relu() * w[..., None]).sum(2)
    return scores.topk(4).indices, scores


def attention_with_capped_logits(q, k, w):
    chosen = (torch.einsum("bthd,bsd->bths", q, k).relu() * w[..., None]).sum(2).topk(4).indices
    picked = k.gather(1, chosen.flatten(1)[..., None].expand(-1, -1, D)).view(B, T, 4, D)
    logits = 30.0 * torch.tanh(torch.einsum("bthd,btkd->bthk", q, picked) / 30.0)
    return torch.einsum("bthk,btkd->bthd", logits.softmax(-1), picked)


def delta_rule_that_predicts_too_early(q, k, v, g, beta, state):
    delta = (v - torch.einsum("bhkv,bhk->bhv", state, k)) * beta[..., None]
    state = state * g.exp()[..., None] + k[..., None] * delta[:, :, None]
    return torch.einsum("bhkv,bhk->bhv", state, q), state


def delta_rule_that_keeps_its_decayed_state(q, k, v, g, beta, state):
    decayed = state * g.exp()[..., None]
    delta = (v - torch.einsum("bhkv,bhk->bhv", decayed, k)) * beta[..., None]
    state = decayed + k[..., None] * delta[:, :, None]
    return torch.einsum("bhkv,bhk->bhv", state, q), state, decayed


def router_with_the_bias_in_the_weights(x, weight, bias):
    scores = F.linear(x, weight).sigmoid() + bias
    weights, experts = scores.topk(3, dim=-1)
    return experts, weights / weights.sum(-1, keepdim=True)


def router_with_another_score(x, weight, bias):
    scores = F.softplus(F.linear(x, weight))
    experts = (scores + bias).topk(3, dim=-1).indices
    weights = scores.gather(-1, experts)
    return experts, weights / weights.sum(-1, keepdim=True)


def norm_with_a_tanh_gate(x, gate, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight * gate.tanh()


PROGRAMS = {
    indexer_without_relu: INDEX,
    indexer_with_relu_squared: INDEX,
    indexer_of_the_worst: INDEX,
    indexer_whose_scores_are_kept: INDEX,
    attention_with_capped_logits: INDEX,
    delta_rule_that_predicts_too_early: STEP + STATE,
    delta_rule_that_keeps_its_decayed_state: STEP + STATE,
    router_with_the_bias_in_the_weights: ROUTER,
    router_with_another_score: ROUTER,
    norm_with_a_tanh_gate: NORM,
}


def main() -> None:
    """Explain each program and print its nearest miss."""
    for program, arguments in PROGRAMS.items():
        report = k31compile.explain(program, *arguments)
        print(f"{program.__name__}:")
        for refusal in report.near_misses_first()[:1]:
            print(f"    {refusal}")


if __name__ == "__main__":
    main()
