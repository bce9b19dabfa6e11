"""Every implementation of k31::mega_kda against float64, and against the chain of operators that it stands for."""

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import k31compile.kernels as kernels
from k31compile.errors import OperatorError
from k31compile.kernels.cpu import loader
from k31compile.kernels.cpu.mega_kda import mega_kda_provider

EPS = 1e-5
SIZES = [  # B, T, H, K, V, W
    (2, 1, 3, 5, 7, 4),
    (2, 5, 3, 6, 7, 4),
    (1, 1, 2, 33, 65, 3),
    (3, 2, 1, 16, 48, 1),
    (2, 1, 5, 130, 19, 6),
    (1, 9, 2, 300, 12, 4),
]
BOUNDS = pytest.mark.parametrize("lower_bound", [None, -5.0])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def draw(sizes=SIZES[0], dtype=torch.float32, streams=1, seed=0, **more):
    """Arguments whose activations and caches are of `dtype`, weights and the state of float32."""
    batch, tokens, heads, width, depth, taps = sizes
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    split = [heads * width, heads * width, heads * depth]
    case = {
        "x": normal(batch, tokens, sum(split)).to(dtype),
        "conv_weight": normal(sum(split), taps),
        "conv_state": normal(batch, taps - 1, sum(split)).to(dtype),
        "raw_gate": 2 * normal(batch, tokens, heads, width).to(dtype),
        "a_log": normal(heads),
        "dt_bias": normal(heads, width),
        "raw_beta": normal(batch, tokens, heads).to(dtype),
        "state": normal(batch, heads, width, depth),
        "out_gate": normal(batch, tokens, heads, depth).to(dtype),
        "norm_weight": normal(depth),
        "norm_eps": EPS,
        "scale": width**-0.5,
    }
    for name, dim in (("x", 2), ("conv_weight", 0), ("conv_state", 2)):
        case[name] = [case[name]] if streams == 1 else [part.contiguous() for part in case[name].split(split, dim)]
    return case | more


def each(case, change):
    """The case with every tensor changed."""
    return {
        name: [change(x) for x in value] if isinstance(value, list) else change(value) if is_tensor(value) else value
        for name, value in case.items()
    }


def is_tensor(value):
    return isinstance(value, torch.Tensor)


def definition(case):
    """Head by head and token by token in float64, without any rounding."""
    given = each(case, lambda x: x.double())
    x, weight, before = (torch.cat(given[name], dim) for name, dim in (("x", 2), ("conv_weight", 0), ("conv_state", 2)))
    batch, tokens, heads, width = given["raw_gate"].shape
    depth, taps = given["out_gate"].shape[3], weight.shape[1]
    bound, rate = case.get("lower_bound"), given["a_log"].exp()
    window = torch.cat([before, x], 1)
    result, last = torch.zeros(batch, tokens, heads, depth).double(), given["state"].clone()
    for b, h, t in torch.cartesian_prod(*(torch.arange(n) for n in (batch, heads, tokens))).tolist():
        y = sum(window[b, t + i] * weight[:, i] for i in range(taps))
        y = y / (1 + (-y).exp())
        ends = [h * width, heads * width + h * width, 2 * heads * width + h * depth]
        q, k, v = (y[end : end + size] for end, size in zip(ends, (width, width, depth), strict=True))
        q, k = (u / math.sqrt(float(u.square().sum()) + case.get("l2_eps", 1e-6)) for u in (q, k))
        shifted = given["raw_gate"][b, t, h] + given["dt_bias"][h]
        decay = -rate[h] * shifted.exp().log1p() if bound is None else bound / (1 + (-rate[h] * shifted).exp())
        beta = case.get("beta_factor", 1.0) / (1 + math.exp(-float(given["raw_beta"][b, t, h])))
        s = decay.exp()[:, None] * last[b, h]
        s = s + torch.outer(k, beta * (v - k @ s))
        o = case["scale"] * (q @ s)
        opening = 1 / (1 + (-given["out_gate"][b, t, h]).exp())
        result[b, t, h] = o / math.sqrt(float(o.square().mean()) + EPS) * given["norm_weight"] * opening
        last[b, h] = s
    return result, window[:, tokens:], last


