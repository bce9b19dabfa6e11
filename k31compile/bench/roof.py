"""This run's own probes of the machine: what a share of the roof is a share of."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch

from k31compile.bench.case import Roof
from k31compile.bench.clock import Clock
from k31compile.bench.dtypes import has_bf16_products

_SIDE = 1536  # of a square product: large enough for its library's best, short enough to be asked before every case
_BYTES = 320 << 20  # beyond any cache
_REPEATS = 4


def probe(kind: str, clock: Clock) -> float:
    """What this machine does of that kind in a nanosecond now: operations of the better product, or bytes.

    For "bfloat16" products in both dtypes are tried: where bfloat16 is emulated, float32 is the roof.
    """
    if kind in ("in place", "read"):
        numbers = torch.ones(_BYTES // 4)
        if kind == "read":
            return _BYTES / _least(numbers.sum, clock)
        return 2.0 * _BYTES / _least(lambda: numbers.mul_(0.999), clock)
    dtypes = [torch.float32]
    if kind == "bfloat16" and has_bf16_products():  # emulated, one product would take minutes
        dtypes.append(torch.bfloat16)
    return max(2.0 * _SIDE**3 / _least(functools.partial(_product, _matrix(dtype)), clock) for dtype in dtypes)


def cores_had(threads: int) -> float:
    """How much of so many threads' wall time this process got during a product: below 1 others were at work.

    1 for one thread, whose CPU time does not see others.
    """
    if threads == 1:
        return 1.0
    matrix = _matrix(torch.float32)
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(_REPEATS):
        _product(matrix)
    return (time.process_time() - cpu) / (time.perf_counter() - wall) / threads


class Probed:
    """The best that the probes of one case have shown: asked before and after it, for the machine may change."""

    def __init__(self, roof: Roof | None, clock: Clock) -> None:
        self._roof, self._clock, self._best = roof, clock, 0.0

    def ask(self) -> None:
        """Run the case's probe, if it has one."""
        if self._roof is not None:
            self._best = max(self._best, probe(self._roof.kind, self._clock))

    def share(self, nanoseconds: float) -> float | None:
        """The share of the roof that a call of so many nanoseconds reached; None without a probe."""
        return None if self._roof is None else self._roof.work / nanoseconds / self._best


@functools.cache
def _matrix(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(_SIDE, _SIDE, generator=torch.Generator().manual_seed(0)).to(dtype)


def _product(matrix: torch.Tensor) -> torch.Tensor:
    return matrix @ matrix


def _least(call: Callable[[], object], clock: Clock) -> int:
    times = []
    for _ in range(_REPEATS):
        start = clock()
        call()
        times.append(clock() - start)
    return min(times)
