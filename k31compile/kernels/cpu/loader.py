"""The built kernels as callables: load once, remember a failure, and turn a status into an error."""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path
from typing import Any

from k31compile import cpu_isa
from k31compile.errors import BuildError, OperatorError
from k31compile.kernels.cpu import build, calls
from k31compile.kernels.cpu.direct_calls import take_over_calls

SWITCH = "K31_CPU_KERNELS"
_LOCK = threading.Lock()
_LOADED: dict[str, ctypes.CDLL | BuildError] = {}
_SERVES: dict[str, tuple[bool, str]] = {}


def library(variant: str = "fast") -> ctypes.CDLL:
    """The loaded kernels of a variant, built first when they are not there.

    Raises BuildError, the same one each time; K31_CPU_KERNELS=0 is read once and counts as one.
    """
    found = _LOADED.get(variant)
    if found is None:
        with _LOCK:
            found = _LOADED.get(variant) or _load(variant)
            _LOADED[variant] = found
    if isinstance(found, BuildError):
        raise found
    return found


def adopt(path: Path, variant: str = "fast", why: str | None = None) -> None:
    """Serve with a library that was built elsewhere, unless one is loaded or kernels are switched off.

    The file becomes code of this process: whoever calls this has checked it. BuildError where it does not load.
    """
    with _LOCK:
        if variant in _LOADED or os.environ.get(SWITCH) == "0":
            return
        found = _open(path, variant, why)
        if isinstance(found, BuildError):
            raise found
        _LOADED[variant] = found


def available(variant: str = "fast") -> tuple[bool, str]:
    """Whether the C++ kernels serve here, and why."""
    try:
        library(variant)
    except BuildError as error:
        return False, str(error)
    return _SERVES[variant]


def call(variant: str, function: str, arguments: ctypes.Structure, limit: int) -> None:
    """Run a kernel; raises OperatorError for what it refused before it read anything there."""
    status = getattr(library(variant), function)(ctypes.byref(arguments))
    if status == calls.BAD_BLOCK:
        where = f"request {arguments.failed}"
        raise OperatorError("block_table names a block that does not exist", where=where)
    if status == calls.BAD_INDEX:
        raise OperatorError(f"sparse_indices holds {arguments.failed}, but the cache has {limit} positions")
    if status == calls.NO_MEMORY:
        raise MemoryError("no memory for the kernel's scratch")


def _load(variant: str) -> ctypes.CDLL | BuildError:
    if os.environ.get(SWITCH) == "0":
        return BuildError(f"switched off by {SWITCH}=0", hint="unset it to use the C++ kernels")
    try:
        return _open(build.built_library(variant), variant)
    except BuildError as error:
        return error


def _open(path: Path, variant: str, why: str | None = None) -> ctypes.CDLL | BuildError:
    try:
        loaded = ctypes.CDLL(str(path))
        for name, structure in calls.FUNCTIONS.items():
            function = getattr(loaded, name)
            function.argtypes, function.restype = [ctypes.c_void_p], ctypes.c_int64
            size: Any = getattr(loaded, f"{name}_size")
            size.restype = ctypes.c_int64
            if size() != ctypes.sizeof(structure):
                return BuildError(f"{name} and its Python side disagree on their arguments")
    except (OSError, AttributeError) as error:
        return BuildError(f"the built kernels do not load: {error}")
    detour = take_over_calls(path) if variant == build.SERVING else None
    why = why or _built_for(variant)
    _SERVES[variant] = True, why if detour is None else f"{why}, called through Python: {detour}"
    return loaded


def _built_for(variant: str) -> str:
    isa = cpu_isa.chosen() if variant == build.SERVING else cpu_isa.NATIVE
    built_for = "for this machine" if isa == cpu_isa.NATIVE else f"with {cpu_isa.VARIABLE}={isa}"
    return f"C++ kernels built {built_for}"
