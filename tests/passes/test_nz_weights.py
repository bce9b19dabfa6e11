"""Blocks of 16 rows and 32 bytes: the conversion is its own inverse, and each parameter is decided with a reason."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from k31compile.errors import OperatorError
from k31compile.passes.layout.fractal_nz import block_columns, from_fractal_nz, nz_shape, to_fractal_nz
from k31compile.passes.layout.nz_weights import decide_nz_weights

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.uint8, torch.float8_e4m3fn)


def bits(shape, dtype, seed):
    """Any bits, NaN among them, seen as a dtype."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8, generator=generator)
    return drawn.view(dtype)


@given(
    batch=st.lists(st.integers(1, 3), max_size=2),
    rows=st.integers(1, 50),
    columns=st.integers(1, 70),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
def test_there_and_back_is_bit_for_bit(batch, rows, columns, dtype, seed):
    matrix = bits((*batch, rows, columns), dtype, seed)
    stored = to_fractal_nz(matrix)
    assert stored.is_contiguous()
    assert tuple(stored.shape) == nz_shape(matrix.shape, dtype)
    back = from_fractal_nz(stored, matrix.shape)
    assert torch.equal(back.view(torch.uint8), matrix.view(torch.uint8))


@given(rows=st.integers(1, 40), columns=st.integers(1, 70), dtype=st.sampled_from(DTYPES), data=st.data())
def test_every_element_is_where_the_definition_says(rows, columns, dtype, data):
    matrix = bits((rows, columns), dtype, 1)
    stored = to_fractal_nz(matrix).view(torch.uint8).reshape(*nz_shape(matrix.shape, dtype)[:3], -1, dtype.itemsize)
    m, n = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))
    width = block_columns(dtype)
    element = matrix.view(torch.uint8).view(rows, columns, dtype.itemsize)[m, n]
    assert torch.equal(stored[n // width, m // 16, m % 16, n % width], element)


def test_what_lies_beyond_the_matrix_is_zero():
    stored = to_fractal_nz(torch.ones(17, 3, dtype=torch.float16))
    assert stored.shape == (1, 2, 16, 16)
    assert stored.sum() == 17 * 3


@pytest.mark.parametrize("shape", [(5,), ()])
def test_a_vector_is_refused(shape):
    with pytest.raises(OperatorError, match="stores matrices"):
        to_fractal_nz(torch.zeros(shape))


def test_blocks_of_another_matrix_are_refused():
    with pytest.raises(OperatorError, match="is stored as"):
        from_fractal_nz(to_fractal_nz(torch.zeros(20, 20)), (20, 40))


def decided(function, *arguments):
    """Decisions on every input but the first, the tokens."""
    graph = make_fx(function, tracing_mode="fake")(*arguments).graph
    return decide_nz_weights(graph, range(1, len(arguments)))


X = torch.zeros(3, 64, dtype=torch.bfloat16)


def weight(*shape, dtype=torch.bfloat16):
    return torch.zeros(shape, dtype=dtype)


def test_a_linear_layers_weight_is_kept_in_blocks():
    (found,) = decided(torch.nn.functional.linear, X, weight(32, 64))
    assert (found.is_nz, found.position, found.shape, found.reason) == (True, 1, (32, 64), "")


def test_a_stack_of_experts_is_kept_in_blocks():
    (found,) = decided(lambda x, w: torch.bmm(x.expand(4, 3, 64), w.transpose(1, 2)), X, weight(4, 32, 64))
    assert found.is_nz


def test_what_no_product_reads_is_not_decided():
    assert decided(lambda x, g: x * g, X, weight(64)) == []


@pytest.mark.parametrize(
    ("function", "parameter", "reason"),
    [
        (lambda x, w: x.float() @ w, weight(64, 32, dtype=torch.float32), "float32"),
        (lambda x, w: x @ w[:, :16], weight(64, 32), "a view or a slice"),
        (lambda x, w: (x @ w, w[:, :16]), weight(64, 32), "a view or a slice"),
        (lambda x, w: (x @ w.t(), torch.embedding(w, torch.zeros(2, dtype=torch.long))), weight(32, 64), "embedding"),
        (lambda x, w: x @ w, weight(64, 1), "a side of"),
        (lambda x, w: x @ w, weight(64, 24), "no multiples of 16"),
    ],
)
def test_a_refusal_has_its_reason(function, parameter, reason):
    found = decided(function, X, parameter)
    assert not any(one.is_nz for one in found)
    assert reason in found[0].reason


def test_bytes_need_sides_of_thirty_two():
    tokens = torch.zeros(3, 48, dtype=torch.int8)
    (found,) = decided(lambda x, w: torch.mm(x, w), tokens, weight(48, 32, dtype=torch.int8))
    assert "no multiples of 32" in found.reason


EIGHT = torch.zeros(3, 64, dtype=torch.int8)


def lookup(w):
    return torch.embedding(w, torch.zeros(2, dtype=torch.long))


@pytest.mark.parametrize("product", ["ascend-a3", "ascend-950"])
@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda x, w: torch.einsum("tk,nk->tn", x, w), (32, 64)),
        (lambda x, w: torch.einsum("tk,ekn->etn", x, w), (3, 64, 32)),
        (lambda x, w: torch.matmul(x[None], w.mT), (32, 64)),
        (lambda x, w: x @ w.permute(1, 0), (32, 64)),
        (lambda x, w: torch.addmm(torch.zeros(32, dtype=x.dtype), x, w), (64, 32)),
        (lambda x, w: torch.bmm(x.expand(3, 3, 64), w.permute(0, 2, 1)), (3, 32, 64)),
        (lambda x, w: torch.baddbmm(torch.zeros(3, 3, 32, dtype=x.dtype), x.expand(3, 3, 64), w), (3, 64, 32)),
        (lambda x, w: (x @ w.t()) + torch.nn.functional.linear(x, w), (32, 64)),
        (lambda x, w: x @ w.detach().t(), (32, 64)),
    ],
)
def test_products_through_transposes_and_twice(function, shape, product):
    graph = make_fx(function, tracing_mode="fake", pre_dispatch=True)(X, weight(*shape)).graph
    (found,) = decide_nz_weights(graph, [1], product)
    assert (found.is_nz, found.reason, found.remedy, found.dtype) == (True, "", "", "bfloat16")


