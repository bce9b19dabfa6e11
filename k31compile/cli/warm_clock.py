"""How long a process has been there, its start by the system included: what `time` would say."""

from __future__ import annotations

import os
import time

_LOADED = time.monotonic()


def process_age() -> float:
    """Seconds since the system started this process; since this module was imported where nobody tells."""
    try:
        with open("/proc/self/stat", encoding="utf-8") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return time.monotonic() - _LOADED
