"""From samples in turns to a ratio with its spread, and the refusal to give one where the spread hides the effect."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple


class Ratio(NamedTuple):
    """How many times as long the other takes: the median over the rounds, and the quartiles around it."""

    middle: float
    low: float
    high: float
    rounds: int

    @property
    def spread(self) -> float:
        """Distance of the quartiles over the median."""
        return (self.high - self.low) / self.middle

    @property
    def is_noisy(self) -> bool:
        """Whether the quartiles are farther from each other than the median is from 1, as factors."""
        return math.log(self.high / self.low) > abs(math.log(self.middle))

    def __str__(self) -> str:
        if self.is_noisy:
            return f"noisy: {self.low:.2f} .. {self.high:.2f}"
        return f"{self.middle:.2f}"


def ratio_of(ours: Sequence[float], other: Sequence[float]) -> Ratio:
    """The ratio other / ours of samples that were taken in the same rounds."""
    ratios = [b / a for a, b in zip(ours, other, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return Ratio(middle, low, high, len(ratios))


def quartiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile."""
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return low, middle, high
