"""Which dimension holds which letter, and the views there and back."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from k31compile.graph.layout import Layout, layouts

SIZES = {"b": 2, "t": 3, "h": 5, "d": 7}
PERMUTATIONS = list(itertools.permutations(range(4)))


def numbered(shape):
    return torch.arange(math.prod(shape)).reshape(shape)


@pytest.mark.parametrize("order", PERMUTATIONS, ids=str)
def test_every_order_of_four_letters_goes_there_and_back(order):
    tensor = numbered([list(SIZES.values())[j] for j in order])
    (layout,) = layouts(tensor.shape, "bthd", SIZES)
    canonical = layout.canonical(tensor)
    assert canonical.shape == tuple(SIZES.values())
    assert torch.equal(layout.restore(canonical, 4), tensor)
    where = (1, 2, 3, 4)
    assert canonical[where] == tensor[tuple(where[j] for j in order)]


def test_the_ascending_order_comes_first():
    first = next(layouts((3, 3, 3), "bth", {}))
    assert first.dims == (0, 1, 2)


def test_all_orders_are_offered_where_nothing_is_known():
    assert {layout.dims for layout in layouts((3, 3, 3), "bth", {})} == set(itertools.permutations(range(3)))


def test_a_letter_of_size_one_may_be_absent():
    (layout,) = layouts((3, 7), "bthd", {**SIZES, "b": 1, "h": 1})
    assert layout.dims == (None, 0, None, 1)
    assert layout.canonical(numbered((3, 7))).shape == (1, 3, 1, 7)
    assert layout.size("h", (3, 7)) == 1
    assert layout.size("d", (3, 7)) == 7


def test_a_letter_of_another_size_may_not():
    assert not list(layouts((3, 7), "btd", {"b": 2, "t": 3, "d": 7}))


def test_dimensions_of_size_one_may_be_left_over():
    found = list(layouts((1, 3, 1, 7), "td", {"t": 3, "d": 7}))
    assert [layout.dims for layout in found] == [(1, 3)]
    assert found[0].canonical(numbered((1, 3, 1, 7))).shape == (3, 7)


def test_a_dimension_of_another_size_may_not_be_left_over():
    assert not list(layouts((3, 2, 7), "td", {"t": 3, "d": 7}))


def test_a_present_letter_is_preferred_to_an_absent_one():
    absent = [layout.dims.count(None) for layout in layouts((3, 1, 7), "thd", {})]
    assert absent == sorted(absent)


def test_canonical_is_a_view():
    tensor = numbered((7, 3, 2, 5))
    layout = Layout("bthd", (2, 1, 3, 0))
    assert layout.canonical(tensor).data_ptr() == tensor.data_ptr()
    assert layout.restore(layout.canonical(tensor), 4).data_ptr() == tensor.data_ptr()


@settings(max_examples=60, deadline=None)
@given(shape=st.lists(st.integers(1, 4), min_size=1, max_size=4), letters=st.integers(1, 4), known=st.booleans())
def test_whatever_is_offered_fits_and_round_trips(shape, letters, known):
    names = "bthd"[:letters]
    sizes = dict(zip(names, shape, strict=False)) if known else {}
    tensor = numbered(shape)
    found = list(layouts(shape, names, sizes))
    assert len({layout.dims for layout in found}) == len(found)
    for layout in found:
        canonical = layout.canonical(tensor)
        assert canonical.shape == tuple(layout.size(letter, shape) for letter in names)
        assert all(layout.size(letter, shape) == size for letter, size in sizes.items())
        back = layout.restore(canonical, len(shape))
        assert back.shape == tensor.shape
        assert torch.equal(back, tensor)
