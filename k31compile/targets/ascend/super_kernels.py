"""Which tasks of a lowered graph GE may launch as one kernel on a product, and why there are none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from k31compile.passes.schedule.cost_model import CostModel
from k31compile.passes.schedule.schedule import Schedule
from k31compile.passes.schedule.super_kernels import CanJoin, MergedPrediction, aggregate_super_kernels, predict_merged
from k31compile.passes.schedule.tasks import TaskGraph
from k31compile.passes.schedule.verify_schedule import verify_schedule
from k31compile.targets.ascend.profiles import Profile


@dataclass(frozen=True)
class Merging:
    """A schedule with its regions, what they should save (None without any), and why there are none ("" where some)."""

    schedule: Schedule
    prediction: MergedPrediction | None
    why_none: str

    def to_dict(self) -> dict[str, Any]:
        """The counts and predictions, as a report has them."""
        said = self.prediction
        return {
            "regions": len(self.schedule.super_kernels),
            "tasks": sum(len(region.tasks) for region in self.schedule.super_kernels),
            "launches_before": said.launches_before if said else None,
            "launches_after": said.launches_after if said else None,
            "predicted": said.seconds_after if said else None,
            "why_none": self.why_none,
        }


def merge_launches(
    module: fx.GraphModule, tasks: TaskGraph, schedule: Schedule, costs: CostModel, profile: Profile, is_wanted: bool
) -> Merging:
    """The verified schedule with regions where the product, the option and the graph allow them and it should gain."""
    why_none = _why_none(module, profile, is_wanted)
    if not why_none:
        can_join = can_join_in(module)
        schedule = aggregate_super_kernels(tasks, schedule, costs, can_join)
        verify_schedule(tasks, schedule, can_join)
        if schedule.super_kernels:
            return Merging(schedule, predict_merged(tasks, schedule, costs), "")
        why_none = "no two launch-bound tasks that follow on each other should gain by it"
    return Merging(schedule, None, why_none)


def can_join_in(module: fx.GraphModule) -> CanJoin:
    """Every operator of the graph may join: GE itself skips one that it cannot merge and goes on behind it.

    What is no operator, the caller's entry and return, may not.
    """
    names = {node.name for node in module.graph.nodes if node.op == "call_function"}
    return lambda task: task.name in names


def _why_none(module: fx.GraphModule, profile: Profile, is_wanted: bool) -> str:
    if not is_wanted:
        return "the option super_kernel is off"
    if profile.path != "ge":
        return f"{profile.path} merges launches while it captures, and no region is written for that"
    if not profile.super_kernels:
        return f"GE merges no operators on {profile.name}"
    symbolic = first_symbolic(module)
    return f"the size of {symbolic} is not static, and GE merges static graphs alone" if symbolic else ""


def first_symbolic(module: fx.GraphModule) -> str:
    """The first node of whose value a size is a symbol; empty where the graph is static."""
    for node in module.graph.nodes:
        for leaf in pytree.tree_leaves(node.meta.get("val")):
            sizes = (*leaf.shape, *leaf.stride()) if isinstance(leaf, torch.Tensor) else (leaf,)
            if any(isinstance(size, torch.SymInt) for size in sizes):
                return str(node.name)
    return ""
