"""Root mean square norms as their authors write them become one operator; what is none stays as it is."""

import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

sys.path.insert(0, str(Path(__file__).parent))

from emulated import Emulated

from k31compile.targets.ascend.decompositions import decomposition_table
from k31compile.targets.ascend.fuse_rms_norm import fuse_rms_norms
from k31compile.targets.ascend.offline.session import open_session
from k31compile.targets.ascend.profiles import profile_of
from k31compile.targets.ascend.share_equal import drop_dead_copies, share_equal_calls

A3 = profile_of("ascend-a3")


def fused(function, *inputs):
    """How many norms were fused; what the graph gives is compared with the function first."""
    open_session(A3)
    module = make_fx(function, decomposition_table=decomposition_table(), tracing_mode="fake")(*inputs)
    mode = next(node.meta["val"].fake_mode for node in module.graph.nodes if node.op == "placeholder")
    assert isinstance(mode, FakeTensorMode)
    with mode:
        drop_dead_copies(module.graph)
        share_equal_calls(module.graph)
        count = fuse_rms_norms(module.graph, A3)
    module.graph.lint()
    module.recompile()
    got, expected = Emulated(module, has_views=True).run(*inputs), function(*inputs)
    torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-2)
    assert got.dtype == expected.dtype
    return count


def wide_then_cast(x, w):
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * w.float()).to(x.dtype)


def cast_then_weigh(x, w):
    wide = x.to(torch.float32)
    return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def by_product(x, w):
    wide = x.float()
    return (w.float() * (torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-6) * wide)).to(x.dtype)


def by_torch(x, w):
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), w, 1e-5)


SPELLINGS = [wide_then_cast, cast_then_weigh, by_product, by_torch]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("shape", [(3, 48), (2, 1, 7), (5,)])
def test_a_norm_is_one_operator(spelling, dtype, shape):
    draw = torch.Generator().manual_seed(0)
    x, w = (torch.randn(*sizes, generator=draw).to(dtype) for sizes in (shape, shape[-1:]))
    assert fused(spelling, x, w) == 1


def test_two_of_them_are_two():
    def function(x, w):
        return wide_then_cast(by_product(x, w) + x, w)

    assert fused(function, torch.randn(4, 32).bfloat16(), torch.randn(32).bfloat16()) == 2


def other_dimension(x, w):
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(0, keepdim=True) + 1e-5) * w.float()).to(x.dtype)


def cubed(x, w):
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(4).mean(-1, keepdim=True) + 1e-5) * w.float()).to(x.dtype)


def squares_of_something_else(x, w):
    wide = x.float()
    return (wide * torch.rsqrt((wide + 1).square().mean(-1, keepdim=True) + 1e-5) * w.float()).to(x.dtype)


def stays_wide(x, w):
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * w.float()


def scale_is_read_elsewhere(x, w):
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
    return (wide * scale * w.float()).to(x.dtype) + scale.to(x.dtype)


def weight_for_each_row(x, w):
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * w.float()[:, None]).to(x.dtype)


def narrow(x, w):
    """In float16 the squares of 300 are no numbers any more; torch_npu's operator squares in float32."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * w


@pytest.mark.parametrize(
    "near_miss",
    [
        other_dimension,
        cubed,
        squares_of_something_else,
        stays_wide,
        scale_is_read_elsewhere,
        weight_for_each_row,
        narrow,
    ],
)
def test_what_is_no_such_norm_stays(near_miss):
    assert fused(near_miss, torch.randn(32, 32).bfloat16(), torch.rand(32).bfloat16() + 0.5) == 0


def test_a_cache_that_is_written_before_the_result_is_not_read_anew():
    def function(cache, w):
        wide = cache.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
        cache.index_fill_(0, torch.tensor([0]), 3.0)
        return (wide * scale * w.float()).to(cache.dtype)

    # Given copies: the function writes its argument.
    module = make_fx(function, decomposition_table=decomposition_table())(torch.randn(4, 32), torch.ones(32))
    open_session(A3)
    assert fuse_rms_norms(module.graph, A3) == 0


def test_squares_that_overflow_in_the_authors_dtype_still_do():
    large = torch.full((2, 32), 300.0, dtype=torch.float16)
    assert torch.equal(narrow(large, torch.ones(32, dtype=torch.float16)), torch.zeros_like(large))
    assert fused(narrow, large, torch.ones(32, dtype=torch.float16)) == 0


def test_a_weight_of_another_dtype_stays():
    assert fused(wide_then_cast, torch.randn(3, 32).bfloat16(), torch.randn(32)) == 0


def epsilon_with_a_factor(x, w):
    wide = x.float()
    scale = torch.rsqrt(torch.add(wide.square().mean(-1, keepdim=True), 0.5, alpha=4.0))
    return (wide * scale * w.float()).to(x.dtype)


def squares_of_half_width(x, w):
    x = x * 200
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * w


def mean_in_another_dtype(x, w):
    wide = x.float()
    mean = wide.square().mean(-1, keepdim=True, dtype=torch.float64).float()
    return (wide * torch.rsqrt(mean + 1e-5) * w.float()).to(x.dtype)


@pytest.mark.parametrize("near_miss", [epsilon_with_a_factor, squares_of_half_width, mean_in_another_dtype])
def test_what_computes_something_else_stays(near_miss):
    assert fused(near_miss, 5 * torch.randn(32, 32).half(), torch.rand(32).half() + 0.5) == 0


def written_behind_its_cast(cache, w, row):
    cache = cache.clone()
    wide = cache.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
    cache.copy_(row.expand(cache.shape))
    return (wide * scale * w.float()).to(row.dtype)


def weight_written_behind_its_cast(x, w, row):
    weight = w.clone()
    kept = weight.float()
    weight.copy_(row)
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * kept).to(x.dtype)


@pytest.mark.parametrize("function", [written_behind_its_cast, weight_written_behind_its_cast])
def test_a_cast_keeps_what_was_there_before_a_write(function):
    draw = torch.Generator().manual_seed(0)
    cache, w, row = (torch.randn(*sizes, generator=draw).bfloat16() for sizes in ((4, 32), (32,), (32,)))
    assert fused(function, cache, w, 9 * row) == 0
