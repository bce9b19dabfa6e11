"""Wrong results are seen: picks below the edge, too few picks, numbers that are off."""

import math

import pytest
import torch

from k31compile.bench.compare import InPlace, selection_differs, tensors_differ

SCORES = torch.tensor([[5.0, 1.0, 4.0, 3.0], [2.0, -math.inf, -math.inf, 1.0]])


def test_the_best_positions_in_any_order_are_right() -> None:
    for picked in ([[0, 2], [0, 3]], [[2, 0], [3, 0]]):
        assert selection_differs(torch.tensor(picked), SCORES, 2, 0.0) is None


def test_what_is_not_visible_does_not_count() -> None:
    assert selection_differs(torch.tensor([[0, 2, 3], [0, 3, 1]]), SCORES, 3, 0.0) is None
    assert selection_differs(torch.tensor([[0, 2, 3], [0, 3, -1]]), SCORES, 3, 0.0) is None


@pytest.mark.parametrize(
    ("picked", "says"),
    [
        ([[0, 3], [0, 3]], "row 0 picked a score 1.0e+00 below its edge"),
        ([[0, 0], [0, 3]], "row 0 picked 1 positions, not 2"),
        ([[0, 2], [0, 1]], "row 1 picked 1 positions, not 2"),
        ([[0, 2], [0, -1]], "row 1 picked 1 positions, not 2"),
        ([[0, 9], [0, 3]], "row 0 picked 1 positions, not 2"),
    ],
)
def test_a_wrong_selection_is_named(picked: list[list[int]], says: str) -> None:
    assert selection_differs(torch.tensor(picked), SCORES, 2, 0.0) == says


def test_nearly_equal_scores_may_be_told_apart_either_way() -> None:
    scores = torch.tensor([[1.0, 0.999, 0.9]])
    assert selection_differs(torch.tensor([[1]]), scores, 1, 0.01) is None
    assert selection_differs(torch.tensor([[1]]), scores, 1, 1e-4) is not None
    assert selection_differs(torch.tensor([[2]]), scores, 1, 0.01) is not None


def test_what_was_written_in_place_is_compared_too() -> None:
    right = (torch.ones(3), torch.full((2,), 2.0))
    assert tensors_differ((torch.ones(3), InPlace(torch.full((2,), 2.0))), right, 1e-6) is None
    assert "result 1 is 5.0e-01 away" in str(tensors_differ((torch.ones(3), InPlace(torch.ones(2))), right, 1e-6))


def test_tensors_are_held_to_their_tolerance() -> None:
    right = (torch.ones(3), torch.tensor([[100.0, -200.0]]))
    assert tensors_differ((torch.ones(3), torch.tensor([[101.0, -200.0]])), right, 0.01) is None
    assert "result 1 is 1.0e-02 away" in str(
        tensors_differ((torch.ones(3), torch.tensor([[102.0, -200.0]])), right, 5e-3)
    )
    assert tensors_differ((torch.ones(3),), right, 1.0) == "1 tensors instead of 2"
    assert "nan" in str(tensors_differ((torch.ones(3), right[1] * math.nan), right, 1.0))
    assert "is [4], not [3]" in str(tensors_differ((torch.ones(4), right[1]), right, 1.0))
