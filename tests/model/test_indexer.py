"""The lightning indexer: score, order of rope and Hadamard, selection; also against transformers."""

import pytest
import torch

from k31compile.model import Caches, K31Config, make_step
from k31compile.model.indexer import LightningIndexer, hadamard, index_scores, rotate

LENGTH, TOPK = 53, 7


def config_of(**changes) -> K31Config:
    sizes = {"hidden_size": 38, "q_lora_rank": 22, "index_n_heads": 3, "index_head_dim": 16}
    return K31Config(**{**sizes, "index_topk": TOPK, "page_size": 9, **changes})


def indexer_and_inputs(config, batch=2, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    indexer = LightningIndexer(config).to(dtype)
    for parameter in indexer.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=dtype))
    x = torch.randn(batch, LENGTH, config.hidden_size, generator=generator, dtype=dtype)
    return indexer, x, torch.randn(batch, LENGTH, config.q_lora_rank, generator=generator, dtype=dtype)


def select(indexer, config, x, q_latent, pieces=(LENGTH,)):
    caches = Caches.allocate(config, x.shape[0], LENGTH + 10, dtype=x.dtype)
    cache, start, selected = caches.layers[config.full_attention_layers[0] - 1], 0, []
    for size in pieces:
        step = make_step(caches, size, torch.full((x.shape[0],), start), None)
        selected.append(indexer(x[:, start : start + size], q_latent[:, start : start + size], cache, step))
        start += size
    return torch.cat(selected, 1)


def plain_scores(indexer, x, q_latent, turn=lambda y: y):
    """The formula of spec 2.8, one loop per head, future keys at -inf."""
    q = (q_latent @ indexer.wq_b.weight.T).view(*x.shape[:2], indexer.num_heads, indexer.head_dim)
    raw = x @ indexer.wk.weight.T
    centred = raw - raw.mean(-1, keepdim=True)
    normed = centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    key = turn(normed * indexer.k_norm.weight + indexer.k_norm.bias)
    weights = x @ indexer.weights_proj.weight.T * indexer.num_heads**-0.5 * indexer.head_dim**-0.5
    scores = torch.zeros(x.shape[0], LENGTH, LENGTH, dtype=x.dtype)
    for head in range(indexer.num_heads):
        dots = turn(q[:, :, head]) @ key.mT
        scores += weights[:, :, head, None] * torch.maximum(dots, torch.zeros_like(dots))
    return scores.masked_fill(torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1), -torch.inf)


def chosen_values(scores, selected):
    """Sorted scores of the selected keys: ties may be broken in any way. Slots past the end count as masked."""
    padded = torch.nn.functional.pad(scores, (0, 1), value=-torch.inf)
    return padded.gather(-1, selected.long().clamp(max=LENGTH)).sort(-1, descending=True).values


def assert_best(scores, selected):
    assert all(row.unique().numel() == TOPK for row in selected.flatten(0, 1))
    torch.testing.assert_close(chosen_values(scores, selected), scores.topk(TOPK).values, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("pieces", [(LENGTH,), (1,) * LENGTH, (20, 1, 32)])
def test_selects_the_best_visible_keys(pieces):
    config = config_of()
    indexer, x, q_latent = indexer_and_inputs(config)
    scores = plain_scores(indexer, x, q_latent)
    assert (scores[scores.isfinite()] < 0).any()
    assert_best(scores, select(indexer, config, x, q_latent, pieces))


@pytest.mark.parametrize("interleave", [False, True])
def test_rope_turns_the_first_dims_of_both(interleave):
    config = config_of(index_rope_dim=6, index_rope_interleave=interleave)
    indexer, x, q_latent = indexer_and_inputs(config)

    def turn(y):
        y = y.clone()
        for pair in range(3):
            i, j = (2 * pair, 2 * pair + 1) if interleave else (pair, pair + 3)
            angle = torch.arange(LENGTH, dtype=y.dtype) * 10000.0 ** (-2 * pair / 6)
            a, b = y[..., i].clone(), y[..., j].clone()
            y[..., i], y[..., j] = a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()
        return y

    scores = plain_scores(indexer, x, q_latent, turn)
    assert_best(scores, select(indexer, config, x, q_latent, (17, 36)))
    unturned = plain_scores(indexer, x, q_latent)
    assert (scores[:, -1].topk(TOPK).values - unturned[:, -1].topk(TOPK).values).abs().max() > 1e-3


def test_hadamard_is_orthonormal_and_changes_no_score():
    matrix = hadamard(torch.eye(16, dtype=torch.float64))
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(16, dtype=torch.float64), rtol=0, atol=1e-15)
    assert (matrix.abs() == 0.25).all()
    assert (matrix[0] == 0.25).all()
    config = config_of(index_hadamard=True)
    indexer, x, q_latent = indexer_and_inputs(config)
    assert_best(plain_scores(indexer, x, q_latent), select(indexer, config, x, q_latent))


