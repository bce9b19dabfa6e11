"""Every implementation of k31::grouped_experts against a definition that runs one pair at a time in float64."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import k31compile.kernels as kernels
from k31compile.errors import OperatorError
from k31compile.kernels.expert_checks import ExpertActivation

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def act(gate, up, activation="situ", situ_beta=4.0, linear_beta=25.0):
    opening = 1 / (1 + torch.exp(-gate))
    if activation == "swiglu":
        return gate * opening * up
    up = up if linear_beta is None else linear_beta * torch.tanh(up / linear_beta)
    return situ_beta * torch.tanh(gate / situ_beta) * opening * up


def rounding_dtype(case):
    """The 16-bit dtype that x and all projections share, which the activation is rounded to."""
    dtypes = {tensor.dtype for name in PROJECTIONS for tensor in case[name]} | {case["x"].dtype}
    return dtypes.pop() if len(dtypes) == 1 and dtypes <= {torch.bfloat16, torch.float16} else None


def definition(x, expert_idx, weights, gate_proj, up_proj, down_proj, off=0.0, **options):
    """Token by token and slot by slot, in float64; what is rounded may be `off` before, and then all sizes add up."""
    projections = dict(zip(PROJECTIONS, (gate_proj, up_proj, down_proj), strict=True))
    kept = rounding_dtype({"x": x} | projections)
    gate, up, down = ([m.double() for m in (p[0] if p[0].dim() == 3 else p)] for p in (gate_proj, up_proj, down_proj))
    width = (down_proj[0].shape if down_proj[0].dim() == 2 else down_proj[0].shape[1:])[0]
    result = torch.zeros(x.shape[0], width, dtype=torch.float64)
    for n, row in enumerate(x.double()):
        for j, expert in enumerate(expert_idx[n].tolist()):
            if 0 <= expert < len(gate):
                inner = act(gate[expert] @ row, up[expert] @ row, **options)
                if off:
                    far = off * inner.nan_to_num().abs().max().clamp(min=1.0)
                    apart = (inner + far).to(kept).double() - (inner - far).to(kept).double()
                    result[n] += weights[n, j].double().abs() * (down[expert].abs() @ apart)
                    continue
                inner = inner if kept is None else inner.to(kept).double()
                result[n] += weights[n, j].double() * (down[expert] @ inner)
    return result


def rounding_slack(case, **options):
    """How far results may be off where float32 finds an activation on the other side of the middle of two numbers."""
    return 0.0 if rounding_dtype(case) is None else definition(**case, **options, off=2e-6).nan_to_num()


def draw(rows, slots, experts, width, inner, out, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    return {
        "x": normal(rows, width).to(dtype),
        "expert_idx": torch.randint(0, max(experts, 1), (rows, slots), generator=generator, dtype=torch.int32),
        "weights": torch.rand(rows, slots, generator=generator),
        "gate_proj": [(2 * normal(experts, inner, width) * max(width, 1) ** -0.5).to(dtype)],
        "up_proj": [(normal(experts, inner, width) * max(width, 1) ** -0.5).to(dtype)],
        "down_proj": [(normal(experts, out, inner) * max(inner, 1) ** -0.5).to(dtype)],
    }


def agree(got, case, tolerance=2e-6, **options):
    expected = definition(**case, **options)
    assert got.shape == expected.shape
    scale = float(expected.nan_to_num().abs().max()) if expected.numel() else 1.0
    assert torch.equal(got.isfinite(), expected.isfinite())
    assert torch.equal(got.isnan(), expected.isnan())
    far = (got.double() - expected).nan_to_num(0.0, 0.0, 0.0).abs()
    allowed = tolerance * max(scale, 1.0) + rounding_slack(case, **options)
    assert (far <= allowed).all(), f"{float((far - allowed).max()):.1e} more than allowed"


SIZES = [  # rows, slots, experts, width, inner, out: no two alike; few and many tokens an expert, tiles never full
    (1, 1, 1, 1, 1, 1),
    (1, 3, 5, 7, 11, 13),
    (2, 3, 4, 33, 21, 10),
    (6, 2, 3, 37, 50, 29),
    (31, 2, 3, 70, 26, 45),
    (19, 5, 7, 16, 64, 24),
    (143, 2, 3, 23, 31, 17),  # more tokens an expert than a block takes
    (35, 2, 4, 300, 201, 260),  # depths and outputs beyond one step
]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["rows", "columns", "up the rows, down the columns", "the other way round"])
def test_odd_sizes(experts, size, dtype, layout):
    case = draw(*size, dtype=dtype)
    wanted = {
        "rows": (),
        "columns": ("gate_proj", "up_proj", "down_proj"),
        "the other way round": ("gate_proj", "up_proj"),
    }
    for name in wanted.get(layout, ("down_proj",)):
        case[name] = [case[name][0].mT.contiguous().mT]
    got = experts(**case)
    assert got.dtype == torch.float32
    agree(got, case)


def fuse(case, transposed):
    both = torch.cat((case["gate_proj"][0], case["up_proj"][0]), 1)
    both = both.mT.contiguous().mT if transposed else both
    gate, up = both.chunk(2, 1)
    return case | {"gate_proj": [gate], "up_proj": [up]}


def list_up(case, *names):
    return case | {
        name: [matrix.clone(memory_format=torch.preserve_format) for matrix in case[name][0]] for name in names
    }


@pytest.mark.parametrize("rows", [4, 60])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    "layout",
    [
        "fused",
        "fused transposed",
        "listed",
        "listed transposed",
        "listed mixed",
        "gate unlike up",
        "spread",
        "expanded",
    ],
)
def test_weights_are_read_where_they_lie(experts, layout, dtype, rows):
    case = draw(rows, 2, 3, 21, 34, 13, dtype, seed=rows)
    projections = ("gate_proj", "up_proj", "down_proj")
    if layout.startswith("fused"):
        case = fuse(case, "transposed" in layout)
    elif layout.startswith("listed"):
        if "transposed" in layout:
            case |= {name: [case[name][0].mT.contiguous().mT] for name in projections}
        case = list_up(case, *projections[: 1 if layout == "listed mixed" else 3])
        if layout == "listed mixed":
            case["gate_proj"][1] = case["gate_proj"][1].T.contiguous().T
    elif layout == "gate unlike up":
        case["up_proj"] = [case["up_proj"][0].mT.contiguous().mT]
    elif layout == "spread":
        case |= {name: [torch.stack((case[name][0], case[name][0] + 1), -1)[..., 0]] for name in projections}
        case["x"] = torch.stack((case["x"], case["x"]), -1)[..., 0]
    else:
        case["down_proj"] = [case["down_proj"][0][:1].expand(3, -1, -1)]
    agree(experts(**case), case)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8], ids=str)
def test_routing_of_any_dtype_and_stride(experts, dtype):
    case = draw(27, 3, 5, 12, 9, 14)
    case["expert_idx"] = case["expert_idx"].to(dtype).T.contiguous().T
    case["weights"] = torch.cat((case["weights"], case["weights"]), 1)[:, ::2].bfloat16()
    agree(experts(**case), case)


@pytest.mark.parametrize("wide", ["x", "gate_proj", "down_proj"])
def test_dtypes_may_be_mixed(experts, wide):
    case = draw(22, 2, 3, 17, 19, 8, torch.bfloat16)
    case[wide] = [case[wide][0].float() + 1e-3] if wide != "x" else case["x"].float() + 1e-3
    agree(experts(**case), case)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_an_index_that_is_no_expert_adds_nothing(experts, dtype):
    case = draw(40, 3, 4, 15, 18, 11)
    index = case["expert_idx"] = case["expert_idx"].to(dtype)
    index[::3, 1], index[::4, 0], index[5] = -1, 4, 7
    if dtype == torch.int64:
        index[6, 2], index[7, 2] = 1 << 40, -(1 << 40)
    expected = definition(**case)
    case["x"][5] = torch.nan  # a token that goes nowhere is never read
    case["weights"][::3, 1] = torch.nan
    torch.testing.assert_close(experts(**case).double(), expected, rtol=0, atol=1e-5)
    assert torch.equal(experts(**case)[5], torch.zeros(11))


def test_experts_without_tokens_are_not_read(experts):
    case = draw(33, 2, 6, 14, 10, 9)
    case["expert_idx"] = case["expert_idx"] % 2 * 3 + 1  # 1 and 4
    for name in ("gate_proj", "up_proj", "down_proj"):
        case[name][0][[0, 2, 3, 5]] = torch.nan
    got = experts(**case)
    assert not got.isnan().any()
    agree(got, case)


@pytest.mark.parametrize("rows", [1, 7, 8, 17, 64, 65, 200])
def test_all_tokens_on_one_expert(experts, rows):
    case = draw(rows, 1, 3, 20, 23, 12)
    case["expert_idx"][:] = 2
    agree(experts(**case), case)


def test_the_same_expert_twice_counts_twice(experts):
    case = draw(9, 3, 4, 10, 8, 7)
    case["expert_idx"][:, 2] = case["expert_idx"][:, 0]
    agree(experts(**case), case)


@pytest.mark.parametrize(
    "size", [(0, 2, 3, 4, 5, 6), (4, 0, 3, 2, 5, 6), (2, 3, 0, 4, 5, 6), (2, 3, 4, 0, 5, 6)], ids=str
)
def test_empty(experts, size):
    case = draw(*size)
    assert torch.equal(experts(**case), torch.zeros(size[0], size[5]))
    assert experts(**draw(2, 3, 4, 5, 6, 0)).shape == (2, 0)
    assert torch.equal(experts(**draw(2, 3, 4, 5, 0, 6)), torch.zeros(2, 6))


ACTIVATIONS = [
    {"activation": "swiglu"},
    {"linear_beta": None},
    {"situ_beta": 0.7, "linear_beta": 1.3},
    {"situ_beta": 9.0, "linear_beta": 0.4},
]


@pytest.mark.parametrize("options", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("rows", [3, 50])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
def test_activations(experts, options, rows, scale):
    case = draw(rows, 2, 3, 17, 25, 9)
    case["x"] *= scale
    got, expected = experts(**case, **options).double(), definition(**case, **options)
    torch.testing.assert_close(got, expected, rtol=0, atol=4e-6 * float(expected.abs().max()))


def test_small_and_saturated_inputs_keep_their_digits(experts):
    """One inner number and unit projections: the activation itself, to a few ulp."""
    x = torch.cat((torch.logspace(-12, 3, 301), -torch.logspace(-12, 3, 301)))[:, None]
    one = [torch.ones(1, 1, 1)]
    case = {"x": x, "expert_idx": torch.zeros(len(x), 1, dtype=torch.int64), "weights": torch.ones(len(x), 1)}
    case |= {"gate_proj": one, "up_proj": one, "down_proj": one}
    for options in ({}, {"activation": "swiglu"}, {"situ_beta": 1.0, "linear_beta": None}):
        expected = definition(**case, **options)
        torch.testing.assert_close(experts(**case, **options).double(), expected, rtol=1e-6, atol=1e-32)


@pytest.mark.parametrize("rows", [5, 60])
def test_a_nan_stays_with_its_token(experts, rows):
    case = draw(rows, 2, 3, 12, 15, 10)
    clean = experts(**case)
    case["x"][3, 4], case["x"][1, 2] = torch.nan, torch.inf
    got = experts(**case)
    touched = torch.zeros(rows, dtype=torch.bool)
    touched[[1, 3]] = True
    assert got[3].isnan().all()
    assert torch.equal(got[~touched], clean[~touched])


def compare_threads(experts, case):
    """The same bits with any number of threads; plain torch promises that of no matrix product of its own."""
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results += [experts(**case) for _ in range(3)]
    if experts is not kernels.grouped_experts_reference:
        assert all(torch.equal(result, results[0]) for result in results)
    agree(results[0], case)
    agree(results[-1], case)


def test_more_inner_activations_than_one_round_holds(experts, two_threads):
    compare_threads(experts, draw(260, 3, 5, 40, 300, 130))


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("rows", [1, 40])
def test_threads_and_repetitions_agree(experts, two_threads, rows, transposed):
    compare_threads(experts, fuse(draw(rows, 4, 6, 200, 450, 310, torch.bfloat16), transposed))


def test_several_callers_at_once(experts):
    cases = [draw(5 + 9 * i, 2, 4, 30, 22, 18, seed=i) for i in range(6)]
    alone = [experts(**case) for case in cases]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda case: experts(**case), cases * 4))
    assert all(torch.equal(a, b) for a, b in zip(alone * 4, together, strict=True))


@pytest.mark.parametrize("rows", [1, 5, 60])
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("wide", [None, "x", "gate_proj", "up_proj", "down_proj"])
def test_the_activation_is_rounded_where_all_is_bfloat16(experts, wide, rows, transposed):
    """One inner number and powers of two around it, so that rounding is all that can be seen."""
    case = draw(rows, 1, 1, 1, 1, 3, torch.bfloat16, seed=rows)
    case |= {name: [torch.full_like(case[name][0], 2.0)] for name in PROJECTIONS}
    case["weights"] = torch.ones(rows, 1)
    if transposed:
        case |= {name: [case[name][0].mT.contiguous().mT] for name in PROJECTIONS}
    if wide:
        case[wide] = case["x"].float() if wide == "x" else [case[wide][0].float()]
    got = experts(**case) / 2
    is_rounded = bool((got == got.bfloat16().float()).all())
    assert is_rounded == (wide is None)
    agree(2 * got, case)


def test_the_reference_in_many_blocks(monkeypatch):
    monkeypatch.setattr("k31compile.kernels.grouped_experts._BLOCK_ELEMENTS", 100)
    case = draw(33, 2, 3, 12, 19, 10)
    agree(kernels.grouped_experts_reference(**case), case)


OPERATOR = torch.ops.k31.grouped_experts.default


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_opcheck(dtype):
    case = draw(6, 2, 3, 5, 4, 7, dtype)
    for arguments in (case, list_up(case, "gate_proj", "down_proj")):
        for utility in ("test_schema", "test_faketensor"):
            torch.library.opcheck(OPERATOR, tuple(arguments.values()), {"linear_beta": None}, test_utils=utility)


@pytest.mark.parametrize("wide", ["x", "weights", "up_proj"])
def test_one_float64_makes_all_of_it_float64(wide):
    case = draw(6, 2, 3, 5, 4, 7)
    case[wide] = [case[wide][0].double()] if wide == "up_proj" else case[wide].double()
    got = torch.ops.k31.grouped_experts(**case)
    assert got.dtype == torch.float64
    agree(got, case, tolerance=1e-14)


def test_the_schema_and_the_options_have_the_same_defaults():
    schema = {arg.name: arg.default_value for arg in OPERATOR._schema.arguments if arg.kwarg_only}
    assert schema == ExpertActivation._field_defaults


ONES = torch.ones
BAD_CALLS = [
    ({"x": ONES(2, 3, 5)}, r"x must be \[N, L\], not \[2, 3, 5\]"),
    ({"x": ONES(2, 5).long()}, "x must be floating point"),
    ({"expert_idx": ONES(2, 3)}, "expert_idx must hold integers"),
    ({"expert_idx": ONES(3, 3).int()}, r"expert_idx must have shape \[2, k\], not \[3, 3\]"),
    ({"expert_idx": ONES(6).int()}, r"expert_idx must be \[N, k\]"),
    ({"weights": ONES(2, 4)}, r"weights must have shape \[2, 3\], not \[2, 4\]"),
    ({"weights": ONES(2, 3).int()}, "weights must be floating point"),
    ({"gate_proj": []}, "gate_proj must hold a tensor"),
    ({"down_proj": []}, "down_proj must hold a tensor"),
    ({"gate_proj": [ONES(4, 6, 5), ONES(4, 6, 5)]}, "gate_proj must hold one tensor"),
    ({"up_proj": [ONES(3, 6, 5)]}, "up_proj has 3 experts, gate_proj 4"),
    ({"up_proj": [ONES(6, 5)] * 3}, "up_proj has 3 experts, gate_proj 4"),
    ({"up_proj": [ONES(4, 6, 7)]}, r"up_proj must hold matrices \[6, 5\], not \[6, 7\]"),
    ({"up_proj": [ONES(6, 5)] * 3 + [ONES(6, 8)]}, r"up_proj must hold matrices \[6, 5\], not \[6, 8\]"),
    ({"gate_proj": [ONES(4, 6, 2)]}, r"gate_proj must hold matrices \[6, 5\], not \[6, 2\]"),
    ({"down_proj": [ONES(4, 7, 5)]}, r"down_proj must hold matrices \[7, 6\], not \[7, 5\]"),
    ({"down_proj": [ONES(4, 7, 6).int()]}, "down_proj must be floating point"),
    ({"activation": "gelu"}, "activation must be 'situ' or 'swiglu', not 'gelu'"),
    ({"situ_beta": 0.0}, "situ_beta must be above 0, is 0.0"),
    ({"linear_beta": -1.0}, "linear_beta must be None or above 0, is -1.0"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_CALLS, ids=[message for _, message in BAD_CALLS])
def test_bad_calls_are_refused_by_name(experts, changes, message):
    with pytest.raises(OperatorError, match=message):
        experts(**draw(2, 3, 4, 5, 6, 7) | changes)
