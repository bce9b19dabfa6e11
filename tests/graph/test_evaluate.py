"""A region runs in float64 from end to end, at sizes of our choice."""

import pytest
import torch
import torch.nn.functional as F
from captured import capture, sketch
from regions import whole

from k31compile.graph.evaluate import run_in_float64
from k31compile.graph.region import Region
from k31compile.graph.sizes import symbols_of

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(3, 4, generator=GENERATOR, dtype=torch.float64)

# A program and the same in float64 by hand.
PROGRAMS = {
    "cast down": (lambda x: x.to(torch.bfloat16) * 3, lambda x: x * 3),
    "float and half": (lambda x: x.half().float().sin(), torch.sin),
    "type_as": (lambda x: x.type_as(torch.ones(1, dtype=torch.bfloat16)).exp(), torch.exp),
    "softmax with a dtype": (lambda x: F.softmax(x, -1, dtype=torch.float32).bfloat16(), lambda x: F.softmax(x, -1)),
    "sum with a dtype": (lambda x: x.sum(-1, dtype=torch.float32), lambda x: x.sum(-1)),
    "full of bfloat16": (
        lambda x: x.bfloat16() + torch.full((4,), 0.1, dtype=torch.bfloat16),
        lambda x: x + 0.1,
    ),
    "arange": (
        lambda x: x / torch.arange(1, 5, dtype=torch.float32).sqrt(),
        lambda x: x / torch.arange(1, 5).double().sqrt(),
    ),
    "frequencies": (
        lambda x: x * 10000.0 ** -(torch.arange(0, 8, 2).float() / 8),
        lambda x: x * 10000.0 ** -(torch.arange(0, 8, 2).double() / 8),
    ),
    "zeros and eye": (lambda x: (x + torch.zeros(4)) @ torch.eye(4).exp(), lambda x: x @ torch.eye(4).double().exp()),
    "new_full": (lambda x: x.new_full((4,), 0.1) + x, lambda x: x + 0.1),
    "ones_like": (lambda x: torch.ones_like(x, dtype=torch.bfloat16) / 3 + x, lambda x: x + 1 / 3),
    "tensor": (lambda x: x * torch.tensor([1.0, 2.0, 0.5, 0.25]), lambda x: x * torch.tensor([1.0, 2, 0.5, 0.25])),
    "mask filled with the lowest": (
        lambda x: x.masked_fill(torch.ones(3, 4, dtype=torch.bool).triu(1), torch.finfo(torch.float32).min).softmax(-1),
        lambda x: x.masked_fill(torch.ones(3, 4, dtype=torch.bool).triu(1), -float("inf")).softmax(-1),
    ),
}
BY_DEFAULT = {
    "full": (lambda x: x * torch.full((4,), 0.1), lambda x: x * 0.1),
    "arange of floats": (
        lambda x: x * torch.arange(0.1, 0.5, 0.1),
        lambda x: x * torch.arange(0.1, 0.5, 0.1, dtype=torch.float64),
    ),
    "integers divided": (
        lambda x: x * (torch.arange(1, 5) / 3),
        lambda x: x * (torch.arange(1, 5).double() / 3),
    ),
    "integers times a float": (
        lambda x: x * (torch.arange(1, 5) * 0.1),
        lambda x: x * (torch.arange(1, 5).double() * 0.1),
    ),
    "linspace": (
        lambda x: x * torch.linspace(0, 1, 4),
        lambda x: x * torch.linspace(0, 1, 4, dtype=torch.float64),
    ),
}


def run(program, x, dtype=torch.float32):
    region = whole(sketch(program, x.to(dtype)))
    (result,) = run_in_float64(region, {region.leaves[0]: x}, {})
    return result


def hold(program, by_hand):
    got = run(program, X)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, by_hand(X).double(), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_is_rounded_below_float64(name):
    hold(*PROGRAMS[name])


@pytest.mark.parametrize("name", BY_DEFAULT)
def test_the_default_type_is_float64_too(name):
    hold(*BY_DEFAULT[name])


