"""Every implementation of k31::short_conv against a loop in float64 and against the forms that people write."""

import pytest
import torch
import torch.nn.functional as F

import k31compile.kernels as kernels
from k31compile.errors import OperatorError
from k31compile.model.short_conv import ShortConv

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def definition(x, weight, bias=None, state=None, actual_seq_lengths=None, activation="silu"):
    """Token by token and tap by tap, over lists of what came in."""
    batch, length, channels = x.shape
    taps = weight.shape[1]
    y = torch.zeros(batch, length, channels, dtype=torch.float64)
    new = torch.zeros(batch, taps - 1, channels, dtype=torch.float64)
    for b in range(batch):
        past = torch.zeros(taps - 1, channels) if state is None else state[b]
        inputs = [*past.double(), *x[b].double()]
        for t in range(length):
            total = torch.zeros(channels, dtype=torch.float64) if bias is None else bias.double()
            for i in range(taps):
                total = total + weight[:, i].double() * inputs[t + i]
            y[b, t] = total / (1 + torch.exp(-total)) if activation == "silu" else total
        valid = length if actual_seq_lengths is None else min(max(int(actual_seq_lengths[b]), 0), length)
        for j in range(taps - 1):
            new[b, j] = inputs[valid + j]
    return y, new


def draw(batch=2, length=7, channels=11, taps=4, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    return {
        "x": normal(batch, length, channels).to(dtype),
        "weight": normal(channels, taps),
        "bias": normal(channels),
        "state": normal(batch, taps - 1, channels).to(dtype),
    }


def assert_near(got, want, dtype):
    bound = 1e-6 if dtype == torch.float32 else 4e-3
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), want, rtol=bound, atol=bound)


SIZES = [  # batch, tokens, channels, taps: no two alike
    (1, 2, 3, 4),
    (2, 1, 5, 4),
    (2, 7, 11, 3),
    (3, 5, 17, 2),
    (2, 6, 9, 1),
    (2, 3, 65, 7),
    (2, 83, 300, 4),
    (3, 19, 263, 5),
]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("activation", ["silu", "none"])
@DTYPES
def test_odd_sizes(short_conv, size, activation, dtype):
    case = draw(*size, dtype=dtype) | {"activation": activation}
    want = definition(**case)
    y, state = short_conv(**case)
    assert_near(y, want[0], dtype)
    assert torch.equal(state.double(), want[1])
    assert state.dtype == dtype
    assert y.is_contiguous()


@pytest.mark.parametrize("order", [(0, 2, 1), (2, 1, 0), (1, 0, 2)], ids=str)
@pytest.mark.parametrize("size", [(2, 83, 71, 4), (3, 2, 300, 4), (2, 70, 263, 3)], ids=str)
@DTYPES
def test_any_strides(short_conv, order, size, dtype):
    case = draw(*size, dtype=dtype)
    y, state = short_conv(**case)
    inverse = [order.index(i) for i in range(3)]
    for name in ("x", "state"):
        case[name] = case[name].permute(order).contiguous().permute(inverse)
    case["weight"] = case["weight"].T.contiguous().T
    got = short_conv(**case)
    assert torch.equal(got[0], y)
    assert torch.equal(got[1], state)


def test_channels_sliced_out_of_something_larger(short_conv):
    case = draw(2, 9, 13)
    want = short_conv(**case)
    for name in ("x", "state"):
        case[name] = torch.cat((case[name] * torch.nan, case[name], case[name]), -1)[..., 13:26]
    case["bias"] = torch.stack((case["bias"], case["bias"] + 1), 1)[:, 0]
    assert all(map(torch.equal, short_conv(**case), want))


@pytest.mark.parametrize("names", [("x",), ("state",), ("weight", "bias"), ("x", "weight")], ids=str)
def test_mixed_dtypes(short_conv, names):
    case = draw(2, 6, 21)
    for name in names:
        case[name] = case[name].bfloat16()
    want = definition(**case)
    y, state = short_conv(**case)
    assert_near(y, want[0], case["x"].dtype)
    assert state.dtype == case["state"].dtype
    assert torch.equal(state, want[1].to(state.dtype))


def test_without_a_state_zeros_came_before(short_conv):
    case = draw(2, 2, 10, dtype=torch.bfloat16)
    zeros = short_conv(**case | {"state": torch.zeros_like(case["state"])})
    assert all(map(torch.equal, short_conv(**case | {"state": None}), zeros))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8], ids=str)
def test_padding_never_enters_the_state(short_conv, dtype):
    case = draw(5, 6, 9)
    lengths = [6, 0, 2, 4, 3]
    for b, n in enumerate(lengths):
        case["x"][b, n:] = torch.nan
    case["actual_seq_lengths"] = torch.tensor(lengths, dtype=dtype)
    want = definition(**case)
    y, state = short_conv(**case)
    assert torch.equal(state.double(), want[1])
    assert torch.equal(state[1], case["state"][1])
    for b, n in enumerate(lengths):
        assert_near(y[b, :n], want[0][b, :n], torch.float32)


def test_lengths_beyond_the_tokens_are_clamped(short_conv):
    case = draw(2, 5, 6)
    got = short_conv(**case, actual_seq_lengths=torch.tensor([9, -3]))
    assert all(map(torch.equal, got, short_conv(**case, actual_seq_lengths=torch.tensor([5, 0]))))


@pytest.mark.parametrize("cut", [0, 1, 2, 5, 8])
def test_two_calls_are_one(short_conv, cut):
    case = draw(2, 8, 19)
    whole = short_conv(**case)
    first, state = short_conv(**case | {"x": case["x"][:, :cut]})
    second, state = short_conv(**case | {"x": case["x"][:, cut:], "state": state})
    joined = torch.cat((first, second), 1)
    if short_conv is kernels.short_conv_reference:  # torch's SiLU gives a number another last bit at another place
        torch.testing.assert_close(joined, whole[0], rtol=1e-6, atol=1e-7)
    else:
        assert torch.equal(joined, whole[0])
    assert torch.equal(state, whole[1])


