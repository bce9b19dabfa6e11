"""Variants in turns, on a clock that the test moves."""

import time
from collections.abc import Callable
from itertools import pairwise

from k31compile.bench.alternate import MOST_ROUNDS, alternate
from k31compile.bench.clock import calls_per_sample, clock_for, sample
from k31compile.bench.places import Places


class FakeTime:
    """A clock that only the variants move."""

    def __init__(self) -> None:
        self.nanoseconds, self.called = 0, []

    def __call__(self) -> int:
        return self.nanoseconds

    def seconds(self) -> float:
        return self.nanoseconds / 1e9

    def variant(self, name: str, takes: int) -> Callable[[], None]:
        def call() -> None:
            self.called.append(name)
            self.nanoseconds += takes

        return call


def samplers(clock: FakeTime, **takes: int) -> dict[str, Callable[[], float]]:
    calls = {name: clock.variant(name, time) for name, time in takes.items()}
    return {name: lambda call=call: sample(call, 1, clock) for name, call in calls.items()}


def test_every_round_has_each_variant_once_and_its_own_time() -> None:
    clock = FakeTime()
    taken = alternate(samplers(clock, a=1000, b=3000, c=2000), 0.0, fewest=20, now=clock.seconds)
    assert taken == {"a": [1000.0] * 20, "b": [3000.0] * 20, "c": [2000.0] * 20}
    rounds = [clock.called[at : at + 3] for at in range(0, 60, 3)]
    assert all(sorted(one) == ["a", "b", "c"] for one in rounds)
    assert len({tuple(one) for one in rounds}) > 2, "nobody always follows the same one"
    assert {("a", "b"), ("b", "a"), ("a", "c"), ("c", "a")} <= {pair for one in rounds for pair in pairwise(one)}


def test_rounds_go_on_until_the_time_is_over_and_not_for_ever() -> None:
    clock = FakeTime()
    taken = alternate(samplers(clock, a=10**8, b=10**8), 1.0, fewest=2, now=clock.seconds)
    assert len(taken["a"]) == len(taken["b"]) == 5  # of 0.2 s each
    clock = FakeTime()
    assert len(alternate(samplers(clock, a=1), 1.0, now=clock.seconds)["a"]) == MOST_ROUNDS


def test_slow_variants_get_the_fewest_rounds_all_the_same() -> None:
    clock = FakeTime()
    assert len(alternate(samplers(clock, a=10**10), 1.0, fewest=5, now=clock.seconds)["a"]) == 5


def test_a_sample_is_long_enough_for_the_clock() -> None:
    clock = FakeTime()
    fast = clock.variant("fast", 10_000)
    calls = calls_per_sample(fast, clock)
    assert calls == 200
    assert sample(fast, calls, clock) == 10_000
    assert calls_per_sample(clock.variant("slow", 10**9), clock) == 1


def test_one_thread_is_measured_in_its_own_time() -> None:
    before = clock_for(1)()
    time.sleep(0.05)
    assert clock_for(1)() - before < 20e6
    before = clock_for(2)()
    time.sleep(0.05)
    assert clock_for(2)() - before >= 50e6


def test_walks_over_copies_stay_far_from_each_other() -> None:
    places = Places(list(range(64)))
    first, second, third = (places.walk() for _ in range(3))
    steps = [(next(first), next(second), next(third)) for _ in range(64)]
    assert {one for one, _, _ in steps} == set(range(64))
    assert min(min((b - a) % 64, (a - b) % 64) for a, b, _ in steps) == 8
    assert min(min((c - a) % 64, (a - c) % 64) for a, _, c in steps) == 16
