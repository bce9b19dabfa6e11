"""The one error that an operator raises when it is given arguments that it cannot serve."""

from __future__ import annotations


class OperatorError(ValueError):
    """Arguments outside an operator's contract; the message names the argument and what was expected."""

    code = "K31-0301"


def require(condition: bool, message: str) -> None:
    """Raise `OperatorError` with `message` unless `condition` holds."""
    if not condition:
        raise OperatorError(message)
