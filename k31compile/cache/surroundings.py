"""What the code of a graph depends on beside the graph: versions, machine, our own sources, and how torch is set."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import platform
import sys
from pathlib import Path
from typing import Any

import torch

from k31compile import cpu_isa
from k31compile.cpu_isa import instruction_set
from k31compile.errors import KeyingError
from k31compile.kernels.cpu.loader import available

_ROOT = Path(__file__).parents[1]
_ENDINGS = {".py", ".cpp", ".h", ".json"}

_BESIDE = {"cli", "check", "contract", "timeline", "onnx_export", "model", "weights", "bundle"}
_BESIDE |= {"explain.py", "report_view.py", "bucket_sizes.py", "buckets.py", "counted.py", "padding.py"}
"""Parts of ours that look at a graph and never decide what becomes of it."""


def describe_surroundings(target: str) -> dict[str, str]:
    """Every ingredient of a key that is not the graph, its inputs or the options, by name.

    Raises:
        KeyingError: torch is set in a way that cannot be written down.
    """
    return {
        **describe_installation(),
        "kernels": cpu_isa.chosen() if available()[0] else "none",
        "threads": str(torch.get_num_threads()),
        "mode": describe_mode(),
        "inductor": inductor_digest(),
        "npu": _npu_version(target),
    }


def describe_installation() -> dict[str, str]:
    """The ingredients that are the same for every graph on this machine with what is installed here."""
    return {
        "sources": source_digest(),
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "python": _python_version(),
        "machine": f"{platform.system()} {machine_digest()}",
    }


def describe_mode() -> str:
    """How torch is set for this thread and process, as far as the numbers or the code of a graph follow it."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise KeyingError("the call is inside of a functorch transform")
    autocast = f"{torch.get_autocast_dtype('cpu')}" if torch.is_autocast_enabled("cpu") else "no"
    grad = "grad" if torch.is_grad_enabled() else "no_grad"  # Dynamo leaves inference_mode; inputs tell of it
    deterministic = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    mkldnn = torch.backends.mkldnn
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    return " ".join(
        [
            f"{grad} autocast={autocast} deterministic={deterministic} default={torch.get_default_dtype()}",
            f"matmul={torch.get_float32_matmul_precision()} mkldnn={mkldnn.enabled} {mkldnn.deterministic}",
            f"fill={fill}",
        ]
    )


@functools.cache
def source_digest() -> str:
    """A digest of our own files that take part in a compile, names and contents."""
    held = hashlib.sha256()
    for path in sorted(_ROOT.rglob("*")):
        name = path.relative_to(_ROOT)
        if path.suffix in _ENDINGS and name.parts[0] not in _BESIDE:
            held.update(f"{name.as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return held.hexdigest()


def have_sources_changed() -> bool:
    """Whether our files are others now than when this module was imported, as after an update beside this process.

    What is compiled from then on is partly by one version and partly by another, and neither one's key would be true.
    """
    return source_digest.__wrapped__() != _AT_START


_AT_START = source_digest()


@functools.cache
def machine_digest() -> str:
    """A digest of the instruction set: libraries are built for the machine that builds them."""
    return f"{platform.machine()} {hashlib.sha256(instruction_set().encode()).hexdigest()[:16]}"


_OTHER_MACHINES = ("triton.", "cuda.", "cutlass.", "rocm.", "xpu.", "halide.", "tpu.", "mtia.", "nvgemm")
_PASSES = (
    "pre_grad_custom_pass",
    "joint_custom_pre_pass",
    "joint_custom_post_pass",
    "post_grad_custom_pre_pass",
    "post_grad_custom_post_pass",
    "_pre_fusion_custom_pass",
    "_post_fusion_custom_pass",
)
_SAYS_ONLY = ("worker_", "trace.", "profile_", "log_", "cpp.cxx", "debug", "verbose_progress", "disable_progress")
_WRITTEN = ("aot_inductor.metadata",)  # by AOTInductor itself, once it has built something


def inductor_digest() -> str:
    """A digest of Inductor's configuration for a CPU, wherever a value of it came from.

    What other devices are told, what only logs, and which compiler builds are no part of it.

    Raises:
        KeyingError: it holds a pass or another function of the user's.
    """
    from torch._inductor import config

    settings: Any = config
    values = {
        name: value
        for name, value in settings.save_config_portable().items()
        if not name.startswith(_OTHER_MACHINES + _SAYS_ONLY + _WRITTEN)
    }
    for name in _PASSES:  # Inductor leaves them out of its own text
        if getattr(settings, name, None) is not None:
            values[name] = _pass_identity(name, getattr(settings, name))
    try:
        text = json.dumps(values, sort_keys=True, default=_plain)
    except TypeError as error:
        raise KeyingError(f"Inductor is configured with {error}") from error
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _pass_identity(name: str, given: Any) -> str:
    """What a pass of the user's says of itself, as torch's own caches ask it.

    Raises:
        KeyingError: it says nothing.
    """
    uuid = given.uuid() if callable(getattr(given, "uuid", None)) else None
    if uuid is None:
        raise KeyingError(f"Inductor is configured with {name}, a {type(given).__name__} without a uuid")
    return f"{type(given).__qualname__} {uuid!r}"


def _python_version() -> str:
    return f"{platform.python_implementation()} {sys.version_info[0]}.{sys.version_info[1]}"


def _plain(value: Any) -> Any:
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if isinstance(value, torch.dtype | torch.device):
        return str(value)
    raise TypeError(f"a {type(value).__name__}, which has no plain form")


def _npu_version(target: str) -> str:
    """The version of torch_npu where it takes part: it is loaded, or the target is its own."""
    if "torch_npu" not in sys.modules and not target.startswith("ascend"):
        return "none"
    try:
        return importlib.metadata.version("torch_npu")
    except importlib.metadata.PackageNotFoundError:
        return "none"
