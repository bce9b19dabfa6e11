"""Every implementation of k31::skinny_linear against float64: one rounding of a float32 sum, wherever things lie."""

import pytest
import torch

import k31compile.kernels as kernels
from k31compile.errors import OperatorError
from k31compile.kernels.cpu.skinny_linear import MOST_ROWS, skinny_linear_provider

# The last ones: a piece of x in the first-level cache is shorter than the depth, and the last piece shorter still.
SIZES = [
    (1, 1),
    (17, 33),
    (64, 64),
    (7, 1),
    (1, 70),
    (130, 127),
    (33, 200),
    (50, 31),
    (9, 1095),
    (101, 2077),
    (35, 8600),
]
FLOATS = [torch.bfloat16, torch.float32]


def draw(rows, outputs, depth, bias=True, seed=0, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(seed)
    x, weight, added = (torch.randn(*s, generator=generator) for s in ((*rows, depth), (outputs, depth), (outputs,)))
    return x.to(dtype), weight.to(dtype), added.to(dtype) if bias else None


def assert_rounded_once(got, x, weight, bias=None):
    """Within half a unit of the dtype and what float32 may lose of the sum of absolute products."""
    unit = torch.finfo(x.dtype).eps / 2 if x.dtype == torch.bfloat16 else 0.0
    dtype = x.dtype
    x, weight = x.double(), weight.double()
    exact, absolute = x @ weight.T, x.abs() @ weight.abs().T
    if bias is not None:
        exact, absolute = exact + bias.double(), absolute + bias.double().abs()
    assert got.shape == exact.shape
    assert got.dtype == dtype
    assert got.is_contiguous()
    allowed = exact.abs() * unit + absolute * 2**-20
    assert ((got.double() - exact).abs() <= allowed).all(), ((got.double() - exact).abs() / allowed).max()


@pytest.mark.parametrize("rows", range(1, MOST_ROWS + 1))
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_odd_sizes(skinny_linear, rows, bias, dtype):
    for outputs, depth in SIZES:
        case = draw((rows,), outputs, depth, bias, dtype=dtype)
        assert_rounded_once(skinny_linear(*case), *case)


@pytest.mark.parametrize("shape", [(), (1, 3), (2, 1, 2), (2, 2, 1, 2)], ids=str)
def test_leading_dimensions(skinny_linear, shape):
    case = draw(shape, 37, 75)
    assert_rounded_once(skinny_linear(*case), *case)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_views_with_gaps(skinny_linear, dtype):
    x, weight, bias = draw((6,), 40, 90, dtype=dtype)
    views = x[::2, 5:70], weight[3::2, 5:70], bias[3::2]
    assert_rounded_once(skinny_linear(*views), *views)
    views = x[:4, ::2], weight[:, :45], bias.float()
    assert_rounded_once(skinny_linear(*views), *views)
    views = x.view(2, 3, 90).transpose(0, 1), weight, bias
    assert_rounded_once(skinny_linear(*views), *views)
    x, weight, bias = draw((44,), 40, 90, dtype=dtype)
    views = x[::2, 5:70], weight[3::2, 5:70], bias[3::2]
    assert_rounded_once(skinny_linear(*views), *views)
    views = x.view(4, 11, 90).transpose(0, 1), weight, bias
    assert_rounded_once(skinny_linear(*views), *views)


@pytest.mark.parametrize("shape", [(0, 5), (2, 0, 5), (3, 0)], ids=str)
def test_nothing_to_multiply(skinny_linear, shape):
    case = draw(shape[:-1], 4, shape[-1])
    torch.testing.assert_close(skinny_linear(*case), case[2].expand(*shape[:-1], 4), rtol=0, atol=0)
    assert skinny_linear(*draw((3,), 0, 5)).shape == (3, 0)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_what_is_beside_a_row_does_not_matter(skinny_linear, dtype):
    x, weight, bias = draw((MOST_ROWS,), 61, 1333, dtype=dtype)
    whole = skinny_linear(x, weight, bias)
    if skinny_linear is kernels.skinny_linear_reference:
        pytest.skip("torch's float32 product adds in an order that depends on the number of rows")
    for row in range(MOST_ROWS):
        assert torch.equal(skinny_linear(x[row], weight, bias), whole[row])
    assert torch.equal(skinny_linear(x[2:5], weight[7:], bias[7:]), whole[2:5, 7:])


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_stays_in_its_row_and_column(skinny_linear, value):
    x, weight, bias = draw((3,), 20, 41)
    x[1, 40], weight[7, 40] = value, value
    got = skinny_linear(x, weight, bias)
    want = torch.zeros(3, 20, dtype=torch.bool)
    want[1], want[:, 7] = True, True
    assert torch.equal(~got.isfinite(), want)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_threads_do_not_matter(two_threads, dtype):
    case = draw((3,), 1029, 700, dtype=dtype)
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        results.append(torch.ops.k31.skinny_linear(*case))
        assert_rounded_once(results[-1], *case)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("rows", [MOST_ROWS + 1, 12, 25, 130])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_many_rows(skinny_linear, rows, bias, dtype):
    for outputs, depth in SIZES:
        case = draw((rows,), outputs, depth, bias, dtype=dtype)
        assert_rounded_once(skinny_linear(*case), *case)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_what_is_beside_one_of_many_rows_does_not_matter(skinny_linear, dtype):
    if skinny_linear is kernels.skinny_linear_reference:
        pytest.skip("torch's float32 product adds in an order that depends on the number of rows")
    x, weight, bias = draw((50,), 61, 1333, dtype=dtype)
    whole = skinny_linear(x, weight, bias)
    assert torch.equal(skinny_linear(x[3:29], weight[7:], bias[7:]), whole[3:29, 7:])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("outputs", [20, 1029])
def test_threads_do_not_matter_to_many_rows(two_threads, dtype, outputs):
    case = draw((1301,), outputs, 150, dtype=dtype)
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        results.append(torch.ops.k31.skinny_linear(*case))
    assert_rounded_once(results[0], *case)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_other_dtypes_go_on():
    declines = skinny_linear_provider().declines
    x, weight, bias = draw((9,), 5, 7)
    assert declines(x, weight, bias) is None
    assert "float64" in declines(x[:1].double(), weight.double())
    assert "equal" in declines(x[:1].float(), weight)
    assert "gaps" in declines(x[:1], weight.T.contiguous().T)
    assert declines(x[:1], weight, bias) is None
    for run in (torch.ops.k31.skinny_linear, kernels.skinny_linear_reference):
        got = run(x.double(), weight.double(), bias)
        torch.testing.assert_close(got, x.double() @ weight.double().T + bias.double())
        assert_rounded_once(run(x, weight, bias), x, weight, bias)


@pytest.mark.parametrize(
    ("x", "weight", "bias", "said"),
    [
        (torch.zeros(()), torch.zeros(2, 3), None, "x must be"),
        (torch.zeros(3), torch.zeros(3), None, r"weight must be \[N, K\]"),
        (torch.zeros(1, 3), torch.zeros(2, 4), None, r"weight must have shape \[2, 3\]"),
        (torch.zeros(1, 3), torch.zeros(2, 3).bfloat16(), None, "they must be one"),
        (torch.zeros(1, 3), torch.zeros(2, 3), torch.zeros(3), r"bias must have shape \[2\]"),
        (torch.zeros(1, 3).int(), torch.zeros(2, 3).int(), None, "floating point"),
    ],
)
def test_bad_calls(x, weight, bias, said):
    with pytest.raises(OperatorError, match=said):
        torch.ops.k31.skinny_linear(x, weight, bias)
