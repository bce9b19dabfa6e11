"""Gated MLA: absorbed against native, sparse against dense, empty rows, and transformers."""

import pytest
import torch

from k31compile.model import Caches, make_step
from k31compile.model.mla import GatedMLA
from k31compile.model.sparse_attention import attend_gathered, attend_masked, masked_softmax


def layer_of(config, seed=0, dtype=torch.float64):
    layer = GatedMLA(config).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    for parameter in layer.parameters():
        values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.copy_(values * (parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 1.0))
    return layer


def attend(layer, config, x, lengths=None, fill=0.0):
    caches = Caches.allocate(config, x.shape[0], x.shape[1], dtype=x.dtype)
    cache = caches.layers[config.full_attention_layers[0] - 1]
    for pages in cache:
        pages.fill_(fill)
    step = make_step(caches, x.shape[1], torch.zeros(x.shape[0], dtype=torch.int64), lengths)
    return layer(x, cache, step, None)[0]


def inputs(config, length=45, batch=2, dtype=torch.float64):
    generator = torch.Generator().manual_seed(5)
    return torch.randn(batch, length, config.hidden_size, generator=generator, dtype=dtype)


def test_native_equals_absorbed(odd):
    x = inputs(odd)
    native = odd.replace(mla_form="native")
    absorbed = attend(layer_of(odd), odd, x)
    torch.testing.assert_close(absorbed, attend(layer_of(native), native, x), rtol=1e-11, atol=1e-12)
    assert absorbed.abs().mean() > 0.01


@pytest.mark.parametrize("form", ["absorbed", "native"])
def test_sparse_equals_dense_exactly_where_all_visible_keys_fit(odd, form):
    config = odd.replace(mla_form=form)
    dense = config.replace(index_topk=1000)
    x = inputs(config)
    sparse, full = attend(layer_of(config), config, x), attend(layer_of(dense), dense, x)
    k = config.index_topk
    torch.testing.assert_close(sparse[:, :k], full[:, :k], rtol=1e-11, atol=1e-12)
    assert ((sparse - full)[:, k:].abs().amax(-1) > 1e-6).all()


@pytest.mark.parametrize("form", ["absorbed", "native"])
@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -float("inf")])
def test_garbage_in_pages_is_never_read_and_empty_rows_are_zero(odd, form, garbage):
    config = odd.replace(mla_form=form)
    layer, x, lengths = layer_of(config), inputs(config), torch.tensor([0, 31])
    clean = attend(layer, config, x, lengths)
    x[0], x[1, 31:] = garbage, garbage
    # The gate of a padding row follows its input, so the row itself is looked at before o_proj, below.
    assert torch.equal(attend(layer, config, x, lengths, garbage)[1, :31], clean[1, :31])


def test_an_empty_row_is_exactly_zero():
    mask = torch.tensor([[[False] * 4, [True, False, True, False]]])
    q, latent = torch.randn(1, 2, 3, 5), torch.randn(1, 2, 4, 5)
    rope = torch.randn(1, 2, 4, 6)
    latent[:, 0], rope[:, 0], latent[:, 1, 1] = torch.nan, torch.inf, torch.nan
    o = attend_gathered(q, torch.randn(1, 2, 3, 6), latent, rope, mask, 0.3)
    assert (o[:, 0] == 0).all()
    assert torch.isfinite(o).all()
    assert o[:, 1].abs().min() > 0
    o = attend_masked(torch.randn(1, 2, 3, 5), torch.randn(1, 4, 3, 5), torch.randn(1, 4, 3, 7), mask, 0.3)
    assert (o[:, 0] == 0).all()
    assert masked_softmax(torch.randn(1, 2, 4), mask).sum(-1).tolist() == [[0.0, pytest.approx(1.0)]]


@pytest.mark.parametrize("form", ["absorbed", "native"])
def test_padding_queries_give_zero_before_the_gate(odd, form):
    config = odd.replace(mla_form=form)
    out = attend(layer_of(config), config, inputs(config), torch.tensor([0, 31]))
    assert (out[0] == 0).all()
    assert (out[1, 31:] == 0).all()
    assert (out[1, :31].abs().amax(-1) > 0).all()


@pytest.mark.parametrize("form", ["absorbed", "native"])
def test_agrees_with_transformers(odd, form, transformers_model):
    module = transformers_model("deepseek_v32")
    # One page of exactly this length: both sides then ask torch.topk the same question.
    config = odd.replace(mla_form=form, page_size=29, index_n_heads=9)
    ours, x = layer_of(config, dtype=torch.float32), inputs(config, 29, dtype=torch.float32)
    their_config = module.DeepseekV32Config(
        hidden_size=52, num_attention_heads=5, num_key_value_heads=5, q_lora_rank=22, kv_lora_rank=26,
        qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=18, index_n_heads=9, index_head_dim=16,
        index_topk=config.index_topk, attention_bias=False,
    )  # fmt: skip
    their_config._attn_implementation = "sdpa"
    theirs = module.DeepseekV32Attention(their_config, 0).eval()
    weights = {name.replace("kv_a_proj", "kv_a_proj_with_mqa"): w for name, w in ours.state_dict().items()}
    gate = torch.sigmoid(x @ weights.pop("g_proj.weight").T)
    theirs.load_state_dict(weights)
    theirs.o_proj.register_forward_pre_hook(lambda _, args: (args[0] * gate,))
    unturned = torch.ones(2, 29, 8), torch.zeros(2, 29, 8)
    causal = torch.ones(29, 29, dtype=torch.bool).tril().expand(2, 1, -1, -1)
    expected = theirs(x, unturned, causal)[0]
    torch.testing.assert_close(attend(ours, config, x), expected, rtol=2e-4, atol=2e-5)
