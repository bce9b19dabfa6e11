"""Sentences about what no graph holds: logged at once, kept until a report of the same model takes them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger("k31compile")

_untold: list[tuple[object, str]] = []
_logged: set[str] = set()
_compilers: list[object] = [None]


@contextmanager
def telling_for(compiler: object) -> Iterator[None]:
    """Let what is told inside the block be for reports of this compiler alone: each compiled model has its own."""
    _compilers.append(compiler)
    try:
        yield
    finally:
        _compilers.pop()


def tell(note: str) -> None:
    """Log a sentence now, once in a process, and keep it for the next report."""
    if note not in _logged:
        _logged.add(note)
        log.warning(note)
    if not any(compiler is _compilers[-1] and kept == note for compiler, kept in _untold):
        _untold.append((_compilers[-1], note))


def take_notes() -> list[str]:
    """What was told since the last call, each a sentence for a report.

    Inside of `telling_for` that is what was told for its compiler or for nobody, outside of all it is everything.
    """
    asking = _compilers[-1]
    taken = [pair for pair in _untold if asking is None or pair[0] in (None, asking)]
    _untold[:] = [pair for pair in _untold if pair not in taken]
    return list(dict.fromkeys(note for _, note in taken))
