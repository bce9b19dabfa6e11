"""A loop whose shapes or branches depend on the data: Dynamo leaves all of its function as Python and tells nobody.

Each expert on the tokens that chose it, fetched by `torch.where(indices == i)`, is the usual one. No graph is made of
the function, so that no report of a graph could tell: what was skipped is kept here until a report takes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType

from k31compile.notes import tell

_CAUSES = ("Dynamic shape operator", "Data-dependent branching")


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


def _note(code: CodeType, error: Exception, reasons: Mapping[str, str]) -> None:
    stack = getattr(error, "real_stack", None)
    place = stack[-1] if stack else None
    where = f"{place.filename}:{place.lineno}" if place else f"{code.co_filename}:{code.co_firstlineno}"
    tell(
        f"{code.co_qualname} is left uncompiled as a whole: {where} makes a shape or a branch depend on the data, and "
        f"in a loop Dynamo gives the function up{_tried(reasons)}. For experts in a list write for each of them "
        "share = (weights * (indices == i)).sum(-1, keepdim=True); y = y + share * expert(x), which is recognised and "
        "then runs each expert on its own tokens only"
    )


def _tried(reasons: Mapping[str, str]) -> str:
    return "".join(f"; as routed experts it was refused: {reason} ({where})" for where, reason in reasons.items())
