"""How an operator refuses: one sentence that names the argument and what was expected (K31-0301)."""

from __future__ import annotations

from k31compile.errors import OperatorError


def require(condition: bool, message: str) -> None:
    """Raise `OperatorError` with `message` unless `condition` holds."""
    if not condition:
        raise OperatorError(message)
