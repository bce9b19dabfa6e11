"""What a confirmation rests on besides the code that was confirmed: our sources, versions, machine, situation."""

import functools
import hashlib
import platform
import sys
from collections.abc import Iterable
from pathlib import Path

import torch

_PACKAGE = Path(__file__).parents[1]
_SUFFIXES = (".py", ".cpp", ".h")


@functools.cache
def digest_of_sources(*folders: str) -> str:
    """A hash of our own sources in some folders of the package, by content and by name."""
    contents = hashlib.sha256()
    for folder in folders:
        for path in sorted((_PACKAGE / folder).rglob("*")):
            if path.suffix in _SUFFIXES:
                name = path.relative_to(_PACKAGE).as_posix()
                data = path.read_bytes()
                contents.update(f"{name} {len(data)}\n".encode() + data)
    return contents.hexdigest()


def surroundings(folders: Iterable[str]) -> str:
    """Versions, instruction set and our own sources in these folders.

    The number of threads is not in it: samples are compared within tolerances far above what the order of a sum does.
    """
    torch_version = f"torch {torch.__version__} {torch.version.git_version}"
    python = f"python {sys.version_info[0]}.{sys.version_info[1]}"
    machine = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {_instructions()}"
    return f"{torch_version} {python} {machine} {digest_of_sources(*folders)}"


@functools.cache
def _instructions() -> str:
    """What the CPU has: it decides how narrow types are rounded."""
    return " ".join(sorted(name for name, has in torch.cpu.get_capabilities().items() if has is True))


def situation() -> str:
    """What is switched on in this process and changes what operators of torch give, in the author's own types."""
    autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    return (
        f"autocast {autocast} matmul {torch.get_float32_matmul_precision()} "
        f"deterministic {torch.are_deterministic_algorithms_enabled()} default {torch.get_default_dtype()} "
        f"mkldnn {torch.backends.mkldnn.enabled} {torch.backends.mkldnn.deterministic}"
    )
