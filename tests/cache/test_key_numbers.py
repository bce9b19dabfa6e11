"""Numbers that Dynamo hands on as symbols: what becomes part of a graph is part of its key."""

import pytest
import torch
from key_cases import differing, draw, key_of
from torch import Tensor
from torch._dynamo.decorators import mark_unbacked

from k31compile.errors import KeyingError


def scaled(x: Tensor, factor: float) -> Tensor:
    return x * factor + 1


def test_a_float_that_is_no_constant_is_in_the_key_by_its_value() -> None:
    one, other = (key_of(scaled, draw(3), factor, dynamic=True) for factor in (1.5, 2.5))
    assert differing(one, other) == {"inputs"}
    assert "number 1.5" in one.ingredients["inputs"]
    assert key_of(scaled, draw(3), 1.5, dynamic=True).digest == one.digest


def test_a_number_that_follows_from_a_size_is_not() -> None:
    one, other = (key_of(lambda x: x * (x.shape[0] ** 0.5), draw(size, 2), dynamic=True) for size in (3, 5))
    assert one.digest == other.digest


def test_a_size_that_nobody_may_know_has_no_key() -> None:
    tensor = draw(6, 3)
    mark_unbacked(tensor, 0)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        key_of(lambda x: x * 2, tensor)
    assert isinstance(caught.value.inner_exception, KeyingError)
