"""A running estimate of the bytes in a store, so that a write far from the bounds need not look at every entry.

A file of lines, each a number of bytes that came; lines are appended, which processes can do at once without a lock. It
only decides when to look closely: whoever looks writes it anew. What leaves is not noted, so it errs upwards.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from k31compile.store import atomic_write

_MOST_LINES = 512  # then everything is counted again, whatever was lost in between
_MOST_BYTES = 1 << 16


class Usage:
    """The estimate of one store, kept at a path."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def estimate(self) -> int | None:
        """How many bytes there are at most, or None when nobody knows and they are to be counted."""
        try:
            handle = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                if not stat.S_ISREG(os.fstat(handle).st_mode):
                    return None
                lines = os.read(handle, _MOST_BYTES).split(b"\n")
            finally:
                os.close(handle)
            numbers = [int(line) for line in lines[:-1]]
        except (OSError, ValueError):
            return None
        is_known = 0 < len(numbers) <= _MOST_LINES and not lines[-1] and min(numbers) >= 0
        return sum(numbers) if is_known else None

    def add(self, amount: int) -> None:
        """Note that so many bytes came."""
        with contextlib.suppress(OSError):
            flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            handle = os.open(self._path, flags)
            try:
                os.write(handle, b"%d\n" % amount)
            finally:
                os.close(handle)

    def reset(self, amount: int) -> None:
        """Write down what was counted."""
        with contextlib.suppress(OSError):
            atomic_write(self._path, b"%d\n" % amount)
