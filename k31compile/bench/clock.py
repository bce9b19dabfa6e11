"""The clock of a run, and samples of it: CPU time of the calling thread, or wall time where several threads work."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

_SAMPLE = 2e6  # nanoseconds: a sample of less is mostly the call of the clock
_MOST_CALLS = 200

Clock = Callable[[], int]


def clock_for(threads: int) -> Clock:
    """The clock for so many threads, in nanoseconds.

    One thread's CPU time does not see others' time slices; with several threads only wall time means something.
    """
    return time.thread_time_ns if threads == 1 else time.perf_counter_ns


def calls_per_sample(call: Callable[[], Any], clock: Clock) -> int:
    """How many calls one sample needs for the clock to tell; makes two calls, of which the second is timed."""
    call()
    start = clock()
    call()
    return min(_MOST_CALLS, math.ceil(_SAMPLE / max(1, clock() - start)))


def sample(call: Callable[[], Any], calls: int, clock: Clock) -> float:
    """Nanoseconds of one call, the mean of so many."""
    start = clock()
    for _ in range(calls):
        call()
    return (clock() - start) / calls