@pytest.mark.parametrize("size", [(2, 0, 5, 4), (0, 3, 5, 4), (2, 3, 0, 4)], ids=str)
def test_nothing_to_convolve(short_conv, size):
    case = draw(*size)
    y, state = short_conv(**case)
    assert y.shape == case["x"].shape
    assert state.shape == case["state"].shape
    if size[1] == 0:
        assert torch.equal(state, case["state"])


def test_extreme_numbers(short_conv):
    weight = torch.tensor([[1.0]])
    x = torch.tensor([-1e30, -100.0, -80.0, -0.0, 80.0, 1e30, torch.inf, torch.nan]).view(1, 8, 1)
    y = short_conv(x, weight)[0].flatten()
    torch.testing.assert_close(y[:6], F.silu(x.flatten()[:6]), rtol=1e-5, atol=1e-30)
    assert y[6] == torch.inf
    assert y[7].isnan()


@DTYPES
def test_as_the_model_writes_it(short_conv, dtype):
    module = ShortConv(14, 4)
    case = draw(2, 9, 14, dtype=dtype)
    module.weight.data = case["weight"][:, None]
    lengths = torch.tensor([9, 5])
    want = module(case["x"], case["state"], lengths)
    y, state = short_conv(case["x"], case["weight"], state=case["state"], actual_seq_lengths=lengths)
    assert_near(y, want[0].double(), dtype)
    assert torch.equal(state, want[1])


@pytest.mark.parametrize("form", ["padded", "cached", "unfold", "shifted"])
def test_as_others_write_it(short_conv, form):
    case = draw(2, 9, 14)
    x, weight, bias = case["x"].transpose(1, 2), case["weight"], case["bias"]
    window = torch.cat((case["state"].transpose(1, 2), x), -1)
    if form == "padded":
        case["state"] = None
        want = F.silu(F.conv1d(x, weight[:, None], bias, padding=3, groups=14)[..., :9])
    elif form == "cached":
        want = F.silu(F.conv1d(window, weight[:, None], bias, groups=14))
    elif form == "unfold":
        want = F.silu((window.unfold(-1, 4, 1) * weight[:, None]).sum(-1) + bias[:, None])
    else:
        want = F.silu(bias[:, None] + sum(window[..., i : i + 9] * weight[:, i : i + 1] for i in range(4)))
    assert_near(short_conv(**case)[0], want.transpose(1, 2).double(), torch.float32)


@pytest.mark.parametrize("transposed", [False, True])
def test_threads_agree(short_conv, two_threads, transposed):
    case = draw(3, 260, 400, dtype=torch.bfloat16)
    if transposed:
        case["x"] = case["x"].transpose(1, 2).contiguous().transpose(1, 2)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(short_conv(**case))
    for y, state in results[1:]:
        assert torch.equal(y, results[0][0])
        assert torch.equal(state, results[0][1])


def test_many_taps_go_to_the_reference():
    case = draw(2, 5, 3, 65)
    assert "65 taps" in kernels.OPERATORS["short_conv"].providers[0].declines(**case)
    assert_near(torch.ops.k31.short_conv(**case)[0], definition(**case)[0], torch.float32)


def test_float64_stays_float64():
    case = {name: tensor.double() for name, tensor in draw(2, 6, 5).items()}
    y, state = torch.ops.k31.short_conv(**case)
    torch.testing.assert_close(y, definition(**case)[0], rtol=1e-14, atol=1e-14)
    assert state.dtype == torch.float64


@pytest.mark.parametrize("utility", ["test_schema", "test_faketensor"])
def test_opcheck(utility):
    case = draw(2, 5, 6) | {"actual_seq_lengths": torch.tensor([5, 2])}
    arguments = (case.pop("x"), case.pop("weight"))
    torch.library.opcheck(torch.ops.k31.short_conv.default, arguments, case, test_utils=utility)
    torch.library.opcheck(
        torch.ops.k31.short_conv.default, (arguments[0].mT.contiguous().mT, arguments[1]), test_utils=utility
    )


BAD_CALLS = [
    ({"x": torch.ones(2, 7)}, r"x must be \[B, T, C\], not \[2, 7\]"),
    ({"x": torch.ones(2, 7, 11).int()}, "x must be floating point"),
    ({"weight": torch.ones(11, 1, 4)}, r"weight must be \[C, W\]"),
    ({"weight": torch.ones(12, 4)}, r"weight must have shape \[11, 4\], not \[12, 4\]"),
    ({"weight": torch.ones(11, 0)}, "at least one tap"),
    ({"weight": torch.ones(11, 4, device="meta")}, "weight is on meta, x on cpu"),
    ({"bias": torch.ones(4)}, r"bias must have shape \[11\]"),
    ({"state": torch.ones(2, 4, 11)}, r"state must have shape \[2, 3, 11\], not \[2, 4, 11\]"),
    ({"state": torch.ones(2, 3, 11).long()}, "state must be floating point"),
    ({"actual_seq_lengths": torch.ones(2)}, "actual_seq_lengths must hold integers"),
    ({"actual_seq_lengths": torch.ones(3).int()}, r"actual_seq_lengths must have shape \[2\]"),
    ({"activation": "relu"}, "activation must be 'silu' or 'none', not 'relu'"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_CALLS, ids=[message for _, message in BAD_CALLS])
def test_bad_calls_are_refused_by_name(short_conv, changes, message):
    with pytest.raises(OperatorError, match=message):
        short_conv(**draw() | changes)