def error(got, want):
    """Relative to the largest number of each row."""
    if not want.numel():
        return 0.0
    scale = want.double().abs().amax(-1, keepdim=True).clamp_min(1e-30)
    return float(((got.double() - want.double()).abs() / scale).max())


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@BOUNDS
def test_odd_sizes(mega_kda, sizes, lower_bound):
    case = draw(sizes, lower_bound=lower_bound)
    got, want = mega_kda(**case), definition(case)
    assert [x.dtype for x in got] == [torch.float32] * 3
    assert [x.shape for x in got] == [x.shape for x in want]
    assert all(x.is_contiguous() for x in got)
    assert torch.equal(got[1].double(), want[1])
    assert error(got[0], want[0]) < 3e-5
    assert error(got[2], want[2]) < 2e-5  # rows that nearly cancel, after nine tokens


def test_the_reference_in_float64_is_the_definition():
    for sizes in SIZES:
        for options in ({}, {"lower_bound": -5.0}, {"beta_factor": 2.0, "l2_eps": 1e-2}):
            case = each(draw(sizes, **options), lambda x: x.double())
            got, want = kernels.mega_kda_reference(**case), definition(case)
            assert max(error(x, y) for x, y in zip(got, want, strict=True)) < 1e-12


@BOUNDS
def test_bfloat16_streams(mega_kda, lower_bound):
    case = draw(SIZES[1], torch.bfloat16, lower_bound=lower_bound)
    exact = kernels.mega_kda_reference(**each(case, lambda x: x.double()))
    for dtype in (torch.float32, torch.bfloat16):
        got = mega_kda(**case, dtype=dtype)
        assert [x.dtype for x in got] == [dtype, torch.bfloat16, torch.float32]
        assert torch.equal(got[1].double(), exact[1])
        # the convolution's result is rounded to bfloat16: what comes after is as exact as that
        assert error(got[0], exact[0]) < 5e-2
        assert error(got[2], exact[2]) < 2e-2


ROUNDINGS = [
    {},
    {"beta_dtype": torch.bfloat16},
    {"core_dtype": torch.bfloat16},
    {"core_dtype": torch.bfloat16, "dtype": torch.float32, "weight_cast": "after"},
    {"core_dtype": torch.bfloat16, "weight_cast": "between"},
    {"dtype": torch.bfloat16, "norm_activation": "silu"},
    {"dtype": torch.bfloat16, "norm_before_gate": False, "norm_activation": "silu"},
]


@pytest.mark.parametrize("options", ROUNDINGS, ids=str)
@DTYPES
def test_every_rounding_is_where_the_definition_has_it(mega_kda, options, dtype):
    case = draw((2, 5, 3, 32, 48, 4), dtype) | options
    got, want = mega_kda(**case), kernels.mega_kda_reference(**case)
    assert [x.dtype for x in got] == [x.dtype for x in want]
    assert torch.equal(got[1], want[1])
    # The convolution rounds to bfloat16 from sums in another order: a few of its numbers are neighbours.
    assert error(got[2], want[2]) < (2e-5 if dtype == torch.float32 else 5e-3)
    away = (got[0].double() - want[0].double()).abs() / want[0].double().abs().amax(-1, keepdim=True)
    share = float((away < 1e-5).double().mean())
    assert share > (0.98 if dtype == torch.float32 else 0.7), share


