"""Arguments of an operator as one object: their names and defaults stand once, their checks beside them.

Fake, reference and kernel of an operator each take such an object; `taking` gives them the operator's own signature.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

Result = TypeVar("Result")


class Arguments(Protocol):
    """What an operator was called with."""

    def check_words(self) -> None:
        """Check what is known without looking at a size: words and ranks. Raises OperatorError."""

    def check(self) -> None:
        """Check the tensors against each other. Raises OperatorError."""


Call = TypeVar("Call", bound=Arguments)


def taking(
    arguments: Callable[..., Call], *, sizes: bool = True
) -> Callable[[Callable[[Call], Result]], Callable[..., Result]]:
    """Turn a function of checked arguments into one with the operator's signature.

    With `sizes=False` no size is looked at, as a fake needs it: comparing symbolic sizes would fix them.
    """

    def decorate(body: Callable[[Call], Result]) -> Callable[..., Result]:
        @functools.wraps(body)
        def run(*args: Any, **kwargs: Any) -> Result:
            call = arguments(*args, **kwargs)
            call.check_words()
            if sizes:
                call.check()
            return body(call)

        run.__signature__ = inspect.signature(arguments)  # type: ignore[attr-defined]
        return run

    return decorate
