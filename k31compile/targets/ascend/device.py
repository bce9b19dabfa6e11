"""A graph compiled for the NPU that is here, through torchair's public compiler. Without one it says so and stops.

Nothing of this was run on an NPU: tests give stand-ins for torchair's compiler and torch_npu's format cast.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from k31compile.errors import MissingDependencyError, TargetError
from k31compile.options import Options
from k31compile.report import Report
from k31compile.targets.ascend.cast_weights import cast_weights
from k31compile.targets.ascend.ge_options import ge_config
from k31compile.targets.ascend.prepare import Prepared, prepare
from k31compile.targets.ascend.profiles import Profile, profile_of
from k31compile.targets.ascend.returned_views import find_returned_views, give_views

_OFFLINE = "k31 compile TARGET --target {} --offline -o DIR makes the graph without a device"


def compile_for_ascend(
    module: fx.GraphModule, example_inputs: Sequence[Any], options: Options, report: Report
) -> Callable[..., Any]:
    """A callable of the graph's inputs that runs on the NPU: lowered, scheduled, weights cast once, then torchair's.

    Raises:
        MissingDependencyError: torch_npu or torchair is not installed.
        TargetError: there is no NPU, it is another product, or an input is elsewhere.
    """
    profile = profile_of(str(options.target))
    torchair = _torchair(profile)
    _check_device(profile, example_inputs)
    streams = 4 if options.streams == "auto" else int(options.streams)
    prepared = prepare(module, profile, example_inputs, streams, options.super_kernel)
    if options.layout != "nd":
        _cast(prepared, example_inputs)
    # Their operators are there only once torchair is.
    from k31compile.targets.ascend.streams import write_streams

    write_streams(prepared.lowered.module, prepared.schedule)
    _tell(prepared, report)
    compiler = torchair.get_compiler(ge_config())
    compiled: Callable[..., Any] = compiler(prepared.lowered.module, list(example_inputs))
    return give_views(compiled, find_returned_views(module))


def _torchair(profile: Profile) -> Any:
    try:
        importlib.import_module("torch_npu")
        torchair = importlib.import_module("torchair")
        for part in ("torchair.scope._wait_tensor", "torchair.ops"):
            importlib.import_module(part)
    except (ImportError, OSError) as error:
        raise MissingDependencyError(
            f"target {profile.name} needs torch_npu with its torchair: {error}", hint=_OFFLINE.format(profile.name)
        ) from error
    return torchair


def _check_device(profile: Profile, example_inputs: Sequence[Any]) -> None:
    npu: Any = getattr(torch, "npu", None)
    if npu is None or not npu.is_available():
        raise TargetError(f"target {profile.name} needs an NPU, and there is none", hint=_OFFLINE.format(profile.name))
    name = npu.get_device_name(0)
    if not name.startswith(profile.soc_family):
        raise TargetError(
            f"target {profile.name} is for {profile.soc_family}*, and the device is {name}",
            hint="give the target of the device",
        )
    for value in example_inputs:
        if isinstance(value, torch.Tensor) and value.device.type != "npu":
            raise TargetError(
                f"an input of shape {list(value.shape)} is on {value.device}, and the target is {profile.name}",
                hint='move the model and its inputs: .to("npu")',
            )


def _cast(prepared: Prepared, tensors: Sequence[Any]) -> None:
    """The weights that are to be in blocks, cast where they lie; a second graph of the same weights casts nothing."""
    chosen = {decision.name: tensors[decision.position] for decision in prepared.nz if decision.is_nz}
    cast_weights(chosen)


def _tell(prepared: Prepared, report: Report) -> None:
    for decision in prepared.lowered.decisions:
        why = "; ".join(decision.passed_over) or "the first that takes the call"
        report.providers[decision.operator] = {"provider": decision.provider, "why": why}
    report.schedule = prepared.schedule.counts()
    report.weights = [
        {
            "name": decision.name, "layout": "nz" if decision.is_nz else "nd", "dtype": decision.dtype,
            "shape": list(decision.shape), "reason": decision.reason, "remedy": decision.remedy, "bytes": 0,
        }
        for decision in prepared.nz
    ]  # fmt: skip
