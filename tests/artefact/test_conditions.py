"""Conditions on sizes keep their meaning as plain data."""

import json

import pytest
import sympy
from torch.utils._sympy.functions import FloorDiv, Mod

from k31compile.cache.artefact.conditions import to_data, told, value_of

A, B = sympy.symbols("s0 s1", integer=True, positive=True)
NAMES = {"s0": "T", "s1": "B"}


@pytest.mark.parametrize(
    "expression",
    [
        sympy.Eq(A, B),
        sympy.Ne(8 * A, 128),
        sympy.Eq(Mod(A, 8), 0),
        FloorDiv(A + 7, 8) <= 3,
        sympy.And(A > 2, sympy.Or(B < 5, sympy.Ne(A * B - 3, 12))),
        sympy.Not(sympy.Eq(A**2, B)),
        sympy.Max(A, B) >= 7,
        sympy.Min(A, 2 * B) < 7,
    ],
    ids=str,
)
def test_it_says_the_same_of_all_sizes(expression):
    data = json.loads(json.dumps(to_data(expression, NAMES)))
    assert told(data)
    for a in range(1, 20):
        for b in range(1, 20):
            assert bool(value_of(data, {"T": a, "B": b})) == bool(expression.subs({A: a, B: b})), (a, b)


def test_what_cannot_be_written_is_refused():
    with pytest.raises(ValueError, match="sqrt"):
        to_data(sympy.sqrt(A) > 2, NAMES)
    with pytest.raises(ValueError, match="s9"):
        to_data(sympy.Symbol("s9") > 2, NAMES)