def test_integers_and_bools_keep_their_types():
    region = whole(sketch(lambda x: (x.argmax(-1), x > 0, x.topk(2).indices.int()), X.float()))
    results = run_in_float64(region, {region.leaves[0]: X}, {})
    assert [value.dtype for value in results] == [torch.int64, torch.bool, torch.int32]


def test_the_leaves_are_left_alone():
    x = X.clone()

    def program(x):
        y = x.clone()
        y[0] = 1
        return y.sin()

    run(program, x)
    assert torch.equal(x, X)


def symbolic():
    return capture(
        lambda x: torch.cat([x, x.new_zeros(x.shape[0] + 1, x.shape[1])]).cumsum(0), torch.randn(6, 4), dynamic=True
    )


def test_symbolic_sizes_take_the_numbers_of_the_substitution():
    region = whole(symbolic())
    (leaf,) = region.leaves
    rows, columns = symbols_of(leaf.meta["val"].shape)
    x = torch.randn(5, 3, dtype=torch.float64)
    (got,) = run_in_float64(region, {leaf: x}, {rows: 5, columns: 3})
    torch.testing.assert_close(got, torch.cat([x, x.new_zeros(6, 3)]).cumsum(0))


def test_a_size_that_is_not_named_keeps_its_hint():
    region = whole(symbolic())
    x = torch.randn(6, 4, dtype=torch.float64)
    (got,) = run_in_float64(region, {region.leaves[0]: x}, {})
    assert got.shape == (13, 4)


def test_plain_numbers_shrink_where_they_stand():
    captured = sketch(lambda x: x.view(20, 2, 5).sum(1) + torch.arange(20)[:, None], torch.randn(20, 10))
    region = whole(captured)
    x = torch.randn(3, 10, dtype=torch.float64)
    (got,) = run_in_float64(region, {region.leaves[0]: x}, {20: 3})
    torch.testing.assert_close(got, x.view(3, 2, 5).sum(1) + torch.arange(3)[:, None])


def test_floats_and_bools_do_not_shrink():
    region = whole(sketch(lambda x: (x * 20.0).sum(0, keepdim=True), torch.randn(20, 10)))
    x = torch.randn(3, 10, dtype=torch.float64)
    (got,) = run_in_float64(region, {region.leaves[0]: x}, {20: 3, 1: 7})
    torch.testing.assert_close(got, (x * 20).sum(0, keepdim=True))


def test_a_lent_shape_needs_no_value():
    def program(x, cache):
        return torch.zeros_like(cache).index_copy(0, torch.tensor([1]), x)

    captured = sketch(program, torch.randn(1, 4), torch.randn(20, 4))
    flow = captured.flow
    from k31compile.graph.region import Region

    region = Region.between(flow, [captured.input(0)], captured.outputs)
    x = torch.randn(1, 4, dtype=torch.float64)
    (got,) = run_in_float64(region, {captured.input(0): x}, {20: 3})
    assert got.shape == (3, 4)
    assert got.dtype == torch.float64
    assert torch.equal(got[1:2], x)


def test_grouped_products_run_in_float64():
    """The operator itself takes bfloat16 only: rows by groups, an empty group among them."""
    rows, matrices = torch.randn(6, 16), torch.randn(4, 16, 8)
    ends = torch.tensor([2, 2, 5, 6], dtype=torch.int32)
    found = sketch(lambda x, w, e: F.grouped_mm(x, w, offs=e), rows.bfloat16(), matrices.bfloat16(), ends)
    leaves = [found.input(i) for i in range(3)]
    region = Region.between(found.flow, leaves, found.outputs)
    (got,) = run_in_float64(region, dict(zip(leaves, (rows.double(), matrices.double(), ends), strict=True)), {})
    want = torch.stack([x @ matrices[g].double() for x, g in zip(rows.double(), (0, 0, 2, 2, 2, 3), strict=True)])
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