def chain(case):
    """The operators one by one with the glue in torch, as a graph runs where they are not one."""
    batch, tokens, heads, width = case["raw_gate"].shape
    y, kept = torch.ops.k31.short_conv(case["x"][0], case["conv_weight"][0], state=case["conv_state"][0])
    depth = case["out_gate"].shape[3]
    streams = y.split([heads * width, heads * width, heads * depth], -1)
    q, k, v = (stream.unflatten(-1, (heads, -1)) for stream in streams)
    q, k = (u.float() * torch.rsqrt(u.float().square().sum(-1, keepdim=True) + 1e-6) for u in (q, k))
    shifted = case["raw_gate"].float() + case["dt_bias"]
    gate = case["lower_bound"] * torch.sigmoid(case["a_log"].exp()[:, None] * shifted)
    beta = torch.sigmoid(case["raw_beta"].float())
    o, last = torch.ops.k31.kda_recurrent(q, k, v, gate, beta, case["state"], scale=case["scale"])
    norm = torch.ops.k31.gated_rms_norm
    return norm(o, case["out_gate"], case["norm_weight"], eps=EPS, dtype=case["x"][0].dtype), kept, last


@DTYPES
def test_no_less_accurate_than_the_chain(dtype):
    """Only the glue may differ, in the last bits: its sums of squares are double, its exponentials within 2 ulp."""
    if not loader.available("fast")[0]:
        pytest.skip(loader.available("fast")[1])
    mine, theirs = [], []
    for seed in range(6):
        case = draw((2, 1, 4, 64, 48, 4), dtype, seed=seed, lower_bound=-5.0)
        exact = kernels.mega_kda_reference(**each(case, lambda x: x.double()))
        got = mega_kda_provider("fast").run(**case, dtype=dtype)
        want = chain(case)
        assert torch.equal(got[1], want[1])
        assert error(got[2], want[2]) < 2e-6
        mine += [error(got[0], exact[0]), error(got[2], exact[2])]
        theirs += [error(want[0], exact[0]), error(want[2], exact[2])]
    assert sum(mine) <= 1.1 * sum(theirs)


@DTYPES
def test_three_tensors_are_as_good_as_one(mega_kda, dtype):
    for sizes in SIZES[:3]:
        packed, apart = (mega_kda(**draw(sizes, dtype, streams)) for streams in (1, 3))
        # torch's SiLU has another last bit at another place
        bound = 5e-3 if mega_kda is kernels.mega_kda_reference else 0
        assert max(error(x, y) for x, y in zip(packed, apart, strict=True)) <= bound


def test_any_strides(mega_kda):
    case = draw(SIZES[1], lower_bound=-5.0)
    want = mega_kda(**case)

    def turned(x):
        return x.permute(*range(x.dim())[::-1]).contiguous().permute(*range(x.dim())[::-1])

    got = mega_kda(**each(case, turned))
    assert max(error(x, y) for x, y in zip(got, want, strict=True)) < 2e-6
    spread_out = mega_kda(**each(case, lambda x: torch.stack((x, x * torch.nan), -1)[..., 0]))
    assert max(error(x, y) for x, y in zip(spread_out, want, strict=True)) < 2e-6


def test_values_first_is_the_same_state_transposed(mega_kda):
    case = draw(SIZES[1])
    out, _, last = mega_kda(**case)
    case |= {"state": case["state"].mT.contiguous(), "state_layout": "VK"}
    turned = mega_kda(**case)
    assert error(turned[0], out) < 2e-6
    assert error(turned[2].mT, last) < 2e-6


def test_without_state_of_the_convolution_and_without_bias(mega_kda):
    case = draw(SIZES[1])
    zeros = {"conv_state": [torch.zeros_like(case["conv_state"][0])], "dt_bias": torch.zeros_like(case["dt_bias"])}
    want = mega_kda(**case | zeros)
    got = mega_kda(**case | {"conv_state": None, "dt_bias": None})
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


def test_a_norm_weight_for_each_head(mega_kda):
    case = draw(SIZES[1])
    rows = torch.stack([case["norm_weight"] * (h + 1) for h in range(3)])
    got, one = mega_kda(**case | {"norm_weight": rows})[0], mega_kda(**case)[0]
    torch.testing.assert_close(got, one * torch.tensor([1.0, 2.0, 3.0])[:, None], rtol=1e-6, atol=1e-7)


