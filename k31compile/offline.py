"""An entry compiled for an Ascend product on a machine that has none: the GE graph, its streams, and what was decided.

Structure is what this shows: operators, converters, streams, formats, writes in place. Nothing runs, and no time in
the result is measured.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from k31compile.backend import captured_graph
from k31compile.passes.layout.nz_weights import NzDecision
from k31compile.passes.schedule.cost_model import load_costs
from k31compile.passes.schedule.schedule import Schedule
from k31compile.passes.schedule.tasks import TaskGraph
from k31compile.store import atomic_write
from k31compile.targets.ascend.ge_options import ge_options
from k31compile.targets.ascend.lower import Lowered
from k31compile.targets.ascend.offline.convert import GeGraph, convert
from k31compile.targets.ascend.offline.formats import mark_formats
from k31compile.targets.ascend.offline.session import open_session
from k31compile.targets.ascend.prepare import prepare
from k31compile.targets.ascend.profiles import Profile, profile_of
from k31compile.targets.ascend.streams import write_streams
from k31compile.targets.ascend.super_kernels import Merging
from k31compile.timeline.page import Planned, page, trace_text
from k31compile.weights.by_graph import names_of

if TYPE_CHECKING:
    from k31compile.entry import Entry

VERIFIED = "structure, with torchair's own converters over stand-ins for CANN; nothing was run on an NPU"


@dataclass(frozen=True)
class OfflineGraph:
    """One entry, lowered and converted; `inputs` are the caller's own tensors in the order of the graph."""

    name: str
    inputs: tuple[Any, ...]
    profile: Profile
    lowered: Lowered
    ge: GeGraph
    tasks: TaskGraph
    merging: Merging
    nz: tuple[NzDecision, ...]
    versions: dict[str, str]

    @property
    def schedule(self) -> Schedule:
        """What runs on which stream, and which tasks are launched as one."""
        return self.merging.schedule

    def to_dict(self) -> dict[str, Any]:
        """The decisions, the counts and the predictions, as JSON has them."""
        streams: dict[str, int] = {}
        for node in self.ge.operators():
            streams[node.stream or "main"] = streams.get(node.stream or "main", 0) + 1
        return {
            "entry": self.name,
            "target": self.profile.name,
            "verified": VERIFIED,
            "versions": self.versions,
            "operators": self.ge.counts(),
            "streams": streams,
            "lowered": [asdict(decision) for decision in self.lowered.decisions],
            "nz_weights": [asdict(decision) for decision in self.nz],
            "schedule": {
                "serial": self.schedule.serial,
                "critical_path": self.schedule.critical_path,
                "predicted": self.schedule.predicted,
                "events": len(self.schedule.events),
                "super_kernels": {
                    **self.merging.to_dict(),
                    "operators": sum(bool(node.super_kernel) for node in self.ge.operators()),
                },
            },
        }

    def write(self, folder: Path) -> list[Path]:
        """Write the graphs, the schedule with its drawing and trace, and report.json, and return their paths."""
        folder.mkdir(parents=True, exist_ok=True)
        planned = Planned(self.name, self.tasks, self.schedule, load_costs(self.profile.name))
        texts = {
            "graph.pbtxt": self.ge.text(),
            "options.json": json.dumps(ge_options(), indent=1) + "\n",
            "fx.txt": f"{self.lowered.module.graph}\n",
            "schedule.json": json.dumps(self.schedule.to_dict(), indent=1) + "\n",
            "timeline.html": page(planned),
            "trace.json": trace_text([planned]),
            "report.json": json.dumps(self.to_dict(), indent=1) + "\n",
        }
        for name, text in texts.items():
            atomic_write(folder / name, text.encode(), mode=0o644)
        return [folder / name for name in texts]


def compile_offline(entry: Entry, target: str, streams: int = 4, super_kernel: bool = True) -> OfflineGraph:
    """Compile one entry for an Ascend target, and stop before anything would be loaded onto a device.

    At most `streams` streams are used; launches are merged where `super_kernel` says so and the product can.

    Raises:
        OptionError: target is no Ascend target.
        BuildError: torch_npu is not installed, or its stand-ins cannot be built.
        TraceError: the call is not one graph.
        TargetError: an operator has no lowering.
    """
    profile = profile_of(target)
    session = open_session(profile)
    with entry.grad_mode():
        module, arguments = captured_graph(entry.model, entry.args, entry.kwargs, target)
    prepared = prepare(module, profile, arguments, streams, super_kernel)
    lowered, merging, nz = prepared.lowered, prepared.merging, _named(prepared.nz, entry.model, arguments)
    write_streams(lowered.module, merging.schedule)
    ge = convert(lowered.module, lowered.inputs)
    mark_formats(ge.definition, lowered.inputs, {decision.position for decision in nz if decision.is_nz})
    return OfflineGraph(entry.name, arguments, profile, lowered, ge, prepared.tasks, merging, nz, session.versions)


def _named(decisions: Sequence[NzDecision], model: Any, tensors: Sequence[Any]) -> tuple[NzDecision, ...]:
    """The decisions by the names that the model's state dict has, where its parameters are known."""
    names = names_of(model) if isinstance(model, nn.Module) else {}
    return tuple(replace(one, name=names.get(id(tensors[one.position]), [one.name])[0]) for one in decisions)
