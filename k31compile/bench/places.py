"""Operands that come from DRAM: copies in more memory than the caches hold, and walks over them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any


class Places:
    """Copies of something in more memory than the caches hold, walked by several variants from far apart.

    Each walk begins at another place, so that no variant finds what the one before it has just brought from DRAM: that
    holds as long as all of them take as many steps.
    """

    def __init__(self, copies: Sequence[Any], walks: int = 8) -> None:
        self._copies, self._walks, self._begun = copies, walks, 0

    def walk(self) -> Iterator[Any]:
        """An endless walk over the copies."""
        place = self._begun % self._walks * len(self._copies) // self._walks
        self._begun += 1
        while True:
            yield self._copies[place]
            place = (place + 1) % len(self._copies)
