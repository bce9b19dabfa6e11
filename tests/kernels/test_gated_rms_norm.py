"""Every implementation of k31::gated_rms_norm against float64, and against its authors' code bit for bit."""

import functools
import math

import pytest
import torch
import torch.nn.functional as F

import k31compile.kernels as kernels
from k31compile.errors import OperatorError
from k31compile.model.norms import GatedRMSNorm, RMSNorm

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
VARIANTS = [
    {"activation": activation, "norm_before_gate": first, "weight_cast": cast}
    for activation in ("sigmoid", "silu")
    for first in (True, False)
    for cast in ("before", "after", "between")
    if first or cast != "between"
]


def definition(x, gate, weight, eps, activation="sigmoid", norm_before_gate=True, **_):
    """Number by number, without any rounding to a narrower dtype."""
    result = torch.empty(x.shape, dtype=torch.float64)
    rows = x.double().reshape(-1, x.shape[-1]).tolist()
    gates = gate.double().reshape(-1, x.shape[-1]).tolist()
    weights = weight.double().expand(x.shape).reshape(-1, x.shape[-1]).tolist()
    for out, row, raw, scale in zip(result.view(-1, x.shape[-1]), rows, gates, weights, strict=True):
        act = [1 / (1 + math.exp(-g)) * (g if activation == "silu" else 1) for g in raw]
        if not norm_before_gate:
            row, act = [v * g for v, g in zip(row, act, strict=True)], [1.0] * len(row)
        factor = 1 / math.sqrt(math.fsum(v * v for v in row) / len(row) + eps)
        out[:] = torch.tensor([v * factor * w * g for v, w, g in zip(row, scale, act, strict=True)])
    return result


def draw(shape=(2, 5, 3, 7), dtype=torch.float32, weight_dtype=torch.float32, groups=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    size = shape[-1:] if groups is None else shape[-2:]
    x, gate, weight = (torch.randn(*s, generator=generator) for s in (shape, shape, size))
    return {"x": (x * 2).to(dtype), "gate": (gate * 3).to(dtype), "weight": weight.to(weight_dtype), "eps": 1e-5}


def assert_near(got, want, weight_cast="before"):
    roundings = 1 if weight_cast == "before" else 3
    bound = 2e-6 if got.dtype == torch.float32 else roundings * 2**-8 + 1e-4
    torch.testing.assert_close(got.double(), want, rtol=bound, atol=1e-6)


def assert_same_but_for_the_gate(got, want):
    """Equal, where the gate's last bit does not decide a rounding; and then neighbours."""
    assert got.dtype == want.dtype
    if got.dtype == torch.bfloat16:
        assert (got != want).float().mean() < 5e-3
        torch.testing.assert_close(got.float(), want.float(), rtol=2**-7, atol=1e-30)
    else:
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("shape", [(3,), (2, 1), (2, 3, 17), (2, 3, 2, 5, 30)], ids=str)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@DTYPES
def test_odd_sizes(gated_rms_norm, shape, variant, dtype):
    case = draw(shape, dtype) | variant
    got = gated_rms_norm(**case)
    assert (got.shape, got.dtype) == (shape, dtype)
    assert got.is_contiguous()
    assert_near(got, definition(**case), variant["weight_cast"])


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@DTYPES
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_rounding_is_where_the_definition_has_it(gated_rms_norm, variant, dtype, weight_dtype):
    case = draw((2, 31, 3, 129), dtype, weight_dtype) | variant
    assert_same_but_for_the_gate(gated_rms_norm(**case), kernels.gated_rms_norm_reference(**case))


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@DTYPES
def test_without_doubt_about_the_gate_every_bit_agrees(gated_rms_norm, variant, dtype):
    generator = torch.Generator().manual_seed(3)
    case = draw((2, 31, 3, 64), dtype, dtype) | variant
    case["x"] = torch.randint(-8, 9, (2, 31, 3, 64), generator=generator).to(dtype)  # squares add up exactly
    case["gate"] = torch.where(case["gate"] > 0, 64, 32).to(dtype)  # 1 and x are their sigmoid and their SiLU
    assert torch.equal(gated_rms_norm(**case), kernels.gated_rms_norm_reference(**case))


# ---- the authors' forms; each returns what its code returns, whatever its dtype


def kimi_linear(x, gate, weight, eps):
    h = x.to(torch.float32)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return (weight.to(torch.float32) * h * torch.sigmoid(gate.to(torch.float32))).to(x.dtype)


def qwen3_next(x, gate, weight, eps):
    h = x.to(torch.float32)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    h = weight * h.to(x.dtype)
    return (h * F.silu(gate.to(torch.float32))).to(x.dtype)


def mamba2(x, gate, weight, eps):
    h = x.to(torch.float32) * F.silu(gate.to(torch.float32))
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return weight * h.to(x.dtype)


def layernorm_gated(x, gate, weight, eps, norm_before_gate):
    dtype, weight, x, z = x.dtype, weight.float(), x.float(), gate.float()
    if not norm_before_gate:
        x = x * F.silu(z)
    out = x * (1 / torch.sqrt(x.square().mean(-1, keepdim=True) + eps)) * weight
    return (out * F.silu(z) if norm_before_gate else out).to(dtype)


def falcon_h1(x, gate, weight, eps, norm_before_gate):
    h = x if norm_before_gate else x * F.silu(gate.to(torch.float32))
    h = h.to(torch.float32)
    h = weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps))
    return (h * F.silu(gate.to(torch.float32)) if norm_before_gate else h).to(x.dtype)