def test_no_token_leaves_everything_as_it_was(mega_kda):
    case = draw((2, 0, 3, 5, 7, 4))
    out, kept, last = mega_kda(**case)
    assert out.shape == (2, 0, 3, 7)
    assert torch.equal(kept, case["conv_state"][0])
    assert torch.equal(last, case["state"])


@BOUNDS
def test_extreme_gates(mega_kda, lower_bound):
    """A raw gate of -inf keeps everything (the rule for padding); a large one forgets as far as its bound allows."""
    case = draw((1, 1, 1, 6, 4, 4), lower_bound=lower_bound)
    case["raw_gate"] = torch.tensor([-torch.inf, -1e30, -100.0, 100.0, 1e30, torch.inf]).view(1, 1, 1, 6)
    case["raw_beta"] = torch.full((1, 1, 1), -torch.inf)
    last = mega_kda(**case)[2]
    decay = last / case["state"]
    forgotten = 0.0 if lower_bound is None else math.exp(lower_bound)
    torch.testing.assert_close(decay[0, 0, :3], torch.ones(3, 4), rtol=1e-6, atol=0)
    torch.testing.assert_close(decay[0, 0, 3:], torch.full((3, 4), forgotten), rtol=1e-5, atol=1e-20)


def test_zeros_have_no_direction(mega_kda):
    """A query and a key of zeros stay zeros; nothing is divided by nothing."""
    case = draw(SIZES[0])
    case |= {name: [torch.zeros_like(case[name][0])] for name in ("x", "conv_state")}
    out, _, last = mega_kda(**case)
    assert torch.equal(out, torch.zeros_like(out))
    assert last.isfinite().all()


def test_a_broken_request_stays_alone(mega_kda):
    case = draw(SIZES[1])
    want = mega_kda(**case)
    case["x"][0][0, 1, 2] = torch.nan
    got = mega_kda(**case)
    assert got[0][0, :, 0].isnan().any()
    assert all(torch.equal(x[1], y[1]) for x, y in zip(got, want, strict=True))


def test_arguments_stay_and_results_are_new(mega_kda):
    case = draw(SIZES[1])
    before = each(case, torch.clone)
    results = mega_kda(**case)
    flat = [x for value in case.values() for x in (value if isinstance(value, list) else [value]) if is_tensor(x)]
    old = [x for value in before.values() for x in (value if isinstance(value, list) else [value]) if is_tensor(x)]
    assert all(torch.equal(x, y) for x, y in zip(flat, old, strict=True))
    places = {x.untyped_storage().data_ptr() for x in flat}
    assert not places & {x.untyped_storage().data_ptr() for x in results}


def test_threads_and_repetitions_agree(mega_kda, two_threads):
    case = draw((2, 3, 8, 64, 96, 4), torch.bfloat16)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results += [mega_kda(**case) for _ in range(3)]
    assert all(torch.equal(x, y) for result in results for x, y in zip(result, results[0], strict=True))


@pytest.mark.parametrize("utility", ["test_schema", "test_faketensor"])
def test_opcheck(utility):
    for streams, changes in ((1, {}), (3, {"dtype": torch.bfloat16, "lower_bound": -5.0, "dt_bias": None})):
        case = draw(streams=streams) | changes
        arguments = tuple(case.pop(name) for name in list(case)[:10])
        torch.library.opcheck(torch.ops.k31.mega_kda.default, arguments, case, test_utils=utility)


def test_symbolic_sizes_stay_symbolic():
    environment = ShapeEnv()
    mode = FakeTensorMode(shape_env=environment)

    def symbolic(tensor):
        context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * tensor.dim())
        return mode.from_tensor(tensor, symbolic_context=context)

    case = each(draw(SIZES[1]), symbolic)
    with mode:
        results = torch.ops.k31.mega_kda(**case)
    assert all(isinstance(size, torch.SymInt) for result in results for size in result.shape)
    assert not environment.guards