@pytest.mark.parametrize(
    ("function", "shape", "reason", "remedy"),
    [
        (lambda x, w: x @ w[:, :16], (64, 32), "a view or a slice", "a parameter of its own"),
        (lambda x, w: x @ torch.cat([w, w], 1), (64, 32), "a copy by aten.cat", "joined or padded already"),
        (lambda x, w: x @ w.unbind(0)[1].t(), (3, 32, 64), "a view or a slice", "a parameter of its own"),
        (lambda x, w: x @ w.t().contiguous(), (32, 64), "a copy", "leave contiguous"),
        (lambda x, w: x @ w.float().bfloat16(), (64, 32), "a cast to float32", "keep it in the dtype"),
        (lambda x, w: w @ x.t(), (32, 64), "in another place than its right matrix", "write the product as x @ weight"),
        (lambda x, w: (x @ w, w.sum()), (64, 32), "sum", "a copy of its own"),
        (lambda x, w: x @ w.view(64, 32), (32, 64), "a view or a slice", "a parameter of its own"),
        (lambda x, w: torch.einsum("tk,ken->ten", x, w), (64, 3, 32), "in another place", "write the product"),
        (lambda x, w: x @ torch.constant_pad_nd(w, (0, 16)), (64, 32), "a copy by aten.constant_pad", "padded already"),
        (lambda x, w: (x @ w.t(), lookup(w)), (32, 64), "embedding", "a parameter each"),
    ],
)
def test_other_readers_are_refused_with_a_remedy(function, shape, reason, remedy):
    graph = make_fx(function, tracing_mode="fake", pre_dispatch=True)(X, weight(*shape)).graph
    (found,) = decide_nz_weights(graph, [1])
    assert not found.is_nz
    assert reason in found.reason
    assert remedy in found.remedy


def test_a_view_of_leading_dimensions_is_for_the_a3_only():
    def function(x, w):
        return torch.bmm(x.expand(6, 3, 64), w.view(6, 64, 32))

    graph = make_fx(function, tracing_mode="fake")(X, weight(2, 3, 64, 32)).graph
    assert decide_nz_weights(graph, [1])[0].is_nz
    (found,) = decide_nz_weights(graph, [1], "ascend-950")
    assert "through a view" in found.reason
    assert found.remedy.startswith("store the parameter")


