"""Sentences about what no graph holds: logged at once, and kept until a report takes them."""

from __future__ import annotations

import logging

log = logging.getLogger("k31compile")

_untold: list[str] = []
_logged: set[str] = set()


def tell(note: str) -> None:
    """Log a sentence now, once in a process, and keep it for the next report."""
    if note not in _logged:
        _logged.add(note)
        log.warning(note)
    if note not in _untold:
        _untold.append(note)


def take_notes() -> list[str]:
    """What was told since the last call, each a sentence for a report."""
    notes = list(_untold)
    _untold.clear()
    return notes