def module_times_gate(x, gate, weight, eps):
    norm = RMSNorm(x.shape[-1], eps)
    norm.weight.data = weight
    return norm(x) * torch.sigmoid(gate.float()).to(x.dtype)


def k31(x, gate, weight, eps):
    norm = GatedRMSNorm(x.shape[-1], eps)
    norm.weight.data = weight
    return norm(x, gate)


SILU_AFTER = {"activation": "silu", "weight_cast": "after"}
FORMS = {
    "kimi_linear": (kimi_linear, {}),
    "qwen3_next": (qwen3_next, SILU_AFTER),
    "mamba2": (mamba2, SILU_AFTER | {"norm_before_gate": False}),
    # 1 / torch.sqrt(x) and torch.rsqrt(x) differ in their last bit: these two are not compared bit for bit
    "norm before gate": (lambda *a: layernorm_gated(*a, True), {"activation": "silu"}),
    "gate before norm": (lambda *a: layernorm_gated(*a, False), {"activation": "silu", "norm_before_gate": False}),
    "falcon_h1": (lambda *a: falcon_h1(*a, True), {"activation": "silu"}),
    "falcon_h1 gate first": (lambda *a: falcon_h1(*a, False), {"activation": "silu", "norm_before_gate": False}),
    "module times gate": (module_times_gate, {"weight_cast": "between"}),
    "k31": (k31, {}),
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gate_dtype", [torch.float32, torch.bfloat16], ids=str)
@DTYPES
def test_as_its_authors_write_it(gated_rms_norm, name, dtype, gate_dtype, weight_dtype):
    form, variant = FORMS[name]
    case = draw((2, 33, 3, 72), dtype, weight_dtype)
    case["gate"] = case["gate"].to(gate_dtype)
    with torch.no_grad():
        want = form(*case.values())
    got = gated_rms_norm(**case, **variant, dtype=want.dtype)
    if gated_rms_norm is kernels.gated_rms_norm_reference and "norm" not in name:
        assert torch.equal(got, want)
    assert_same_but_for_the_gate(got, want)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "name", "variant"),
    [
        ("kimi_linear", "KimiLinearRMSNormGated", {}),
        ("glm5_next", "Glm5NextTextRMSNormGated", {}),
        ("bailing_hybrid", "BailingHybridRMSNormGated", {}),
        ("qwen3_next", "Qwen3NextRMSNormGated", SILU_AFTER),
        ("olmo_hybrid", "OlmoHybridRMSNormGated", SILU_AFTER),
        ("mamba2", "MambaRMSNormGated", SILU_AFTER | {"norm_before_gate": False}),
        ("zamba2", "Zamba2RMSNormGated", SILU_AFTER | {"norm_before_gate": False}),
        ("falcon_h1", "FalconH1RMSNormGated", {"activation": "silu"}),
    ],
)
@DTYPES
def test_as_transformers_runs_it(module, name, variant, dtype, transformers_model):
    source = transformers_model(module)
    grouped = module in ("mamba2", "zamba2")
    case = draw((2, 9, 3, 24), dtype, dtype, groups=3 if grouped else None)
    norm = getattr(source, name)(72 if grouped else 24, **({"group_size": 24} if grouped else {}), eps=1e-5)
    norm.weight.data = case["weight"].flatten()
    heads = (2, 3) if grouped else (1, 2)  # one long row of groups, or each head's row by itself
    with torch.no_grad():
        want = norm(case["x"].flatten(*heads), case["gate"].flatten(*heads)).view_as(case["x"])
    assert torch.equal(kernels.gated_rms_norm_reference(**case, **variant), want)
    assert_same_but_for_the_gate(torch.ops.k31.gated_rms_norm(**case, **variant), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_the_dtype_of_the_result(gated_rms_norm, dtype):
    case = draw()
    got = gated_rms_norm(**case)
    if dtype == torch.float64:
        assert torch.ops.k31.gated_rms_norm(**case, dtype=dtype).dtype == dtype
    else:
        assert torch.equal(gated_rms_norm(**case, dtype=dtype), got.to(dtype))


def test_a_weight_for_each_group(gated_rms_norm):
    case = draw((2, 5, 3, 17), groups=3)
    assert case["weight"].shape == (3, 17)
    assert_near(gated_rms_norm(**case), definition(**case))


@pytest.mark.parametrize("shape", [(2, 3, 5, 19), (2, 3, 4, 5, 19)], ids=str)
@DTYPES
def test_any_strides(gated_rms_norm, shape, dtype):
    case = draw(shape, dtype)
    want = gated_rms_norm(**case)
    same = torch.equal
    if gated_rms_norm is kernels.gated_rms_norm_reference:  # torch's sigmoid has another last bit at another place
        same = functools.partial(torch.allclose, rtol=1e-6 if dtype == torch.float32 else 2**-7)
    order = [*range(len(shape) - 2, -1, -1), len(shape) - 1]
    for name in ("x", "gate"):
        case[name] = case[name].permute(order).contiguous().permute(order)
    assert same(gated_rms_norm(**case), want)
    case["x"] = case["x"].mT.contiguous().mT
    case["gate"] = torch.cat((case["gate"] * torch.nan, case["gate"]), -1)[..., 19:]
    case["weight"] = torch.stack((case["weight"], case["weight"]), -1)[..., 1]
    assert same(gated_rms_norm(**case), want)
    expanded = {name: case[name][:1].expand(shape) for name in ("x", "gate")}
    assert same(gated_rms_norm(**case | expanded)[1], want[0])


@pytest.mark.parametrize("names", [("x",), ("gate",), ("weight",), ("x", "weight")], ids=str)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_mixed_dtypes(gated_rms_norm, names, variant):
    case = draw((2, 5, 3, 33)) | variant
    for name in names:
        case[name] = case[name].bfloat16()
    assert_same_but_for_the_gate(gated_rms_norm(**case), kernels.gated_rms_norm_reference(**case))


@pytest.mark.parametrize("shape", [(0, 3, 5), (2, 0, 5), (2, 3, 0)], ids=str)
def test_nothing_to_normalise(gated_rms_norm, shape):
    assert gated_rms_norm(**draw(shape)).shape == shape


@pytest.mark.parametrize("first", [True, False])
def test_a_row_that_is_broken_stays_alone(gated_rms_norm, first):
    case = draw((2, 3, 2, 9)) | {"norm_before_gate": first}
    want = gated_rms_norm(**case)
    case["x"][0, 1, 1, 4] = torch.nan
    got = gated_rms_norm(**case)
    assert got[0, 1, 1].isnan().all()
    broken = torch.zeros(2, 3, 2, dtype=torch.bool)
    broken[0, 1, 1] = True
    assert torch.equal(got[~broken], want[~broken])


def test_extreme_gates(gated_rms_norm):
    gate = torch.tensor([[-torch.inf, -1e30, -90.0, 90.0, 1e30, torch.inf]])
    got = gated_rms_norm(torch.ones(1, 6), gate, torch.ones(6), eps=0.0)
    assert torch.equal(got, torch.tensor([[0.0, 0.0, 0.0, 1.0, 1.0, 1.0]]).where(gate != -90, got))
    assert 0 <= got[0, 2] < 1e-38


def test_threads_agree(gated_rms_norm, two_threads):
    case = draw((3, 50, 7, 128), torch.bfloat16)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(gated_rms_norm(**case))
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("utility", ["test_schema", "test_faketensor"])
def test_opcheck(utility):
    for changes in ({}, {"dtype": torch.bfloat16, "weight_cast": "after"}):
        case = draw() | changes
        arguments = tuple(case.pop(name) for name in ("x", "gate", "weight"))
        torch.library.opcheck(torch.ops.k31.gated_rms_norm.default, arguments, case, test_utils=utility)


BAD_CALLS = [
    ({"x": torch.ones(()), "gate": torch.ones(())}, r"x must be \[..., D\]"),
    ({"x": torch.ones(2, 5, 3, 7).int()}, "x must be floating point"),
    ({"gate": torch.ones(2, 5, 3, 1)}, r"gate must have shape \[2, 5, 3, 7\], not \[2, 5, 3, 1\]"),
    ({"gate": torch.ones(2, 5, 3, 7, device="meta")}, "gate is on meta, x on cpu"),
    ({"weight": torch.ones(3)}, r"weight must have shape \[7\], not \[3\]"),
    ({"weight": torch.ones(5, 7)}, r"weight must have shape \[3, 7\], not \[5, 7\]"),
    ({"weight": torch.ones(1, 3, 7)}, r"weight must be \[D\] or \[G, D\]"),
    ({"activation": "relu"}, "activation must be 'sigmoid' or 'silu', not 'relu'"),
    ({"weight_cast": "never"}, "weight_cast must be 'before' or 'after' or 'between', not 'never'"),
    ({"weight_cast": "between", "norm_before_gate": False}, "needs norm_before_gate=True"),
    ({"dtype": torch.int32}, "dtype must be floating point"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_CALLS, ids=[message for _, message in BAD_CALLS])
def test_bad_calls_are_refused_by_name(gated_rms_norm, changes, message):
    with pytest.raises(OperatorError, match=message):
        gated_rms_norm(**draw() | changes)
