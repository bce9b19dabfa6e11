"""An entry compiled for an Ascend product on a machine that has none: its graph, its streams, and what was decided.

The graph is one of GE, or the code that npugraph_ex would capture.

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
from k31compile.passes.schedule.cost_model import CostModel, load_costs
from k31compile.passes.schedule.schedule import Schedule
from k31compile.passes.schedule.tasks import TaskGraph
from k31compile.store import atomic_write
from k31compile.targets.ascend.ge_options import ge_options
from k31compile.targets.ascend.lower import Lowered
from k31compile.targets.ascend.offline.capture import AclGraph, forget_events, generate
from k31compile.targets.ascend.offline.convert import GeGraph, convert
from k31compile.targets.ascend.offline.formats import mark_formats
from k31compile.targets.ascend.offline.session import open_session
from k31compile.targets.ascend.prepare import prepare
from k31compile.targets.ascend.profiles import Profile, profile_of
from k31compile.targets.ascend.streams import write_streams
from k31compile.targets.ascend.super_kernels import Merging
from k31compile.targets.ascend.tagged_streams import write_tagged_streams
from k31compile.targets.ascend.verify_lowered import verify_captured, verify_converted
from k31compile.timeline.page import Planned, page, trace_text
from k31compile.weights.by_graph import names_of

if TYPE_CHECKING:
    from k31compile.entry import Entry

VERIFIED = "structure, with torchair's own converters over stand-ins for CANN; nothing was run on an NPU"
VERIFIED_CODE = (
    "structure, with npugraph_ex's own compiler over stand-ins for CANN up to the code that it would capture; nothing "
    "was captured or run on an NPU, and that capture takes scopes that have a label alone is not known"
)


@dataclass(frozen=True)
class OfflineGraph:
    """One entry, lowered and converted; `inputs` are the caller's own tensors in the order of the graph.

    `made` is what the mode of the profile makes of a lowered graph.
    """

    name: str
    inputs: tuple[Any, ...]
    profile: Profile
    lowered: Lowered
    made: GeGraph | AclGraph
    tasks: TaskGraph
    merging: Merging
    nz: tuple[NzDecision, ...]
    versions: dict[str, str]

    @property
    def schedule(self) -> Schedule:
        """What runs on which stream, and which tasks are launched as one."""
        return self.merging.schedule

    @property
    def ge(self) -> GeGraph:
        """The GE graph; a graph of the other mode has none."""
        assert isinstance(self.made, GeGraph)
        return self.made

    @property
    def acl(self) -> AclGraph:
        """What npugraph_ex made; a graph of the other mode has none."""
        assert isinstance(self.made, AclGraph)
        return self.made

    def to_dict(self) -> dict[str, Any]:
        """The decisions, the counts and the predictions, as JSON has them."""
        streams: dict[str, int] = {}
        for node in self.made.operators():
            streams[node.stream or "main"] = streams.get(node.stream or "main", 0) + 1
        is_ge = isinstance(self.made, GeGraph)
        return {
            "entry": self.name,
            "target": self.profile.name,
            "may_round": self.profile.may_round,
            "mode": self.profile.path,
            "verified": VERIFIED if is_ge else VERIFIED_CODE,
            "versions": self.versions,
            "operators": self.made.counts(),
            "streams": streams,
            **({} if is_ge else self.acl.synchronisation()),
            "lowered": [asdict(decision) for decision in self.lowered.decisions],
            "nz_weights": [asdict(decision) for decision in self.nz],
            "schedule": {
                "serial": self.schedule.serial,
                "critical_path": self.schedule.critical_path,
                "predicted": self.schedule.predicted,
                "events": len(self.schedule.events),
                "super_kernels": {
                    **self.merging.to_dict(),
                    "operators": sum(bool(node.super_kernel) for node in self.ge.operators()) if is_ge else 0,
                },
            },
        }

    def write(self, folder: Path) -> list[Path]:
        """Write the graphs, the schedule with its drawing and trace, and report.json, and return their paths."""
        folder.mkdir(parents=True, exist_ok=True)
        planned = Planned(self.name, self.tasks, self.schedule, load_costs(self.profile.name))
        is_ge = isinstance(self.made, GeGraph)
        texts = {
            "graph.pbtxt" if is_ge else "graph.py": self.ge.text() if is_ge else self.acl.code,
            **({"options.json": json.dumps(ge_options(), indent=1) + "\n"} if is_ge else {}),
            "fx.txt": f"{(self.lowered if is_ge else self.acl).module.graph}\n",
            "schedule.json": json.dumps(self.schedule.to_dict(), indent=1) + "\n",
            "timeline.html": page(planned),
            "trace.json": trace_text([planned]),
            "report.json": json.dumps(self.to_dict(), indent=1) + "\n",
        }
        for name, text in texts.items():
            atomic_write(folder / name, text.encode(), mode=0o644)
        return [folder / name for name in texts]


def compile_offline(
    entry: Entry,
    target: str,
    streams: int = 4,
    super_kernel: bool = True,
    mode: str = "ge",
    may_round: bool = False,
) -> OfflineGraph:
    """Compile one entry for an Ascend target, and stop before anything would be loaded onto a device.

    At most `streams` streams are used; launches are merged where `super_kernel` says so and the product can. `mode` is
    "ge" for a GE graph, "npugraph_ex" for code that is captured, which may call operators that have no GE converter.
    With `may_round` operators get bfloat16 where the model computes in float32, which changes numbers: no other weights
    are taken by the 950's indexer.

    Raises:
        OptionError: target is no Ascend target, or mode no mode.
        BuildError: torch_npu is not installed, or its stand-ins cannot be built.
        TraceError: the call is not one graph.
        TargetError: an operator has no lowering.
        ScheduleError: what was lowered does not keep the schedule, which is a fault of this package.
    """
    profile = replace(profile_of(target, mode), may_round=may_round)
    session = open_session(profile)
    with entry.grad_mode():
        module, arguments = captured_graph(entry.model, entry.args, entry.kwargs, target)
    prepared = prepare(module, profile, arguments, streams, super_kernel)
    lowered, merging, nz = prepared.lowered, prepared.merging, _named(prepared.nz, entry.model, arguments)
    make = _make_ge if profile.path == "ge" else _make_code
    made = make(entry.name, lowered, merging.schedule, prepared.tasks, load_costs(target))
    if isinstance(made, GeGraph):
        names = [node.name for node in lowered.module.graph.find_nodes(op="placeholder")]
        in_blocks = {names[decision.position] for decision in nz if decision.is_nz}
        mark_formats(made.definition, dict(zip(names, lowered.inputs, strict=True)), in_blocks)
    return OfflineGraph(entry.name, arguments, profile, lowered, made, prepared.tasks, merging, nz, session.versions)


def _make_ge(_name: str, lowered: Lowered, schedule: Schedule, tasks: TaskGraph, _costs: CostModel) -> GeGraph:
    write_streams(lowered.module, schedule)
    verify_converted(lowered.module, schedule, tasks)
    return convert(lowered.module, lowered.inputs)


def _make_code(name: str, lowered: Lowered, schedule: Schedule, tasks: TaskGraph, costs: CostModel) -> AclGraph:
    forget_events()
    write_tagged_streams(lowered.module, schedule, name)
    made = generate(lowered.module, lowered.inputs, name)
    verify_captured(made, schedule, tasks, costs)
    return made


def _named(decisions: Sequence[NzDecision], model: Any, tensors: Sequence[Any]) -> tuple[NzDecision, ...]:
    """The decisions by the names that the model's state dict has, where its parameters are known."""
    names = names_of(model) if isinstance(model, nn.Module) else {}
    return tuple(replace(one, name=names.get(id(tensors[one.position]), [one.name])[0]) for one in decisions)
