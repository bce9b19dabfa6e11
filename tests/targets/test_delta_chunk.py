"""The delta rule over many tokens as an NPU runs it: against its definition, and where a series would lose all."""

import pytest
import torch

import k31compile.targets.ascend.lowerings  # noqa: F401  (registers them)
from k31compile.errors import TargetError
from k31compile.kernels.registry import OPERATORS
from k31compile.targets.ascend.lowerings.delta_chunk import MOST_CHUNKED_TOKENS, kda_chunk, too_long
from k31compile.targets.ascend.lowerings.registry import FORMULA, LOWERINGS, choose
from k31compile.targets.ascend.profiles import PROFILES

A3 = PROFILES["ascend-a3"]
TOKENS = [1, 2, 15, 63, 64, 65, 130]
BOUND = 1e-11


def operands(tokens, scalar=False, seed=0, batch=2, heads=3, width=8, depth=5):
    """Float64 operands as a layer makes them: unit keys, gates at most 0, beta within 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
    unit = lambda x: x / x.norm(dim=-1, keepdim=True)  # noqa: E731
    gate = -draw(batch, tokens, heads).abs() if scalar else -draw(batch, tokens, heads, width).abs() * 2
    rows = (batch, tokens, heads)
    state = draw(batch, heads, width, depth)
    return [unit(draw(*rows, width)), unit(draw(*rows, width)), draw(*rows, depth), gate, torch.sigmoid(draw(*rows)),
            state]  # fmt: skip


def formula_of(operator):
    (found,) = [one for one in LOWERINGS[operator] if one.provider == FORMULA]
    return lambda *args, **kwargs: found.run(A3, *args, **kwargs)


def hold(operator, *args, bound=BOUND, **options):
    got, expected = formula_of(operator)(*args, **options), OPERATORS[operator].reference(*args, **options)
    for one, other in zip(got, expected, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert one.is_contiguous()
        torch.testing.assert_close(one, other, rtol=bound, atol=bound)


@pytest.mark.parametrize("layout", ["KV", "VK"])
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("operator", ["kda_chunk", "gated_delta_chunk", "kda_recurrent", "gated_delta_recurrent"])
def test_it_is_the_definition(operator, tokens, layout):
    args = operands(tokens, scalar=operator.startswith("gated"), seed=tokens)
    args[-1] = args[-1].mT.contiguous() if layout == "VK" else args[-1]
    hold(operator, *args, scale=0.3, state_layout=layout)


@pytest.mark.parametrize("tokens", [1, 65])
def test_no_state_is_a_state_of_zeros(tokens):
    *args, _ = operands(tokens)
    hold("kda_chunk", *args)
    hold("kda_chunk", *args, state_layout="VK")


@pytest.mark.parametrize("tokens", [15, 65, 130])
def test_a_state_is_carried_from_one_call_to_the_next(tokens):
    *rows, state = operands(tokens)
    whole, last = kda_chunk(*rows, state)
    cut = tokens // 3 + 1
    early, between = kda_chunk(*(x[:, :cut] for x in rows), state)
    late, after = kda_chunk(*(x[:, cut:] for x in rows), between)
    torch.testing.assert_close(torch.cat((early, late), dim=1), whole, rtol=BOUND, atol=BOUND)
    torch.testing.assert_close(after, last, rtol=BOUND, atol=BOUND)


def test_a_gate_of_minus_infinity_forgets_its_channel_alone():
    args = operands(70)
    args[3][:, 5, :, 2] = -torch.inf
    args[3][:, 31:34] = -torch.inf
    hold("kda_chunk", *args)
    assert all(x.isfinite().all() for x in kda_chunk(*args))


def test_tokens_of_padding_leave_the_state_as_it_was():
    args = operands(20)
    args[3][:, 13:], args[4][:, 13:] = 0, 0
    _, whole = kda_chunk(*args)
    _, cut = kda_chunk(*(x[:, :13] for x in args[:5]), args[5])
    torch.testing.assert_close(whole, cut, rtol=BOUND, atol=BOUND)


def test_keys_that_coincide_lose_nothing_in_float32():
    unit = torch.zeros(1, 64, 1, 16)
    unit[..., 0] = 1
    value = torch.randn(1, 64, 1, 16, generator=torch.Generator().manual_seed(0))
    gate, beta = torch.full((1, 64, 1, 16), -1e-4), torch.sigmoid(torch.full((1, 64, 1), 8.0))
    state = torch.zeros(1, 1, 16, 16)
    args = (unit, unit, value, gate, beta, state)
    output, last = kda_chunk(*args)
    exact, exact_last = OPERATORS["kda_recurrent"].reference(*(x.double() for x in args))
    torch.testing.assert_close(output.double(), exact, rtol=0, atol=1e-4)
    torch.testing.assert_close(last.double(), exact_last, rtol=0, atol=1e-4)
    torch.testing.assert_close(output, value, rtol=0, atol=2e-3)


@pytest.mark.parametrize("strength", [1e-4, 1.0, 5.0, 40.0])
def test_float32_stays_near_float64_under_any_decay(strength):
    args = operands(130, seed=7, width=32, depth=32)
    args[3] = args[3] * strength
    for one, other in zip(kda_chunk(*(x.float() for x in args)), kda_chunk(*args), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)


def test_what_is_too_long_or_ragged_is_refused_with_a_remedy():
    query = torch.empty(1, MOST_CHUNKED_TOKENS + 1, 1, 1, device="meta")
    assert "prefill in pieces" in too_long(A3, query)[0]
    assert too_long(A3, query[:, 1:]) == []
    rows = [torch.empty(1, 5, 1, 2, device="meta") for _ in range(4)]
    beta, state = torch.empty(1, 5, 1, device="meta"), torch.empty(2, 1, 2, 2, device="meta")
    with pytest.raises(TargetError, match="each sequence a row of its own"):
        choose("kda_chunk", A3, *rows, beta, state, cu_seqlens=torch.tensor([0, 2, 5]))
