"""A loop whose shapes or branches depend on the data: Dynamo leaves all of its function as Python and tells nobody.

Each expert on the tokens that chose it, fetched by `torch.where(indices == i)`, is the usual one. No graph is made of
the function, so that no report of a graph could tell: what was skipped is kept here until a report takes it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType

log = logging.getLogger("k31compile")

_CAUSES = ("Dynamic shape operator", "Data-dependent branching")
_told: set[str] = set()
_untold: list[str] = []


@contextmanager
def tell_of_skipped(code: CodeType, reasons: Callable[[], Mapping[str, str]]) -> Iterator[None]:
    """Note it where Dynamo gives the function up, inside the block, because something in a loop depends on the data.

    `reasons` gives why loops over data were not replaced, by where they are.
    """
    try:
        yield
    except Exception as error:
        if any(cause in str(error) for cause in _CAUSES):
            _note(code, error, reasons())
        raise


def take_skipped() -> list[str]:
    """What was skipped since the last call, each a sentence for a report; it was logged when it happened."""
    notes = list(_untold)
    _untold.clear()
    return notes


def _note(code: CodeType, error: Exception, reasons: Mapping[str, str]) -> None:
    stack = getattr(error, "real_stack", None)
    place = stack[-1] if stack else None
    where = f"{place.filename}:{place.lineno}" if place else f"{code.co_filename}:{code.co_firstlineno}"
    text = (
        f"{code.co_qualname} is left uncompiled as a whole: {where} makes a shape or a branch depend on the data, and "
        f"in a loop Dynamo gives the function up{_tried(reasons)}. For experts in a list write for each of them "
        "share = (weights * (indices == i)).sum(-1, keepdim=True); y = y + share * expert(x), which is recognised and "
        "then runs each expert on its own tokens only"
    )
    if text not in _untold:
        _untold.append(text)
    if text not in _told:
        _told.add(text)
        log.warning(text)


def _tried(reasons: Mapping[str, str]) -> str:
    return "".join(f"; as routed experts it was refused: {reason} ({where})" for where, reason in reasons.items())
