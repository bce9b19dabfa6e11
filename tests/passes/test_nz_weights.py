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
        (lambda x, w: x @ w[:, :16], weight(64, 32), None),
        (lambda x, w: (x @ w, w[:, :16]), weight(64, 32), "a view or a slice"),
        (lambda x, w: (x @ w.t(), torch.embedding(w, torch.zeros(2, dtype=torch.long))), weight(32, 64), "embedding"),
        (lambda x, w: x @ w, weight(64, 1), "a side of"),
        (lambda x, w: x @ w, weight(64, 24), "no multiples of 16"),
    ],
)
def test_a_refusal_has_its_reason(function, parameter, reason):
    found = decided(function, X, parameter)
    assert not any(one.is_nz for one in found)
    if reason is not None:
        assert reason in found[0].reason


def test_bytes_need_sides_of_thirty_two():
    tokens = torch.zeros(3, 48, dtype=torch.int8)
    (found,) = decided(lambda x, w: torch.mm(x, w), tokens, weight(48, 32, dtype=torch.int8))
    assert "no multiples of 32" in found.reason
