"""Numbers as people read them: sizes and ages."""

from __future__ import annotations

_STEPS = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))


def size_text(count: int) -> str:
    """Bytes with three digits at most: ``812 B``, ``4.5 MiB``."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1000:
            return f"{count} B" if unit == "B" else f"{value:.1f} {unit}" if value < 100 else f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def age_text(seconds: float) -> str:
    """How long ago, in its largest unit: ``3 min``, ``5 d``; what lies ahead is ``now``."""
    for unit, length in _STEPS:
        if seconds >= length:
            return f"{int(seconds // length)} {unit}"
    return "now"
