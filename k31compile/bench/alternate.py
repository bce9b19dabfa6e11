"""Variants in turns: in every round each once, in an order that changes, so that none always follows the same one."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping

Sampler = Callable[[], float]
"""Takes one sample of a variant, in nanoseconds of one call."""

FEWEST_ROUNDS, MOST_ROUNDS = 5, 100


def alternate(
    samplers: Mapping[str, Sampler],
    seconds: float,
    fewest: int = FEWEST_ROUNDS,
    now: Callable[[], float] = time.monotonic,
) -> dict[str, list[float]]:
    """Samples of every variant, one of each in a round; at least `fewest` rounds, then until `seconds` are over."""
    order, shuffle = list(samplers), random.Random(0).shuffle
    taken: dict[str, list[float]] = {name: [] for name in order}
    end, rounds = now() + seconds, 0
    while rounds < fewest or (rounds < MOST_ROUNDS and now() < end):
        shuffle(order)
        for name in order:
            taken[name].append(samplers[name]())
        rounds += 1
    return taken
