"""Small operators that GE has no converter for: each formula against torch's own operator, in float64."""

import math

import pytest
import torch

from k31compile.targets.ascend.decompositions import OURS as ALL
from k31compile.targets.ascend.plain_formulas import COMPOSITES, OURS, TORCHS

ATEN = torch.ops.aten
GENERATOR = torch.Generator().manual_seed(3)


def draw(*shape):
    return torch.randn(shape, generator=GENERATOR, dtype=torch.float64)


X, Y, SQUARE = draw(4, 7), draw(4, 7), draw(5, 5)
CUBE = draw(3, 4, 5)
ODD = torch.tensor([[-7, 3, 0, 2**62], [5, -1, 127, -(2**63)]])
SPECIAL = torch.tensor([[1.5, math.nan, -math.inf], [math.inf, -0.0, -2.5]], dtype=torch.float64)
MASK, ROWS = draw(3, 4) > 0.2, draw(3, 4, 5) > 0.4
AT, J = torch.tensor([2, -3, 0]), torch.tensor([[1], [-1]], dtype=torch.int32)
PAIRS = torch.tensor([2, 0, 2, 2])

CASES = [
    (ATEN.mv.default, (X, Y[0])),
    (ATEN.dot.default, (X[0], Y[0])),
    (ATEN.addmv.default, (draw(4), X, Y[0]), {"beta": 0.5, "alpha": 2}),
    (ATEN.addmv.default, (torch.full((4,), math.nan).double(), X, Y[0]), {"beta": 0}),
    (ATEN.addbmm.default, (draw(4, 2), draw(3, 4, 5), draw(3, 5, 2)), {"beta": 0.5, "alpha": 2}),
    (ATEN.all.dim, (X > -1, 1, True)),
    (ATEN.all.dim, (torch.tensor([[0, 3], [2, 1]]), -1)),
    (ATEN.all.dims, (ROWS, [0, -1])),
    (ATEN.any.dims, (ROWS, [0, -1], True)),
    (ATEN.any.dims, (CUBE > 2,)),
    (ATEN.isnan.default, (SPECIAL,)),
    (ATEN.bitwise_xor.Scalar, (ODD, -6)),
    (ATEN.bitwise_xor.Tensor, (X > 0, Y > 0)),
    (ATEN.bitwise_xor.Tensor, (ODD, ODD.flip(1))),
    (ATEN.bitwise_and_.Tensor, (X > 0, Y > 0)),
    (ATEN.bitwise_or_.Tensor, (ODD, ODD.flip(1))),
    (ATEN.__lshift__.Scalar, (ODD[:, :3], 3)),
    (ATEN.__rshift__.Scalar, (ODD, 3)),
    (ATEN.trunc.default, (X * 5,)),
    (ATEN.trunc.default, (ODD,)),
    (ATEN.frac.default, (X * 5,)),
    (ATEN.fmod.Scalar, (X * 5, 0.7)),
    (ATEN.fmod.Scalar, (ODD, 4)),
    (ATEN.fmod.Tensor, (X * 5, Y)),
    (ATEN.nan_to_num.default, (SPECIAL,)),
    (ATEN.nan_to_num.default, (SPECIAL, 1.0, 2.0, -3.0)),
    (ATEN.prod.dim_int, (X, 1)),
    (ATEN.prod.dim_int, (X, 0, True)),
    (ATEN.prod.dim_int, (ODD[:, :3], -1)),
    (ATEN.prod.dim_int, (X[:, :0], 1)),
    (ATEN.min.default, (X,)),
    (ATEN.min.default, (ODD,)),
    (ATEN.min.dim, (X, 1, True)),
    (ATEN.min.dim, (ODD, 0)),
    (ATEN.var.correction, (CUBE, [0, -1]), {"correction": 2, "keepdim": True}),
    (ATEN.var.correction, (X, None)),
    (ATEN.var.correction, (X[:, :1], [1])),
    (ATEN.var_mean.correction, (X, [1]), {"correction": 0}),
    (ATEN.std_mean.correction, (CUBE, [1])),
    (ATEN.index_fill.int_Scalar, (CUBE, 1, AT, 2.5)),
    (ATEN.index_fill.int_Tensor, (CUBE, -1, AT, torch.tensor(2.5, dtype=torch.float64))),
    (ATEN.diagonal.default, (CUBE,)),
    (ATEN.diagonal.default, (CUBE, 1, 0, 2)),
    (ATEN.diagonal.default, (CUBE, -2, 2, 1)),
    (ATEN.diagonal.default, (CUBE, 9)),
    (ATEN.diagonal_scatter.default, (CUBE, draw(4, 3), 1, 0, 2)),
    (ATEN.diagonal_scatter.default, (SQUARE, draw(3), -2)),
    (ATEN.diag_embed.default, (X, -1)),
    (ATEN.diag_embed.default, (CUBE, 2, 0, 2)),
    (ATEN.trace.default, (X,)),
    (ATEN.bucketize.Tensor, (X, Y[0].sort()[0])),
    (ATEN.bucketize.Tensor, (AT, torch.tensor([-3, 0, 2])), {"right": True, "out_int32": True}),
    (ATEN.repeat_interleave.Tensor, (torch.tensor([2, 0, 3, 1]),), {"output_size": 6}),
    (ATEN.index_put.default, (CUBE, [AT], draw(3, 4, 5))),
    (ATEN.index_put.default, (CUBE, [None, J], draw(3, 2, 1, 5))),
    (ATEN.index_put.default, (CUBE, [J[:, 0], None, AT[:1]], draw(2, 4))),
    (ATEN.index_put.default, (CUBE, [J, AT], draw(5))),
    (ATEN.index_put.default, (CUBE, [PAIRS, None, PAIRS], draw(4, 4), True)),
    (ATEN.index_put.default, (CUBE, [PAIRS], draw(4, 4, 5), True)),
    (ATEN.index_put.default, (CUBE.mT.contiguous().mT, [AT[:1]], draw(1, 4, 5))),
    (ATEN.index_put.default, (CUBE, [MASK], torch.tensor(2.0, dtype=torch.float64))),
    (ATEN.index_put.default, (CUBE, [MASK], draw(1, 5), True)),
    (ATEN.index_put.default, (CUBE, [MASK], draw(int(MASK.sum()), 5))),
    (ATEN.index_put.default, (CUBE, [None, MASK.any(0)], draw(3, int(MASK.any(0).sum()), 5))),
    (ATEN.index_put.default, (CUBE, [ROWS], draw(int(ROWS.sum())), True)),
    (ATEN.index_put.default, (CUBE, [torch.zeros(3, dtype=torch.bool)], draw(0, 4, 5))),
    (ATEN.index_put.default, (CUBE > 0, [AT], torch.tensor(True))),
    (ATEN.masked_scatter.default, (CUBE, ROWS, draw(60))),
    (ATEN.masked_scatter.default, (CUBE, MASK[..., None], draw(60))),
    (ATEN.matmul.default, (X[0], Y.mT)),
    (ATEN.matmul.default, (X, Y[0])),
    (ATEN.matmul.default, (X[0], Y[0])),
    (ATEN.matmul.default, (draw(4), CUBE)),
    (ATEN.cosine_similarity.default, (X, Y)),
    (ATEN.cosine_similarity.default, (CUBE, CUBE[:1] * 0, -1, 1e-3)),
]


