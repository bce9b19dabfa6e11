"""Every implementation of k31::kda_recurrent and k31::kda_chunk against the recurrence in float64."""

import pytest
import torch
from delta_cases import definition, draw, relative, value_first, within

import k31compile.kernels as kernels
from k31compile.model.delta_rule import kda_chunk as plain_chunk

BOUND = 6e-7
LENGTHS = (1, 3, 15, 16, 17, 63, 64, 65)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("sizes", [(5, 7), (40, 24), (16, 33)], ids=str)
def test_equals_the_recurrence(delta, length, sizes):
    case = draw(2, length, 3, *sizes)
    got = delta(**case, scale=0.3)
    assert got[0].dtype == got[1].dtype == torch.float32
    within(BOUND, got, definition(**case, scale=0.3))


def test_heads_of_k31(delta):
    case = draw(2, 37, 3, 128, 128)
    within(BOUND, delta(**case, scale=128**-0.5), definition(**case, scale=128**-0.5))


def test_five_hundred_tokens(delta):
    case = draw(2, 500, 3, 12, 20, strength=0.5)
    within(BOUND, delta(**case), definition(**case))


@pytest.mark.parametrize("form", ["recurrent", "chunk"])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("strength", [0.1, 5.0, 60.0])
def test_references_in_float64(form, length, strength):
    case = draw(2, length, 3, 5, 7, strength=strength, dtype=torch.float64)
    got = getattr(kernels, f"kda_{form}_reference")(**case, scale=1.7)
    assert got[0].dtype == got[1].dtype == torch.float64
    within(1e-13, got, definition(**case, scale=1.7))


@pytest.mark.parametrize("length", [1, 21])
def test_the_layout_of_the_state_is_honoured(delta, length):
    case = draw(2, length, 3, 10, 21)
    output, last = delta(**case)
    other_output, other_last = delta(**value_first(case))
    assert last.shape == (2, 3, 10, 21)
    assert other_last.shape == (2, 3, 21, 10)
    assert last.is_contiguous()
    assert other_last.is_contiguous()
    within(BOUND, (other_output, other_last.mT), definition(**case))
    within(BOUND, (output, last), definition(**case))


@pytest.mark.parametrize("length", [1, 6, 35])
def test_bfloat16_loses_nothing_in_the_kernel(delta, length):
    case = draw(2, length, 3, 20, 12, dtype=torch.bfloat16)
    got = delta(**case)
    assert got[0].dtype == got[1].dtype == torch.float32
    within(BOUND, got, definition(**case))
    within(BOUND, (got[0], delta(**value_first(case))[1].mT), definition(**case))


@pytest.mark.parametrize("form", ["recurrent", "chunk"])
@pytest.mark.parametrize("odd", ["query", "key", "value", "gate", "beta", "initial_state"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_any_mix_of_dtypes(form, odd, dtype):
    case = draw(2, 9, 3, 6, 10)
    case[odd] = case[odd].to(dtype)
    got = getattr(torch.ops.k31, f"kda_{form}")(**case)
    wide = dtype == torch.float64
    assert got[0].dtype == got[1].dtype == (torch.float64 if wide else torch.float32)
    within(1e-13 if wide else BOUND, got, definition(**case))


@pytest.mark.parametrize("length", [1, 19])
def test_strides_are_followed(delta, length):
    """Heads before tokens, channels within a wider row, a state that is one of a pool's, channels not side by side."""
    case = draw(2, length, 3, 10, 21)
    expected = definition(**case)
    transposed = {n: x.transpose(1, 2).contiguous().transpose(1, 2) for n, x in case.items() if n != "initial_state"}
    pool = torch.full((2, 5, 4, 11, 30), torch.nan)
    pool[:, 3, :3, :10, 4:25] = case["initial_state"]
    within(BOUND, delta(**transposed, initial_state=pool[:, 3, :3, :10, 4:25]), expected)
    row = torch.cat([case["query"], case["key"], case["value"]], -1)
    parts = dict(zip(("query", "key", "value"), row.split([10, 10, 21], -1), strict=True))
    within(BOUND, delta(**case | parts), expected)
    scattered = {n: torch.stack((x, x * torch.nan), -1)[..., 0] for n, x in case.items()}
    within(BOUND, delta(**scattered), expected)


def test_the_initial_state_is_left_alone(delta):
    for length in (0, 1, 20):
        case = draw(2, length, 3, 5, 7)
        before = case["initial_state"].clone()
        output, last = delta(**case)
        assert torch.equal(case["initial_state"], before)
        assert last.data_ptr() != case["initial_state"].data_ptr()
        assert length or torch.equal(last, before)
        assert output.shape == (2, length, 3, 7)


@pytest.mark.parametrize("empty", [(0, 3, 2, 5, 7), (2, 3, 0, 5, 7), (2, 20, 3, 0, 7), (2, 20, 3, 5, 0)], ids=str)
def test_empty_sizes(delta, empty):
    batch, tokens, heads, width, depth = empty
    output, last = delta(**draw(*empty))
    assert output.shape == (batch, tokens, heads, depth)
    assert last.shape == (batch, heads, width, depth)
    assert not output.any()


@pytest.mark.parametrize("strength", [0.02, 1.0, 5.0])
@pytest.mark.parametrize("alike", [False, True])
def test_chunks_are_as_accurate_as_plain_chunks(chunk, strength, alike):
    case = draw(2, 200, 3, 64, 48, strength=strength, seed=3)
    if alike:
        case["key"] = case["key"][:, :1].expand_as(case["key"])
    exact = definition(**case)
    plain = plain_chunk(*case.values())
    for ours, theirs, gold in zip(chunk(**case), plain, exact, strict=True):
        assert relative(ours, gold) < 1.05 * relative(theirs, gold)


def test_tokens_at_once_are_the_bits_of_tokens_one_by_one(recurrent):
    case = draw(2, 7, 3, 20, 12)
    at_once, last = recurrent(**case)
    state = case.pop("initial_state")
    for t in range(7):
        step, state = recurrent(**{name: x[:, t : t + 1] for name, x in case.items()}, initial_state=state)
        assert torch.equal(step, at_once[:, t : t + 1])
    assert torch.equal(state, last)
