"""Compiling the units of the kernels side by side, and linking them to one library."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from k31compile.errors import BuildError

UNIT_FLAGS = ("-std=c++17", "-O3", "-fopenmp", "-fPIC", "-fvisibility=hidden", "-Wno-psabi")
# The units by which torch calls the kernels: only the first need torch's headers, and none is of use without them.
_TORCH, _CALLING = "torch_", "serve_"
_TORCH_FLAGS = ("-std=c++20", "-O2")
_MOST_AT_ONCE = 4  # compilers, of up to half a gigabyte each
_TIMEOUT_SECONDS = 300


def compile_library(line: Sequence[str], units: Sequence[Path], made: Path, *, calls_torch: bool) -> None:
    """Compile and link units by a command line with flags; objects are left beside the library.

    With `calls_torch` torch is given the operators' calls by the library itself, where torch's headers are there and
    the compiler takes them; what it says against them is a warning, and the operators are then called through Python.

    Raises:
        BuildError: the compiler does not run or refuses the kernels.
    """
    kernels = [unit for unit in units if not unit.name.startswith((_TORCH, _CALLING))]
    folder = Path(torch.__file__).parent
    calling = [unit for unit in units if unit not in kernels] if calls_torch and _has_headers(folder) else []
    objects = {unit: made.with_name(f"{unit.stem}.o") for unit in (*calling, *kernels)}
    lines = [[*line, *_flags(unit, folder), "-c", str(unit), "-o", str(to)] for unit, to in objects.items()]
    with ThreadPoolExecutor(min(_MOST_AT_ONCE, os.cpu_count() or 1)) as pool:
        complaints = list(pool.map(_run, lines))
    link = [*line, "-shared", "-o", str(made), *(str(objects[unit]) for unit in kernels)]
    if refused := next(filter(None, complaints[len(calling) :]), None):
        raise BuildError(f"the C++ compiler refused the kernels: {refused}")
    if calling:
        refused = next(filter(None, complaints[: len(calling)]), None)
        refused = refused or _run([*link, *(str(objects[unit]) for unit in calling), *_libraries(folder)])
        if refused is None:
            return
        warnings.warn(f"k31compile: operators are called through Python, the compiler says: {refused}", stacklevel=2)
    if refused := _run(link):
        raise BuildError(f"the C++ compiler does not link the kernels: {refused}")


def _has_headers(torch_folder: Path) -> bool:
    return (torch_folder / "include" / "ATen" / "core" / "dispatch" / "Dispatcher.h").exists()


def _libraries(torch_folder: Path) -> Sequence[str]:
    # What torch does not have is to be refused here, where there is another way, and not by a loader later.
    complete = ("-Wl,-z,defs,-z,now",) if sys.platform == "linux" else ()
    return (f"-L{torch_folder / 'lib'}", "-ltorch_cpu", "-lc10", *complete)


def _flags(unit: Path, torch_folder: Path) -> Sequence[str]:
    strings = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    return (*_TORCH_FLAGS, strings, f"-I{torch_folder / 'include'}") if unit.name.startswith(_TORCH) else ()


def _run(line: Sequence[str]) -> str | None:
    """What a compiler says against its input in one line; None when it took it. Raises BuildError if it did not run."""
    try:
        run = subprocess.run(line, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"the C++ compiler did not run: {error}") from error
    if not run.returncode:
        return None
    lines = [said for said in run.stderr.splitlines() if "error" in said or "undefined" in said]
    return (lines or run.stderr.splitlines() or ["no message"])[0].strip()