def test_weights_act_after_the_relu():
    q, key = torch.tensor([[[[1.0, 0.0]]]]), torch.tensor([[[2.0, 5.0], [-3.0, 5.0]]])
    assert index_scores(q, key, torch.tensor([[[-1.0]]])).tolist() == [[[-2.0, 0.0]]]


def test_nan_in_a_key_stays_in_its_column():
    generator = torch.Generator().manual_seed(0)
    q, key = torch.randn(1, 5, 3, 16, generator=generator), torch.randn(1, 9, 16, generator=generator)
    weights = torch.randn(1, 5, 3, generator=generator)
    clean = index_scores(q, key, weights)
    key[:, 6] = torch.nan
    assert torch.equal(index_scores(q, key, weights)[..., :6], clean[..., :6])


@pytest.mark.parametrize("rope_dim", [0, 6])
def test_agrees_with_transformers(rope_dim, transformers_model):
    module = transformers_model("deepseek_v32")
    config = config_of(index_rope_dim=rope_dim)
    indexer, x, q_latent = indexer_and_inputs(config, dtype=torch.float32)
    theirs = module.DeepseekV32Indexer(
        module.DeepseekV32Config(
            hidden_size=38, q_lora_rank=22, index_n_heads=3, index_head_dim=16, index_topk=TOPK, qk_rope_head_dim=6
        ),
        0,
    )
    theirs.load_state_dict(indexer.state_dict())
    angle = torch.arange(LENGTH)[:, None] * 10000.0 ** (-torch.arange(0, 6, 2) / 6) * (rope_dim > 0)
    angle = torch.cat([angle, angle], -1).expand(2, -1, -1)
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    expected = theirs(x, q_latent, (angle.cos(), angle.sin()), causal, None)

    def turn(y):
        positions = torch.arange(LENGTH).expand(len(y), -1)
        return torch.cat([rotate(y[..., :6], positions, 10000.0, False), y[..., 6:]], -1) if rope_dim else y

    scores = plain_scores(indexer, x, q_latent, turn)
    ours = select(indexer, config, x, q_latent)
    torch.testing.assert_close(chosen_values(scores, ours), chosen_values(scores, expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("interleave", [False, True])
def test_rotate_agrees_with_transformers(interleave, transformers_model):
    module = transformers_model("deepseek_v32")
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 11, 3, 6, generator=generator), torch.randn(2, 11, 1, 6, generator=generator)
    positions = torch.arange(40, 51).expand(2, -1)
    angle = positions[..., None] * 10000.0 ** (-torch.arange(0, 6, 2) / 6)
    cos, sin = torch.cat([angle, angle], -1).cos(), torch.cat([angle, angle], -1).sin()
    apply = module.apply_rotary_pos_emb_interleave if interleave else module.apply_rotary_pos_emb
    for ours, expected in zip((q, k), apply(q, k, cos, sin, unsqueeze_dim=2), strict=True):
        turned = rotate(ours, positions, 10000.0, interleave)
        if interleave:
            turned = torch.cat([turned[..., 0::2], turned[..., 1::2]], -1)
        torch.testing.assert_close(turned, expected, rtol=1e-5, atol=1e-5)
