"""The name that leads to a function of a library: what a text may say of it instead of what it does.

A qualified name alone does not do. A factory gives all that it makes one name: every pooling function of torch is
`boolean_dispatch.<locals>.fn`. And `functools.wraps` gives a user's function the name and module of what it wraps.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Collection
from typing import Any

LIBRARY_KINDS = (types.FunctionType, types.BuiltinFunctionType, type)
"""No instance of a library's class: a module or a partial function holds what may change."""


def name_in_library(value: Any, libraries: Collection[str]) -> str:
    """`module.name` of a function or class of one of these libraries; "" for what is not their own.

    A Python function must have been made in the library, and its name must lead to it; the name in C is its own.
    """
    kind: Any = LIBRARY_KINDS  # narrowed by it, a value has no name
    if not isinstance(value, kind):
        return ""
    home = _home(value)
    if home.partition(".")[0] not in libraries:
        return ""
    if not isinstance(value, types.FunctionType):
        return f"{home}.{value.__qualname__}"
    if str(value.__globals__.get("__name__", "")).partition(".")[0] not in libraries:
        return ""
    for name in (value.__qualname__, value.__name__):
        if _led_to(home, name) is value:
            return f"{home}.{name}"
    return ""


def _home(value: Any) -> str:
    """The module of a function or class; many of torch's builtins name only the class that they are bound to."""
    bound_to = getattr(value, "__self__", None)
    return str(value.__module__ or getattr(bound_to, "__module__", None) or getattr(bound_to, "__name__", ""))


def _led_to(module: str, name: str) -> Any:
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found