ONES = torch.ones
BAD_CALLS = [
    ({"x": [ONES(2, 1, 51)] * 2}, "x must be one tensor of packed channels or three, not 2"),
    ({"x": [ONES(2, 1, 15)] * 3}, "conv_weight must be 3 tensors as x is, not 1"),
    ({"conv_state": [ONES(2, 3, 17)] * 3}, "conv_state must be 1 tensors as x is, not 3"),
    ({"x": [ONES(2, 51)]}, r"x must be \[B, T, C\], not \[2, 51\]"),
    ({"x": [ONES(2, 1, 50)]}, r"x must have shape \[2, 1, 51\], not \[2, 1, 50\]"),
    ({"x": [ONES(2, 1, 51).int()]}, "x must be floating point"),
    ({"conv_weight": [ONES(51, 0)]}, "conv_weight must have at least one tap"),
    ({"conv_weight": [ONES(50, 4)]}, r"conv_weight must have shape \[51, 4\]"),
    ({"conv_state": [ONES(2, 4, 51)]}, r"conv_state must have shape \[2, 3, 51\], not \[2, 4, 51\]"),
    ({"raw_gate": ONES(2, 3, 5)}, r"raw_gate must be \[B, T, H, K\]"),
    ({"a_log": ONES(5)}, r"a_log must have shape \[3\]"),
    ({"dt_bias": ONES(15)}, r"dt_bias must have shape \[3, 5\], not \[15\]"),
    ({"raw_beta": ONES(2, 1, 2)}, r"raw_beta must have shape \[2, 1, 3\]"),
    ({"state": ONES(2, 3, 7, 5)}, r"state must have shape \[2, 3, 5, 7\], not \[2, 3, 7, 5\]"),
    ({"state_layout": "VK"}, r"state must have shape \[2, 3, 7, 5\], not \[2, 3, 5, 7\]"),
    ({"state_layout": "HK"}, "state_layout must be 'KV' or 'VK', not 'HK'"),
    ({"out_gate": ONES(2, 1, 3, 7, device="meta")}, "out_gate is on meta, x on cpu"),
    ({"norm_weight": ONES(3)}, r"norm_weight must have shape \[7\], not \[3\]"),
    ({"norm_weight": ONES(1, 1, 7)}, r"norm_weight must have shape \[3, 7\], not \[1, 1, 7\]"),
    ({"lower_bound": 5.0}, "lower_bound of a log decay must not be above 0, is 5.0"),
    ({"norm_activation": "relu"}, "norm_activation must be 'sigmoid' or 'silu'"),
    ({"weight_cast": "between", "norm_before_gate": False}, "needs norm_before_gate=True"),
    ({"core_dtype": torch.int32}, "core_dtype must be floating point"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_CALLS, ids=[message for _, message in BAD_CALLS])
def test_bad_calls_are_refused_by_name(mega_kda, changes, message):
    with pytest.raises(OperatorError, match=message):
        mega_kda(**draw() | changes)


def test_streams_of_two_dtypes_are_refused(mega_kda):
    case = draw(streams=3)
    case["x"][1] = case["x"][1].bfloat16()
    with pytest.raises(OperatorError, match=r"x must be tensors of one dtype, not of torch.float32, torch.bfloat16"):
        mega_kda(**case)


def test_what_the_kernel_does_not_take_goes_to_the_reference():
    declines = mega_kda_provider("fast").declines
    assert declines(**draw()) is None
    assert "out_gate is torch.float16" in declines(**draw() | {"out_gate": torch.ones(2, 1, 3, 7).half()})
    assert "core_dtype is torch.float16" in declines(**draw(core_dtype=torch.float16))
    assert "does not fit the kernel's scratch" in declines(**draw((1, 1, 1, 2000, 2, 4)))
    assert "65 taps" in declines(**draw((1, 1, 1, 2, 2, 65)))
    half = each(draw(), lambda x: x.half())
    assert all(x.dtype in (torch.float16, torch.float32) for x in torch.ops.k31.mega_kda(**half))
