"""Ratios, their spread, and the refusal to say anything where the spread hides the effect."""

import pytest

from k31compile.bench.goals import Bound
from k31compile.bench.statistics import ratio_of


def test_a_clear_ratio_is_told_with_its_spread() -> None:
    ratio = ratio_of([1.0, 1.0, 1.0, 1.0, 1.0], [2.8, 2.9, 3.0, 3.1, 3.2])
    assert (ratio.middle, ratio.low, ratio.high, ratio.rounds) == (3.0, 2.9, 3.1, 5)
    assert ratio.spread == pytest.approx(0.2 / 3)
    assert not ratio.is_noisy
    assert str(ratio) == "3.00"


def test_ratios_are_of_one_round_and_not_of_medians() -> None:
    # the machine became slower in the middle, for both alike: nothing of that is in the ratio
    ratio = ratio_of([1.0, 1.0, 5.0, 5.0, 5.0], [2.0, 2.0, 10.0, 10.0, 10.0])
    assert (ratio.middle, ratio.spread) == (2.0, 0.0)


@pytest.mark.parametrize("factor", [1.1, 1 / 1.1])
def test_a_spread_larger_than_the_effect_is_refused(factor: float) -> None:
    noise = [0.8, 0.9, 1.0, 1.1, 1.3]
    ratio = ratio_of([1.0] * 5, [factor * one for one in noise])
    assert ratio.is_noisy
    assert str(ratio) == f"noisy: {ratio.low:.2f} .. {ratio.high:.2f}"
    assert not ratio_of([1.0] * 5, [3 * factor * one for one in noise]).is_noisy


def test_equal_times_are_refused_too_and_a_small_sure_effect_is_not() -> None:
    assert ratio_of([1.0] * 5, [0.99, 1.0, 1.0, 1.0, 1.01]).is_noisy is False  # no spread between the quartiles
    assert ratio_of([1.0] * 5, [0.98, 0.99, 1.0, 1.01, 1.02]).is_noisy
    assert not ratio_of([1.0] * 5, [1.049, 1.05, 1.05, 1.05, 1.051]).is_noisy


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (3.0, 3.0, "goal"),
        (2.5, 2.5, "floor"),
        (1.9, 1.9, "below"),
        (3.1, 3.4, "goal"),
        (2.9, 3.1, "noisy"),  # on both sides of the goal
        (1.9, 2.1, "noisy"),  # on both sides of the floor
        (2.1, 2.9, "floor"),
    ],
)
def test_verdicts_of_a_value_between_two_ends(low: float, high: float, verdict: str) -> None:
    assert Bound(3.0, 2.0).verdict(low, high) == verdict


def test_what_nobody_asks_has_no_verdict() -> None:
    assert Bound().verdict(1.0, 1.0) is None
    assert Bound(None, 2.0).verdict(2.5, 2.5) == "floor"
    assert Bound(3.0).verdict(2.5, 2.5) == "below"
