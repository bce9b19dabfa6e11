"""The KDA delta rule: both forms against each other, against transformers and against its definition."""

import pytest
import torch

from k31compile.model.delta_rule import kda_chunk, kda_gate, kda_recurrent

B, H, K, V = 2, 3, 5, 7
LENGTHS = (1, 15, 16, 17, 63, 64, 65, 130)


def sample(length, dtype=torch.float64, strength=5.0, seed=0, key=K, value=V):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k = normal(B, length, H, key), torch.nn.functional.normalize(normal(B, length, H, key), dim=-1)
    g = -strength * torch.rand(B, length, H, key, generator=generator, dtype=torch.float64)
    beta = torch.sigmoid(normal(B, length, H))
    everything = (q, k, normal(B, length, H, value), g, beta, normal(B, H, key, value))
    return tuple(x.to(dtype) for x in everything)


def relative(actual, expected):
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def test_recurrent_is_the_matrix_recurrence():
    q, k, v, g, beta, state = sample(9)
    o, last = kda_recurrent(q, k, v, g, beta, state)
    s = state.clone()
    eye = torch.eye(K, dtype=torch.float64)
    for t in range(9):
        for b in range(B):
            for h in range(H):
                kt, bt = k[b, t, h], beta[b, t, h]
                s[b, h] = (eye - bt * torch.outer(kt, kt)) @ torch.diag(g[b, t, h].exp()) @ s[b, h]
                s[b, h] += bt * torch.outer(kt, v[b, t, h])
                torch.testing.assert_close(o[b, t, h], s[b, h].T @ q[b, t, h], rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(last, s, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("strength", [0.1, 5.0])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-13), (torch.float32, 2e-6)])
def test_chunk_equals_recurrent(length, strength, dtype, bound):
    gold, gold_state = kda_recurrent(*sample(length, strength=strength))
    o, state = kda_chunk(*sample(length, dtype, strength))
    assert o.dtype == state.dtype == dtype
    assert o.shape == (B, length, H, V)
    assert state.shape == (B, H, K, V)
    assert relative(o, gold) < bound
    assert relative(state, gold_state) < bound


@pytest.mark.parametrize("chunk", [1, 3, 16, 64])
def test_the_chunk_size_does_not_matter(chunk):
    gold, _ = kda_recurrent(*sample(37))
    assert relative(kda_chunk(*sample(37), chunk=chunk)[0], gold) < 1e-13


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-13), (torch.float32, 2e-6)])
def test_anchored_products_equal_the_recurrent_form(length, dtype, bound):
    gold, gold_state = kda_recurrent(*sample(length))
    o, state = kda_chunk(*sample(length, dtype), anchored=True)
    assert relative(o, gold) < bound
    assert relative(state, gold_state) < bound


@pytest.mark.parametrize("strength", [0.1, 5.0])
def test_anchored_products_have_the_same_gradients(strength):
    def gradients(anchored):
        inputs = [x.requires_grad_() for x in sample(37, strength=strength)]
        with torch.enable_grad():
            o, last = kda_chunk(*inputs, anchored=anchored)
            return torch.autograd.grad(o.square().sum() + last.square().sum(), inputs)

    for direct, other in zip(gradients(False), gradients(True), strict=True):
        assert relative(other, direct) < 1e-11


@pytest.mark.parametrize(("chunk", "length", "anchored"), [(16, 130, False), (64, 65, False), (16, 130, True)])
def test_the_strongest_gate_stays_finite_and_right(chunk, length, anchored):
    q, k, v, g, beta, state = sample(length, torch.float32)
    g = torch.full_like(g, -5.0)
    o, last = kda_chunk(q, k, v, g, beta, state, chunk=chunk, anchored=anchored)
    gold, gold_last = kda_recurrent(*(x.double() for x in (q, k, v, g, beta, state)))
    assert torch.isfinite(o).all()
    assert torch.isfinite(last).all()
    assert relative(o, gold) < 2e-6
    assert relative(last, gold_last) < 2e-6


@pytest.mark.parametrize("form", [kda_recurrent, kda_chunk])
def test_two_halves_make_the_whole(form):
    q, k, v, g, beta, state = sample(41)
    gold, gold_last = kda_recurrent(q, k, v, g, beta, state)
    first, middle = form(q[:, :23], k[:, :23], v[:, :23], g[:, :23], beta[:, :23], state)
    second, last = form(q[:, 23:], k[:, 23:], v[:, 23:], g[:, 23:], beta[:, 23:], middle)
    assert relative(torch.cat([first, second], 1), gold) < 1e-13
    assert relative(last, gold_last) < 1e-13


@pytest.mark.parametrize("form", [kda_recurrent, kda_chunk])
def test_tokens_with_zero_gate_and_beta_leave_the_state_alone(form):
    q, k, v, g, beta, state = sample(21)
    gold = kda_recurrent(*(x[:, :13] for x in (q, k, v, g, beta)), state)[1]
    g[:, 13:], beta[:, 13:] = -0.0, 0.0
    assert relative(form(q, k, v, g, beta, state)[1], gold) < 1e-13


def test_gate_forms():
    raw = torch.tensor([[[[0.3, -40.0, 40.0]]]], dtype=torch.float64)
    a_log, bias = torch.tensor([0.2], dtype=torch.float64), torch.tensor([[0.1, -0.2, 0.4]], dtype=torch.float64)
    rate = torch.tensor(0.2, dtype=torch.float64).exp()
    bounded = kda_gate(raw, a_log, bias, -5.0)
    torch.testing.assert_close(bounded[0, 0, 0, 0], -5 / (1 + torch.exp(-rate * 0.4)), rtol=1e-12, atol=0)
    assert -1e-12 < bounded[0, 0, 0, 1] <= 0
    assert -5.0 <= bounded[0, 0, 0, 2] < -4.999
    free = kda_gate(raw, a_log, bias, None)
    expected = -rate * torch.log1p(torch.exp(torch.tensor(0.4, dtype=torch.float64)))
    torch.testing.assert_close(free[0, 0, 0, 0], expected, rtol=1e-12, atol=0)
    assert free[0, 0, 0, 2] < -40


@pytest.mark.parametrize("bound", [-5.0, None])
def test_a_raw_gate_of_minus_infinity_means_no_decay(bound):
    g = kda_gate(torch.full((1, 1, H, K), -torch.inf), torch.zeros(H), torch.randn(H, K), bound)
    assert (g == 0).all()
    assert kda_gate(torch.zeros(1, 1, H, K), torch.zeros(H), torch.ones(H, K), bound).max() < -0.5


@pytest.mark.parametrize("name", ["recurrent_kimi_delta_attention", "chunk_kimi_delta_attention"])
@pytest.mark.parametrize("length", [1, 16, 37, 65])
def test_agrees_with_transformers(name, length, transformers_model):
    reference = transformers_model("kimi_linear")
    q, k, v, g, beta, state = sample(length, torch.float32, strength=2.0)
    o, last = getattr(reference, name)(
        q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=False
    )
    for form in (kda_recurrent, kda_chunk):
        ours, ours_last = form(q * K**-0.5, k, v, g, beta, state)
        assert relative(ours, o) < 3e-6
        assert relative(ours_last, last) < 3e-6
