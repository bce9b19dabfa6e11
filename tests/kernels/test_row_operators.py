"""short_conv, gated_rms_norm and the attn_res phases as torch sees them, and beside other callers."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import k31compile.kernels as kernels

OPS = torch.ops.k31


def sublayer(x, state, taps, gate, weight, bank, queries):
    """One operator after the other: [B, T, C] through a convolution, a gated norm per head, and its residual."""
    y, state = OPS.short_conv(x, taps, state=state)
    normed = OPS.gated_rms_norm(y.unflatten(-1, gate.shape[2:]), gate, weight, eps=1e-5)
    maximum, total, mixture = OPS.attn_res_prepare(bank, queries, eps=1e-5)
    rows = normed.flatten(2).flatten(0, 1)
    prepared = maximum[:, 1], total[:, 1], mixture[:, 1]
    return OPS.attn_res_update(bank[:, 0], rows, *prepared, queries[1], eps=1e-5, norm_weight=taps[:, 0])[1], state


def draw(batch=2, length=5, heads=3, width=6, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    channels = heads * width

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    return (
        normal(batch, length, channels),
        normal(batch, 3, channels),
        normal(channels, 4),
        normal(batch, length, heads, width),
        normal(width),
        normal(batch * length, 4, channels),
        normal(7, channels),
    )


def by_reference(*arguments):
    """The same chain with every provider but the references put aside."""
    before = {name: operator.providers for name, operator in kernels.OPERATORS.items()}
    for operator in kernels.OPERATORS.values():
        object.__setattr__(operator, "providers", operator.providers[-1:])
    try:
        return sublayer(*arguments)
    finally:
        for name, providers in before.items():
            object.__setattr__(kernels.OPERATORS[name], "providers", providers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_each_dtype(dtype):
    arguments = draw(dtype=dtype)
    bound = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 5e-2)
    exact = by_reference(*(x.double() for x in arguments))
    for got, want in zip(sublayer(*arguments), exact, strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), want, rtol=bound, atol=bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_fake_agrees_with_real(dtype):
    arguments = draw(dtype=dtype)
    with FakeTensorMode() as mode:
        fake = sublayer(*(mode.from_tensor(x) for x in arguments))
    for a, b in zip(sublayer(*arguments), fake, strict=True):
        assert (a.shape, a.dtype, a.stride(), a.device) == (b.shape, b.dtype, b.stride(), b.device)


def test_symbolic_sizes_stay_symbolic():
    environment = ShapeEnv()
    mode = FakeTensorMode(shape_env=environment)

    def symbolic(tensor):
        context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * tensor.dim())
        return mode.from_tensor(tensor, symbolic_context=context)

    x, state, taps, gate, weight, bank, queries = map(symbolic, draw())
    with mode:
        found = [
            *OPS.short_conv(x, taps, state=state),
            OPS.gated_rms_norm(gate, gate, weight, eps=1e-5),
            *OPS.attn_res_prepare(bank, queries, eps=1e-5),
            *OPS.attn_res_update(x[0], None, taps[:, 0], taps[:, 1], x[0], weight, eps=1e-5),
        ]
    assert all(isinstance(size, torch.SymInt) for tensor in found for size in tensor.shape)
    assert not environment.guards


def test_inside_inductor():
    compiled = torch.compile(lambda *a: sublayer(a[0] * 2, *a[1:]), backend="inductor", fullgraph=True)
    for length in (5, 7, 8):
        arguments = draw(2, length)
        expected = sublayer(arguments[0] * 2, *arguments[1:])
        torch.testing.assert_close(compiled(*arguments), expected)


def test_several_callers_at_once():
    cases = [draw(2, 9 + i, 5, 30, seed=i) for i in range(6)]
    alone = [sublayer(*case) for case in cases]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda case: sublayer(*case), cases * 6))
    for got, want in zip(together, alone * 6, strict=True):
        assert all(map(torch.equal, got, want))


def test_under_autocast_nothing_is_narrowed():
    arguments = draw()
    want = sublayer(*arguments), by_reference(*arguments)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = sublayer(*arguments), by_reference(*arguments)
    for a, b in zip(got, want, strict=True):
        assert all(map(torch.equal, a, b))
