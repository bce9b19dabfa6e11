"""Whose operators an Ascend graph may call, whether they are here, and where their signatures were read.

A package is looked for and never imported until one of its functions would be taken; an import that fails is a reason
to pass the provider over, never an error. Of each package only functions are named whose signature was seen; a function
that takes other arguments than these is passed over too.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from packaging.version import InvalidVersion, Version

from k31compile.targets.ascend.profiles import Profile

FORMULA, TORCH_NPU, OURS = "formula", "torch_npu", "ours"
FLA_NPU, VLLM_ASCEND, SGL_KERNEL_NPU = "fla_npu", "vllm_ascend", "sgl_kernel_npu"
CANN_OPS_TRANSFORMER, TRITON = "cann_ops_transformer", "triton"


@dataclass(frozen=True)
class Provider:
    """A source of operators.

    Attributes:
        name: what reports call it.
        module: what is imported for it; empty where nothing is.
        distribution: what it is installed as.
        minimum: the oldest version whose signatures were seen; empty where any will do.
        in_ge: whether its operators have GE converters. Without one only npugraph_ex runs them.
        source: where its signatures were read.

    """

    name: str
    module: str
    distribution: str
    minimum: str
    in_ge: bool
    source: str


PROVIDERS = {
    provider.name: provider
    for provider in (
        Provider(TORCH_NPU, "torch_npu", "torch-npu", "", True, "the installed torch_npu 2.13: schemas and converters"),
        Provider(
            CANN_OPS_TRANSFORMER, "cann_ops_transformer", "cann_ops_transformer", "1.0", False,
            "cann ops-transformer, torch_extension (2026): lightning_indexer, quant_lightning_indexer",
        ),
        Provider(
            OURS, "k31_ascend_ops", "k31-ascend-ops", "", True,
            "own_operators.py of this tree; the kernels are not written, a package that has them is declared",
        ),
        Provider(
            FLA_NPU, "fla_npu", "fla-npu", "26.6", False,
            "flashserve/flash-linear-attention-npu: API pages of recurrent_kda and chunk_kda_fwd (2026)",
        ),
        Provider(
            VLLM_ASCEND, "vllm_ascend", "vllm-ascend", "", False,
            "vllm-project/vllm-ascend: ops/kda.py, ops/triton/kimi_k3/attention_residual.py (2026)",
        ),
        Provider(
            SGL_KERNEL_NPU, "sgl_kernel_npu", "sgl-kernel-npu", "", False,
            "sgl-project/sgl-kernel-npu: fla/kda_decode_pto.py, fla/kda_prefill.py (2026)",
        ),
        Provider(TRITON, "triton", "triton-ascend", "", False, "no kernel of this tree is written in Triton yet"),
        Provider(FORMULA, "", "", "", True, "plain operators, each with a GE converter"),
    )
}  # fmt: skip
"""By name, in the order in which equals are preferred."""


def why_not(name: str, profile: Profile) -> str:
    """Why a provider's operators cannot be taken here, in words; empty where they can."""
    provider = PROVIDERS[name]
    if name in (FORMULA, TORCH_NPU):
        return ""  # the target itself: a device has torch_npu, and offline it is asked for before anything is lowered
    if name == OURS:
        return ""  # asked for operator by operator, for a profile declares them
    missing = _why_missing(provider.module, provider.distribution, provider.minimum)
    if missing:
        return missing
    if profile.path == "ge" and not provider.in_ge:
        return "has no GE converter; a graph for npugraph_ex can call it"
    return ""


def why_not_own(operator: str, profile: Profile) -> str:
    """Why an operator of ours cannot be taken: nobody said that the device has a kernel of it."""
    provider = PROVIDERS[OURS]
    if operator in profile.own_operators or not _why_missing(provider.module, provider.distribution, ""):
        return ""
    return f"no package with a kernel of it is declared (Profile.own_operators) or installed ({provider.module})"


def _why_missing(module: str, distribution: str, minimum: str) -> str:
    try:
        found = module in sys.modules or importlib.util.find_spec(module) is not None
    except (ImportError, ValueError) as error:
        return f"cannot be looked for: {error}"
    if not found:
        return "is not installed"
    version = installed_version(distribution)
    if not minimum or version is None:
        return ""
    try:
        too_old = Version(version) < Version(minimum)
    except InvalidVersion:
        return f"has a version that cannot be read, {version!r}"
    return f"version {version} is older than {minimum}, whose signatures are known" if too_old else ""


def installed_version(distribution: str) -> str | None:
    """The version that is installed, or None where nothing says one."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True)
class Function:
    """A function of a provider: its module and name, and the arguments that it was seen to take."""

    module: str
    name: str
    arguments: tuple[str, ...]

    def why_not(self) -> str:
        """Why it cannot be called: an import that fails, or other arguments than were seen; else empty."""
        try:
            function = self.load()
        except Exception as error:
            # Whatever a foreign package does while it is imported costs its provider the call and nobody else's.
            return f"import of {self.module} fails: {type(error).__name__}: {error}".splitlines()[0]
        unknown = sorted(set(self.arguments) - set(_arguments_of(function)))
        return f"{self.name} takes other arguments than were seen; it has no {', '.join(unknown)}" if unknown else ""

    def load(self) -> Callable[..., Any]:
        """The function itself; whatever its import raises."""
        loaded: Callable[..., Any] = getattr(importlib.import_module(self.module), self.name)
        return loaded


def _arguments_of(function: Callable[..., Any]) -> Sequence[str]:
    return list(inspect.signature(function).parameters)


def lacks_in_torch_npu(operator: str) -> str:
    """Why torch_npu's operator of this name cannot be called: a loaded torch_npu that does not have it; else empty."""
    if "torch_npu" not in sys.modules or hasattr(torch.ops.npu, operator):
        return ""
    return f"the installed torch_npu {installed_version('torch-npu')} has no {operator}"
