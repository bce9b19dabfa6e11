"""Calls of the operators that never enter Python: the built library takes them over, and counts them."""

from __future__ import annotations

import ctypes
from pathlib import Path

_TAKEN: list[ctypes.PyDLL] = []


def take_over_calls(path: Path) -> str | None:
    """Let a loaded library serve the operators' calls on the CPU itself; None, or why Python goes on to do it.

    What it does not serve, errors included, comes to Python as before.
    """
    # PyDLL holds the interpreter's lock: torch's table of kernels must not change while another thread reads it.
    library = ctypes.PyDLL(str(path))
    try:
        take_over = library.k31_take_over_calls
    except AttributeError:
        return "built without torch's headers"
    take_over.restype = ctypes.c_int64
    known = ctypes.c_int64()
    taken = take_over(ctypes.byref(known))
    if taken != known.value:
        return f"torch took over {taken} of {known.value} operators"
    _TAKEN.append(library)
    return None


def count_calls(name: str) -> tuple[int, int] | None:
    """How many CPU calls of ``k31::<name>`` the library served and how many it passed on to Python; None where none
    can have been: no library has taken over, or it does not know the operator.
    """
    served, passed_on = ctypes.c_int64(), ctypes.c_int64()
    for library in _TAKEN:
        if library.k31_count_calls(name.encode(), ctypes.byref(served), ctypes.byref(passed_on)) == 0:
            return served.value, passed_on.value
    return None
