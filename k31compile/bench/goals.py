"""What a case is held to: the goal, the floor below which it may not stay, and whether a measurement met them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

GOAL_MET, FLOOR_MET, BELOW, UNTOLD = "goal", "floor", "below", "noisy"
"""Verdicts: the goal is met; only the floor is; not even that; the machine was too noisy to tell."""


class Bound(NamedTuple):
    """A goal and the floor under it ("must"); None where nobody set one."""

    goal: float | None = None
    must: float | None = None

    def verdict(self, low: float, high: float) -> str | None:
        """What a value between `low` and `high` means, larger being better; None without goal and floor."""
        levels = [(GOAL_MET, self.goal), (FLOOR_MET, self.must)]
        known = [(word, level) for word, level in levels if level is not None]
        for word, level in known:
            if low >= level:
                return word
            if high >= level:
                return UNTOLD
        return BELOW if known else None


@dataclass(frozen=True)
class Goals:
    """What is wanted of a case.

    Attributes:
        ratios: opponent -> bound of the ratio other / k31.
        roof: bound of the share of this run's own probe.
        seconds: what one call may take at most, of a case that has a limit of its own; None without one.
        extra_bytes: memory for each thread beyond inputs and results; None where nothing is asked.
        memory_ratio: how many times our extra memory the opponent's must be; None where nothing is asked.

    """

    ratios: Mapping[str, Bound] = field(default_factory=dict)
    roof: Bound = field(default_factory=Bound)
    seconds: float | None = None
    extra_bytes: int | None = 2 << 20
    memory_ratio: float | None = None