def formula(operator):
    return OURS.get(operator) or COMPOSITES[operator]


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case[0]))
def test_a_formula_is_its_operator(case):
    operator, arguments, *options = case
    options = options[0] if options else {}

    def run(call):
        given = [x.clone() if isinstance(x, torch.Tensor) else x for x in arguments]
        return call(*given, **options), given[0]

    (got, left), (expected, wanted) = run(formula(operator)), run(operator)
    for mine, theirs in zip(_tensors(got, left), _tensors(expected, wanted), strict=True):
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12, equal_nan=True)


def _tensors(result, first):
    return [*result, first] if isinstance(result, tuple) else [result, first]


def test_every_formula_is_tried_here():
    assert set(OURS) | set(COMPOSITES) == {case[0] for case in CASES}


@pytest.mark.parametrize("operator", [ATEN.trunc.default, ATEN.nan_to_num.default, ATEN.frac.default])
def test_what_changes_nothing_is_memory_of_its_own(operator):
    x = torch.arange(3)
    assert formula(operator)(x).data_ptr() != x.data_ptr()


def test_a_formula_that_is_not_for_a_call_leaves_the_operator():
    assert OURS[ATEN.index_put.default](CUBE, [MASK[:, 0], AT[:1]], draw(5)) is NotImplemented
    assert OURS[ATEN.repeat_interleave.Tensor](torch.tensor([1, 2])) is NotImplemented
    assert OURS[ATEN.min.default](torch.ones(3, dtype=torch.uint8)) is NotImplemented
    assert OURS[ATEN.__lshift__.Scalar](torch.ones(3, dtype=torch.int32), 31) is NotImplemented
    assert COMPOSITES[ATEN.matmul.default](X, Y.mT) is NotImplemented


WIDE = torch.tensor([2**61, -(2**61), 5, 2**62, -(2**62), 5, 0, -(2**63), 2**63 - 1, 0])


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("x", [WIDE, WIDE.view(2, 5), torch.tensor([2**31 - 1, -(2**31), 5, 5], dtype=torch.int32)])
def test_numbers_of_all_their_bits_are_sorted(x, descending):
    got, expected = (
        call(x, stable=True, dim=-1, descending=descending) for call in (ALL[ATEN.sort.stable], ATEN.sort.stable)
    )
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))


def test_torchs_own_are_there_and_none_is_ours_too():
    from torch._decomp import decomposition_table

    assert set(TORCHS) <= set(decomposition_table)
    assert not set(TORCHS) & set(ALL)
