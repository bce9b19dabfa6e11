"""What decides beside the arguments what a graph computes: the process's flags, and the machine and its torch."""

from __future__ import annotations

import contextlib
import hashlib
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from k31compile.cache.artefact.tensors import Mismatch
from k31compile.errors import ArtefactError
from k31compile.kernels.cpu import build, calls

Flags = dict[str, Any]


def current_flags() -> Flags:
    """The flags of this process and thread that a graph is compiled under."""
    autocast = torch.is_autocast_enabled("cpu")
    return {
        "inference_mode": torch.is_inference_mode_enabled(),
        "autocast": str(torch.get_autocast_dtype("cpu")).removeprefix("torch.") if autocast else "off",
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "mkldnn": torch.backends.mkldnn.enabled,
        "threads": torch.get_num_threads(),
    }


_REMEDIES = {
    "inference_mode": "torch.inference_mode() around the call",
    "autocast": "torch.autocast('cpu', ...) around the call",
    "deterministic": "torch.use_deterministic_algorithms(...)",
    "default_dtype": "torch.set_default_dtype(...)",
    "matmul_precision": "torch.set_float32_matmul_precision(...)",
    "mkldnn": "torch.backends.mkldnn.flags(...)",
    "threads": "torch.set_num_threads(...)",
}


def check_flags(promised: Mapping[str, Any]) -> None:
    """Raise Mismatch unless the flags of this process are those of the compile."""
    now = current_flags()
    if now == promised:
        return
    name = next(name for name in now if now[name] != promised.get(name))
    raise Mismatch(f"the flag {name}", f"is {now[name]}", f"{promised.get(name)}, set by {_REMEDIES[name]}")


def is_in_transform() -> bool:
    """Whether a transform of torch.func is under way: tensors are not what they look like."""
    return torch._C._functorch.peek_interpreter_stack() is not None


@contextlib.contextmanager
def under(flags: Mapping[str, Any]) -> Iterator[None]:
    """Run a block with the flags of a compile, and leave those of the process as they were."""
    before = current_flags()
    _set(flags)
    autocast = flags["autocast"]
    dtype = getattr(torch, autocast) if autocast != "off" else torch.bfloat16
    try:
        with torch.inference_mode(flags["inference_mode"]), torch.autocast("cpu", dtype, enabled=autocast != "off"):
            yield
    finally:
        _set(before)


def _set(flags: Mapping[str, Any]) -> None:
    torch.use_deterministic_algorithms(flags["deterministic"])
    torch.set_default_dtype(getattr(torch, flags["default_dtype"]))
    torch.set_float32_matmul_precision(flags["matmul_precision"])
    torch.backends.mkldnn.set_flags(flags["mkldnn"])
    torch.set_num_threads(flags["threads"])


def machine() -> dict[str, Any]:
    """What a built library needs of a machine, and which torch it was built for."""
    return {
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "instructions": sorted(_instructions()),
        "vectors": torch.backends.cpu.get_cpu_capability(),
    }


def check_machine(made_on: Mapping[str, Any]) -> None:
    """Raise ArtefactError unless libraries that were made on a machine run on this one."""
    here = machine()
    for name in ("torch", "system", "vectors"):
        if here[name] != made_on[name]:
            raise ArtefactError(f"it was made for {name} {made_on[name]}, here it is {here[name]}")
    lacking = sorted(set(made_on["instructions"]) - set(here["instructions"]))
    if lacking:
        shown = ", ".join(lacking[:5]) + (", ..." if len(lacking) > 5 else "")
        raise ArtefactError(f"it was made for a processor with {shown}, which this one has not")


# What the kernel tells of its own doings or of mitigations is no instruction that a compiler would use.
_NO_INSTRUCTIONS = ("arch_", "cpuid", "constant_", "nonstop_", "tsc_", "hypervisor", "rep_good", "md_clear")


def _instructions() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    line = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return {word for word in line.partition(":")[2].split() if not word.startswith(_NO_INSTRUCTIONS)}


def kernels_digest() -> str:
    """Digest of the sources of the C++ kernels and of the Python side that calls them."""
    digest = hashlib.sha256()
    for path in [*build.sources(), Path(calls.__file__)]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def missing_operators(schemas: Mapping[str, str]) -> list[str]:
    """What is wrong with operators that a graph calls, a sentence each: not registered here, or with another schema."""
    problems = []
    for name, schema in schemas.items():
        found = schema_of(name)
        if found is None:
            problems.append(f"the operator {name} is not registered here")
        elif found != schema:
            problems.append(f"the operator {name} has the schema {found} here, it had {schema}")
    return problems


def schema_of(name: str) -> str | None:
    """The schema of an operator, namespace::name.overload; None where it is not registered."""
    qualified, _, overload = name.partition(".")
    try:
        return str(torch._C._get_schema(qualified, "" if overload == "default" else overload))
    except RuntimeError:
        return None