@pytest.mark.parametrize(
    ("dtype", "a3", "arch35"),
    [
        (torch.bfloat16, True, True),
        (torch.float16, True, True),
        (torch.int8, True, True),
        (torch.float8_e4m3fn, False, True),
        (torch.float32, False, False),
    ],
)
def test_dtypes_of_the_two_products(dtype, a3, arch35):
    graph = make_fx(torch.mm, tracing_mode="fake")(weight(64, 64, dtype=dtype), weight(64, 64, dtype=dtype)).graph
    for product, allowed in (("ascend-a3", a3), ("ascend-950", arch35)):
        (found,) = decide_nz_weights(graph, [1], product)
        assert found.is_nz is allowed
        assert allowed or str(dtype).removeprefix("torch.") in found.reason
    if dtype == torch.float32:
        assert found.remedy.startswith("in bfloat16 it would be")


@pytest.mark.parametrize("sides", [(64, 1), (1, 64), (360, 48), (33, 17)])
def test_sides_that_made_others_crash_stay_plain(sides):
    """Row F1: a linear layer of these features (in, out), as reported."""
    features_in, features_out = sides
    tokens = torch.zeros(3, features_in, dtype=torch.bfloat16)
    graph = make_fx(torch.nn.functional.linear, tracing_mode="fake")(tokens, weight(features_out, features_in)).graph
    (found,) = decide_nz_weights(graph, [1])
    assert not found.is_nz
    assert ("a side of" in found.reason) is (1 in sides)
    assert found.remedy


def test_one_tensor_under_two_names_is_decided_once():
    """Row F3: what is read by a product under one name and by an embedding under the other."""
    one, other = weight(32, 64), weight(32, 64)

    def function(x, w, e):
        return x @ w.t(), lookup(e)

    graph = make_fx(function, tracing_mode="fake")(X, one, other).graph
    assert [found.is_nz for found in decide_nz_weights(graph, [1, 2], tensors=[X, one, other])] == [True]
    tied = decide_nz_weights(graph, [1, 2], tensors=[X, one, one])
    assert [(found.position, found.is_nz) for found in tied] == [(1, False), (2, False)]
    assert "embedding" in tied[0].reason


def grouped(monkeypatch, dtype, scale_dtype=None, **extra):
    """A graph with a call of an operator that has the name of torch_npu's."""
    from k31compile.passes.layout import nz_weights, weight_readers

    library = torch.library.Library("nz_test", "FRAGMENT")
    monkeypatch.setattr(nz_weights, "_GROUPED", "nz_test.grouped.default")
    monkeypatch.setitem(weight_readers._WEIGHT_OF, "nz_test.grouped.default", (1,))
    library.define("grouped(Tensor[] x, Tensor[] weight, *, Tensor[]? scale=None, int group_type=0) -> Tensor")
    library.impl("grouped", lambda x, weight, scale=None, group_type=0: x[0].sum(0, keepdim=True), "Meta")
    try:
        scales = [] if scale_dtype is None else [weight(3, dtype=scale_dtype)]
        weights = [weight(64, 64, dtype=dtype), weight(64, 64, dtype=dtype)]

        def function(x, first, second, *scale):
            return torch.ops.nz_test.grouped([x, x], [first, second], scale=list(scale) or None, **extra)

        return make_fx(function, tracing_mode="fake")(X, *weights, *scales).graph
    finally:
        library._destroy()


def test_grouped_products_split_along_k_are_refused(monkeypatch):
    graph = grouped(monkeypatch, torch.bfloat16)
    assert [found.is_nz for found in decide_nz_weights(graph, [1, 2])] == [True, True]
    for found in decide_nz_weights(grouped(monkeypatch, torch.bfloat16, group_type=2), [1, 2]):
        assert "splits along K" in found.reason
        assert "group_type 0" in found.remedy


def test_mx_scales_must_be_e8m0_on_the_950(monkeypatch):
    fp8 = torch.float8_e4m3fn
    for scale, allowed in ((torch.float8_e8m0fnu, True), (torch.float32, False)):
        found = decide_nz_weights(grouped(monkeypatch, fp8, scale), [1, 2], "ascend-950")
        assert [one.is_nz for one in found] == [allowed, allowed]
        assert allowed or "has float32 scales" in found[0].reason
