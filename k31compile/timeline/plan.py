"""The schedule of an entry's graph for a target, before anything is lowered: for a look at it, not for a compile."""

from __future__ import annotations

from torch import fx

from k31compile.passes.schedule.cost_model import load_costs
from k31compile.passes.schedule.graph_tasks import tasks_of
from k31compile.passes.schedule.schedule_tasks import schedule_tasks
from k31compile.passes.schedule.tasks import TaskGraph
from k31compile.timeline.page import Planned


def plan(name: str, module: fx.GraphModule, target: str) -> Planned:
    """Schedule a graph of k31 and ATen operators by a target's figures.

    Raises:
        ScheduleError: there are no figures for this target.
    """
    costs = load_costs(target)
    graph = TaskGraph(tasks_of(module, costs))
    return Planned(name, graph, schedule_tasks(graph, costs.event.value), costs)
