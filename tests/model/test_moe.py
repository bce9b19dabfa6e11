"""LatentMoE: routing rules, both static forms, experts without tokens, SiTU; also against transformers."""

import pytest
import torch

from k31compile.model.moe import Experts, LatentMoE, Router, situ


def filled(module, seed=0):
    generator = torch.Generator().manual_seed(seed)
    module = module.double()
    for parameter in module.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.4)
    return module


def tokens_of(size, count=13):
    return torch.randn(count, size, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


GROUPED = {"num_expert_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "num_experts_per_token": 3}


@pytest.mark.parametrize("changes", [{}, GROUPED, {"moe_renormalize": False}], ids=["plain", "grouped", "raw"])
def test_router_by_hand(odd, changes):
    config = odd.replace(**changes)
    router, x = filled(Router(config)), tokens_of(odd.hidden_size)
    experts, weights = router(x)
    bias = router.e_score_correction_bias
    for n in range(len(x)):
        score = 1 / (1 + torch.exp(-(router.weight @ x[n])))
        choice = (score + bias).tolist()
        allowed = set(range(8))
        if config.num_expert_group > 1:
            size = 8 // config.num_expert_group
            groups = [sorted(choice[i : i + size])[-2:] for i in range(0, 8, size)]
            best = sorted(range(len(groups)), key=lambda i: -sum(groups[i]))[: config.topk_group]
            allowed = {e for e in allowed if e // size in best}
        expected = sorted(allowed, key=lambda e: -choice[e])[: config.num_experts_per_token]
        assert sorted(experts[n].tolist()) == sorted(expected)
        raw = score[experts[n]]
        want = raw / raw.sum() * config.routed_scaling_factor if config.moe_renormalize else raw
        torch.testing.assert_close(weights[n], want, rtol=1e-12, atol=0)


def test_bias_chooses_but_does_not_weigh(odd):
    router, x = filled(Router(odd)), tokens_of(odd.hidden_size)
    router.e_score_correction_bias.copy_(torch.tensor([0, 0, 0, 100.0, 0, 0, 100.0, 0]))
    experts, weights = router(x)
    assert (experts.sort(-1).values == torch.tensor([3, 6])).all()
    raw = torch.sigmoid(x @ router.weight.T).gather(-1, experts)
    torch.testing.assert_close(weights, raw / raw.sum(-1, keepdim=True), rtol=1e-12, atol=0)


def test_scores_that_underflow_give_zero_weights(odd):
    router, x = filled(Router(odd)), tokens_of(odd.hidden_size)
    router.weight.copy_(-1e5 * x[:1].expand(8, -1))
    _, weights = router(x[:1])
    assert (weights == 0).all()


@pytest.mark.parametrize("form", ["gather", "dense", "grouped", "auto"])
@pytest.mark.parametrize("count", [0, 1, 4, 5, 13])
def test_experts_by_hand_with_some_idle(odd, form, count):
    layer = filled(Experts(odd.replace(moe_form=form)))
    y = tokens_of(odd.routed_expert_hidden_size, count)
    generator = torch.Generator().manual_seed(3)
    # Only experts 1, 4 and 6 get tokens.
    pairs = torch.tensor([[1, 4], [4, 6], [6, 1]])[torch.randint(0, 3, (count,), generator=generator)]
    weights = torch.rand(count, 2, generator=generator, dtype=torch.float64)
    out = layer(y, pairs, weights)
    assert out.shape == y.shape
    for n in range(count):
        expected = torch.zeros_like(y[n])
        for expert, weight in zip(pairs[n].tolist(), weights[n], strict=True):
            gate, up = (layer.gate_up_proj[expert] @ y[n]).chunk(2)
            inner = 4 * torch.tanh(gate / 4) / (1 + torch.exp(-gate)) * 25 * torch.tanh(up / 25)
            expected += weight * (layer.down_proj[expert] @ inner)
        torch.testing.assert_close(out[n], expected, rtol=1e-11, atol=1e-12)


def test_norm_follows_the_weighted_sum(odd):
    layer = filled(LatentMoE(odd))
    x = tokens_of(odd.hidden_size).view(1, 13, -1)
    experts, weights = layer.gate(x[0])
    z = layer.experts(x[0] @ layer.latent_down_proj.weight.T, experts, weights)
    z = z / (z.square().mean(-1, keepdim=True) + 1e-5).sqrt() * layer.latent_norm.weight
    gate, up = (x[0] @ layer.shared_experts.gate_up_proj.weight.T).chunk(2, -1)
    shared = situ(gate, up, 4.0, 25.0) @ layer.shared_experts.down_proj.weight.T
    torch.testing.assert_close(layer(x)[0], z @ layer.latent_up_proj.weight.T + shared, rtol=1e-11, atol=1e-12)


def test_situ_bounds():
    big = torch.tensor([1e4, -1e4], dtype=torch.float64)
    assert situ(big, big, 4.0, 25.0).tolist() == [100.0, 0.0]
    one = torch.tensor(1.0, dtype=torch.float64)
    expected = 4 * torch.tanh(one / 4) * torch.sigmoid(one) * 3
    torch.testing.assert_close(situ(one, 3 * one, 4.0, None), expected, rtol=1e-12, atol=0)


def test_without_shared_experts_or_norm(odd):
    layer = filled(LatentMoE(odd.replace(num_shared_experts=0, latent_moe_use_norm=False)))
    assert layer.shared_experts is None
    x = tokens_of(odd.hidden_size).view(1, 13, -1)
    z = layer.experts(layer.latent_down_proj(x[0]), *layer.gate(x[0]))
    torch.testing.assert_close(layer(x)[0], layer.latent_up_proj(z), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("changes", [{}, GROUPED], ids=["plain", "grouped"])
def test_router_agrees_with_transformers(odd, changes, transformers_model):
    module = transformers_model("deepseek_v32")
    config = odd.replace(**changes)
    ours = filled(Router(config)).float()
    theirs = module.DeepseekV32TopkRouter(
        module.DeepseekV32Config(
            hidden_size=52,
            n_routed_experts=8,
            num_experts_per_tok=config.num_experts_per_token,
            n_group=config.num_expert_group,
            topk_group=config.topk_group,
            norm_topk_prob=True,
            routed_scaling_factor=config.routed_scaling_factor,
        )
    )
    theirs.load_state_dict(ours.state_dict())
    x = tokens_of(52).float()
    _, their_weights, their_experts = theirs(x)
    experts, weights = ours(x)
    spread = torch.zeros(13, 8)
    expected = spread.scatter(-1, their_experts, their_weights)
    torch.testing.assert_close(spread.scatter(-1, experts, weights), expected, rtol=1e-5, atol=1e-6)
