"""Which instructions the C++ kernels may use: this machine's own, or fewer where ``K31_CPU_ISA`` says so."""

from __future__ import annotations

import functools
import os
import platform
from pathlib import Path

from k31compile.errors import OptionError

VARIABLE = "K31_CPU_ISA"
NATIVE, AVX2, PORTABLE = "native", "avx2", "portable"
FLAGS: dict[str, tuple[str, ...]] = {
    # tuned for some processors GCC fuses some sums and not others, and equal numbers would not give equal results
    NATIVE: ("-march=native", "-mtune=generic"),
    AVX2: ("-march=x86-64-v3",),
    PORTABLE: ("-DK31_LANES=4",),
}
"""What a compiler is told for each."""
# All that the compiler may use for x86-64-v3, by the system's names: a virtual machine can hide any of them.
_OF_V3 = frozenset(("avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"))


@functools.cache
def chosen() -> str:
    """The one that serves in this process; the variable is read once.

    Raises:
        OptionError: the variable names none, or one that this machine does not have.
    """
    name = os.environ.get(VARIABLE) or NATIVE
    if name not in FLAGS:
        raise OptionError(f"{VARIABLE} does not take {name!r}", hint=f"it takes {', '.join(FLAGS)}")
    if lacking := lacks(name):
        raise OptionError(
            f"{VARIABLE}={name}, but this processor does not have {', '.join(lacking)}",
            hint=f"set it to {PORTABLE}, or unset it to use what the processor has",
        )
    return name


def lacks(name: str) -> list[str]:
    """The instructions that code for one of them may use and this machine does not have, by the system's names."""
    return sorted(_OF_V3.difference(instruction_set().split())) if name == AVX2 else []


@functools.cache
def instruction_set() -> str:
    """The line that names this machine's instructions, as the system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    except OSError:
        pass
    return f"{platform.machine()} {platform.processor()}"
