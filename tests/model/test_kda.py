"""The KDA layer: what padding and other requests may not do to outputs and states."""

import pytest
import torch

from k31compile.model import Caches, make_step
from k31compile.model.kda import KimiDeltaAttention


def layer_of(config):
    layer, generator = KimiDeltaAttention(config).double(), torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    return layer


def attend(layer, config, x, lengths=None, caches=None):
    caches = caches or Caches.allocate(config, len(x), 60, dtype=torch.float64)
    start = torch.zeros(len(x), dtype=torch.int64)
    out = layer(x, caches.layers[0], make_step(caches, x.shape[1], start, lengths))
    return out, caches.layers[0]


def inputs(config, length):
    generator = torch.Generator().manual_seed(4)
    return torch.randn(2, length, config.hidden_size, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("bound", [-5.0, None])
@pytest.mark.parametrize(("length", "valid"), [(8, 5), (8, 0), (1, 0), (33, 5), (33, 17), (33, 0)])
def test_nan_in_padding_stays_there(odd, length, valid, bound):
    config = odd.replace(gate_lower_bound=bound)
    layer, x = layer_of(config), inputs(config, length)
    alone, gold = attend(layer, config, x[:1, :valid]) if valid else (None, None)
    x[0, valid:] = torch.nan
    out, cache = attend(layer, config, x, torch.tensor([valid, length]))
    if valid:
        torch.testing.assert_close(out[:1, :valid], alone, rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(cache.state[1], gold.state[1], rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(cache.conv[1], gold.conv[1], rtol=1e-13, atol=1e-13)
    else:
        assert (cache.state[1] == 0).all()
        assert (cache.conv[1] == 0).all()
    whole, full = attend(layer, config, x[1:])
    torch.testing.assert_close(out[1:], whole, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(cache.state[2], full.state[1], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("length", [1, 8, 33])
def test_a_state_is_kept_bit_for_bit_through_padding(odd, length):
    layer = layer_of(odd)
    _, cache = attend(layer, odd, inputs(odd, 20), caches=(caches := Caches.allocate(odd, 2, 60, dtype=torch.float64)))
    before = [t.clone() for t in cache]
    assert before[0].abs().max() > 0
    attend(layer, odd, inputs(odd, length), torch.tensor([0, 0]), caches)
    assert all(torch.equal(a, b) for a, b in zip(before, cache, strict=True))


def test_the_null_row_is_never_read(odd):
    layer, x = layer_of(odd), inputs(odd, 20)
    caches = Caches.allocate(odd, 2, 60, dtype=torch.float64)
    for pool in caches.layers[0]:
        pool[0] = torch.nan
    assert torch.equal(attend(layer, odd, x, caches=caches)[0], attend(layer, odd, x)[0])


def test_pool_rows_are_the_transposed_state(odd):
    """S_1 = k u^T after one token from nothing, so the pool must hold u k^T."""
    layer, x = layer_of(odd), inputs(odd, 1)
    _, cache = attend(layer, odd, x)
    qkv, _ = layer.conv(layer.qkv_proj(x), torch.zeros(2, 3, odd.conv_channels, dtype=torch.float64), None)
    _, k, v = layer._heads(qkv)
    u = torch.sigmoid(layer.b_proj(x)).unsqueeze(-1) * v
    expected = u[:, 0].unsqueeze(-1) * k[:, 0].unsqueeze(-2)
    torch.testing.assert_close(cache.state[1:], expected, rtol=1e-12, atol=1e-14)


def test_the_layer_by_its_formulas(odd):
    layer, x = layer_of(odd), inputs(odd, 12)
    heads, key_dim, value_dim = 3, 10, 14
    past = torch.zeros(3, odd.conv_channels, dtype=torch.float64)
    out, cache = attend(layer, odd, x)
    for b in range(2):
        inner = torch.cat([past, x[b] @ layer.qkv_proj.weight.T])
        conv = sum(inner[i : i + 12] * layer.conv.weight[:, 0, i] for i in range(4))
        conv = conv / (1 + torch.exp(-conv))
        decays = -5 * torch.sigmoid(
            layer.A_log.exp()[:, None]
            * ((x[b] @ layer.f_a_proj.weight.T @ layer.f_b_proj.weight.T).view(12, heads, key_dim) + layer.dt_bias)
        )
        beta = torch.sigmoid(x[b] @ layer.b_proj.weight.T)
        gate = torch.sigmoid(x[b] @ layer.g_proj.weight.T).view(12, heads, value_dim)
        mixed = torch.empty(12, heads, value_dim, dtype=torch.float64)
        for h in range(heads):
            state = torch.zeros(key_dim, value_dim, dtype=torch.float64)
            for t in range(12):
                q, k = (conv[t, s * 30 + h * 10 : s * 30 + (h + 1) * 10] for s in (0, 1))
                v = conv[t, 60 + h * 14 : 60 + (h + 1) * 14]
                q, k = q / (q @ q + 1e-6).sqrt() / key_dim**0.5, k / (k @ k + 1e-6).sqrt()
                state = decays[t, h].exp()[:, None] * state
                state = state + torch.outer(k, beta[t, h] * (v - state.T @ k))
                mixed[t, h] = state.T @ q
            torch.testing.assert_close(cache.state[b + 1, h], state.T, rtol=1e-10, atol=1e-12)
        normed = mixed / (mixed.square().mean(-1, keepdim=True) + 1e-5).sqrt() * layer.o_norm.weight
        expected = (normed * gate).reshape(12, -1) @ layer.o_proj.weight.T
        torch.testing.assert_close(out[b], expected, rtol=1e-9, atol=1e-12)
