"""Attention residuals over depth."""

import pytest
import torch

from k31compile.model.attn_res import AttnRes


def mixture(config, seed=0):
    layer = AttnRes(config).double()
    generator = torch.Generator().manual_seed(seed)
    for parameter in layer.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    sums = torch.randn(4, 2, 3, config.hidden_size, generator=generator, dtype=torch.float64)
    return layer, sums[0], tuple(sums[1:])


@pytest.mark.parametrize("frozen", [1, 2, 3])
def test_is_a_softmax_over_sources(odd, frozen):
    layer, prefix, bank = mixture(odd)
    h = layer(prefix, bank[:frozen])
    for b in range(2):
        for t in range(3):
            values = [z[b, t] for z in (*bank[:frozen], prefix)]
            query = layer.proj.weight[0] * layer.norm.weight
            logits = torch.stack([query @ v / (v.square().mean() + 1e-5).sqrt() for v in values])
            alpha = logits.exp() / logits.exp().sum()
            expected = sum(a * v for a, v in zip(alpha, values, strict=True))
            torch.testing.assert_close(h[b, t], expected, rtol=1e-11, atol=1e-12)


def test_without_frozen_sums_it_is_the_identity(odd):
    layer, prefix, _ = mixture(odd)
    assert torch.equal(layer(prefix, ()), prefix)


def test_order_of_the_bank_does_not_matter_but_its_content_does(odd):
    layer, prefix, bank = mixture(odd)
    h = layer(prefix, bank)
    torch.testing.assert_close(h, layer(prefix, bank[::-1]), rtol=1e-12, atol=1e-13)
    assert (h - layer(prefix, bank[:2])).abs().max() > 1e-3


def test_logits_do_not_depend_on_the_size_of_a_source(odd):
    layer, prefix, bank = mixture(odd)
    scaled = layer(prefix * 1000, tuple(1000 * z for z in bank)) / 1000
    torch.testing.assert_close(scaled, layer(prefix, bank), rtol=1e-3, atol=1e-4)


def test_result_has_the_stream_dtype(odd):
    layer, prefix, bank = mixture(odd)
    layer = layer.bfloat16()
    assert layer(prefix.float(), tuple(z.float() for z in bank)).dtype == torch.bfloat16
    assert layer(prefix.float(), ()).dtype == torch.bfloat16
