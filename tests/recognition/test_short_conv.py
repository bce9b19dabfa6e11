"""The short convolution: the spellings of the corpus, states and lengths, and nothing that is only near."""

import pytest
import torch
import torch.nn.functional as F
from small_operators import NEAR_MISSES, SPELLINGS, cases, fates, passed, through, with_weights

from k31compile.model.short_conv import ShortConv
from k31compile.passes.recognise.short_conv import ShortConvRecogniser

NAME = "short_conv"
B, T, C, W = 2, 7, 24, 4
DTYPES = [torch.float32, torch.bfloat16]
MUTATED = {"grouped_conv1d_after_cat": 11, "no_activation": 11, "zeros_in_front": 5, "one_token_by_einsum": 1}


def normal(seed, *shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize(("name", "length", "dtype"), cases(SPELLINGS, NAME))
def test_spelling(name, length, dtype):
    result = passed(NAME, SPELLINGS[name], length, dtype)
    assert result.error <= (1e-6 if dtype == torch.float32 else 1e-2)
    assert result.count(NAME) == 1, result.reasons


@pytest.mark.parametrize(("name", "length", "dtype"), cases(NEAR_MISSES, NAME))
def test_near_miss(name, length, dtype):
    result = passed(NAME, NEAR_MISSES[name], length, dtype)
    assert result.error <= 1e-5
    assert not (NEAR_MISSES[name].excluded and result.count(NAME))


@pytest.mark.parametrize("length", [1, T])
@pytest.mark.parametrize("kept", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_model_of_the_house(dtype, kept, length):
    call, _ = with_weights(ShortConv(C, W))
    weight = normal(1, C, 1, W)
    x, state = normal(2, B, length, C, dtype=dtype), normal(3, B, W - 1, C, dtype=kept)
    plain = through(NAME, lambda *args: call(*args, None), lambda: [weight, x, state])
    lengths = torch.tensor([0, length - 1])
    padded = through(NAME, call, lambda: [weight, x, state, lengths])
    for result in (plain, padded):
        assert result.count(NAME) == 1, result.reasons
        assert result.error <= (1e-6 if dtype == torch.float32 else 1e-2)
        assert "cat" not in str(result.module.graph), "the window is still made"
    assert "actual_seq_lengths" in padded.call(NAME).kwargs


def module_with_bias(dtype):
    return torch.nn.Conv1d(C, C, W, groups=C, padding=W - 1).requires_grad_(False).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cut_first", [True, False])
def test_a_module_with_bias(dtype, cut_first):
    conv, weights = with_weights(module_with_bias(dtype))

    def call(weight, bias, x):
        y = conv(weight, bias, x.transpose(1, 2))
        y = F.silu(y[..., : x.shape[1]]) if cut_first else F.silu(y)[..., : x.shape[1]]
        return y.transpose(1, 2)

    result = through(NAME, call, lambda: [*weights, normal(4, B, T, C, dtype=dtype)])
    assert result.count(NAME) == 1, result.reasons
    assert result.error <= (1e-6 if dtype == torch.float32 else 1e-2)
    assert "bias" in result.call(NAME).kwargs


@pytest.mark.parametrize("length", [1, 5])
@pytest.mark.parametrize("kept", [W, W - 1])
def test_a_cache_that_is_written_in_place(kept, length):

    def update(x, cache, weight, bias):
        window = torch.cat([cache, x], dim=-1)
        cache.copy_(window[:, :, -cache.shape[-1] :])
        y = F.conv1d(window, weight, bias, padding=0, groups=C)
        return F.silu(y[:, :, -x.shape[-1] :])

    result = through(
        NAME, update, lambda: [normal(5, B, C, length), normal(6, B, C, kept), normal(7, C, 1, W), normal(8, C)]
    )
    assert result.count(NAME) == 1, result.reasons
    assert result.error <= 1e-6


def test_a_symbolic_length_stays_one():
    conv = module_with_bias(torch.float32)

    def call(x):
        return F.silu(conv(x.transpose(1, 2))[..., : x.shape[1]]).transpose(1, 2)

    result = through(NAME, call, lambda: [normal(7, B, T, C)], dynamic=True)
    assert result.count(NAME) == 1, result.reasons


def test_a_long_sequence_is_confirmed_at_a_short_one():
    weight = normal(8, 640, W)

    def call(x, state, weight):
        window, y = torch.cat([state, x], 1), 0
        for i in range(W):
            y = y + window[:, i : i + x.shape[1]] * weight[:, i]
        return F.silu(y), window[:, x.shape[1] :]

    result = through(NAME, call, lambda: [normal(9, 1, 2048, 640), normal(10, 1, W - 1, 640), weight])
    assert result.count(NAME) == 1, result.reasons
    assert result.error <= 1e-6


def slid(window, weight, length=T, places=range(W)):
    return sum(window[:, p : p + length] * weight[:, i] for i, p in enumerate(places))


def joined(x, state):
    return torch.cat([state, x], 1)


OTHERS = {
    "the sum is read too": lambda x, s, w: (F.silu(slid(joined(x, s), w)), slid(joined(x, s), w) * 2),
    "clamped inputs": lambda x, s, w: F.silu(slid(joined(x, s).clamp(-60, 60), w)),
    "clamped sum": lambda x, s, w: F.silu(slid(joined(x, s), w).clamp(-500, 500)),
    "steeper": lambda x, s, w: (y := slid(joined(x, s), w)) * torch.sigmoid(1.702 * y),
    "squared": lambda x, s, w: (y := slid(joined(x, s), w)) * y,
    "a state of zeros is kept": lambda x, s, w: (F.silu(slid(joined(x, s), w)), torch.zeros_like(s)),
    "the state before": lambda x, s, w: (F.silu(slid(joined(x, s), w)), joined(x, s)[:, T - 1 : T + 2]),
    "a state behind": lambda x, s, w: F.silu(slid(torch.cat([x, s], 1), w)),
    "a bias for each row": lambda x, s, w: F.silu(slid(joined(x, s), w) + x[:, :, :1]),
    "same padding": lambda x, s, w: F.silu(F.conv1d(x.mT, w[:, None], padding="same", groups=C)).mT,
    "strided": lambda x, s, w: F.silu(F.conv1d(joined(x, s).mT, w[:, None], stride=2, groups=C)).mT,
    "three of four": lambda x, s, w: F.silu(slid(joined(x, s), w[:, :3], T, range(3))),
}


@pytest.mark.parametrize("name", OTHERS)
def test_numbers_stay_those_of_the_author(name):
    """Where a part is the operator after all it may be fused; nothing may change."""
    made = [100 * normal(11, B, T, C), normal(12, B, W - 1, C), 10 * normal(13, C, W)]
    result = through(NAME, OTHERS[name], lambda: [x.clone() for x in made])
    assert result.error <= 1e-6


STRANGERS = {
    "pointwise": lambda x, s, w: F.conv1d(x.mT, w[:, :1, None].expand(C, C, 1)),
    "two groups": lambda x, s, w: F.conv1d(x.mT, w.expand(12, C, W).mT.reshape(24, 12, W)[:, :12], groups=2),
    "a few experts": lambda x, s, w: (x @ w).softmax(-1),
    "image": lambda x, s, w: F.conv2d(x.mT[:, :, None], w[:, None, :, None].expand(-1, -1, -1, 1), padding=2, groups=C),
}


@pytest.mark.parametrize("name", STRANGERS)
def test_strangers_are_not_mentioned(name):
    made = [normal(14, B, T, C), normal(15, B, W - 1, C), normal(16, C, W)]
    result = through(NAME, STRANGERS[name], lambda: [x.clone() for x in made])
    assert (result.count(NAME), result.reasons) == (0, [])


@pytest.mark.parametrize("name", MUTATED)
def test_no_mutant_is_taken_wrongly(name):
    count, false = fates(ShortConvRecogniser(), SPELLINGS[name], MUTATED[name], every=4)
    assert not false, "\n".join(f"{verdict.name}: {verdict.detail}" for verdict in false)
    assert count["killed"] > 0
