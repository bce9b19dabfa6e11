"""What an Ascend graph needs before a vendor's compiler sees it: operators, weights in blocks, streams, regions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from k31compile.passes.layout.nz_weights import NzDecision, decide_nz_weights
from k31compile.passes.schedule.cost_model import load_costs
from k31compile.passes.schedule.graph_tasks import tasks_of
from k31compile.passes.schedule.schedule import Schedule
from k31compile.passes.schedule.schedule_tasks import schedule_tasks
from k31compile.passes.schedule.tasks import TaskGraph
from k31compile.passes.schedule.verify_schedule import verify_schedule
from k31compile.targets.ascend.lower import Lowered, lower
from k31compile.targets.ascend.profiles import Profile
from k31compile.targets.ascend.super_kernels import Merging, merge_launches


@dataclass(frozen=True)
class Prepared:
    """A lowered graph, which of its inputs are stored in blocks, and its tasks with their verified schedule."""

    lowered: Lowered
    nz: tuple[NzDecision, ...]
    tasks: TaskGraph
    merging: Merging

    @property
    def schedule(self) -> Schedule:
        """The streams, events and super kernels."""
        return self.merging.schedule


def prepare(
    module: fx.GraphModule, profile: Profile, tensors: Sequence[Any], streams: int = 4, super_kernel: bool = True
) -> Prepared:
    """Lower a graph that went through the passes, and decide on its weights' layout, streams and super kernels.

    Args:
        module: the graph; cache writes in it become writes in place.
        profile: the product.
        tensors: what the graph's inputs are, in their order; they are looked at and never read.
        streams: the most streams that may be used, 1 to 4.
        super_kernel: whether launches may be merged where the product can.

    Raises:
        TargetError: an operator has no lowering for its arguments.
    """
    inputs = module.graph.find_nodes(op="placeholder")
    parameters = [position for position, node in enumerate(inputs) if node.meta.get("is_parameter", False)]
    lowered = lower(module, profile)
    nz = decide_nz_weights(lowered.module.graph, parameters, profile.name, tensors)
    costs = load_costs(profile.name)
    tasks = TaskGraph(tasks_of(lowered.module, costs))
    schedule = schedule_tasks(tasks, costs.event.value, streams)
    verify_schedule(tasks, schedule)
    merging = merge_launches(lowered.module, tasks, schedule, costs, profile, super_kernel)
    return Prepared(lowered, tuple(nz), tasks, merging)
