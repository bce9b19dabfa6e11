"""Regions of launch-bound tasks that the target launches as one kernel, chosen and sized by the cost model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from k31compile.errors import ScheduleError
from k31compile.passes.schedule.cost_model import CostModel
from k31compile.passes.schedule.merged_times import Clock, Links, MergedRun
from k31compile.passes.schedule.schedule import Schedule, SuperKernel
from k31compile.passes.schedule.tasks import Task, TaskGraph

CanJoin = Callable[[Task], bool]

# A region grows for so many more tasks after the one with which it gained most.
_PATIENCE = 16


@dataclass(frozen=True)
class MergedPrediction:
    """What a cost model predicts of a schedule whose regions are launched as one each; nothing of it is measured.

    Attributes:
        launches_before: tasks that take time, each launched by itself.
        launches_after: the same with one launch for each region.
        seconds_before: of the schedule as its own times have it.
        seconds_after: of the schedule with its regions merged.
    """

    launches_before: int
    launches_after: int
    seconds_before: float
    seconds_after: float


def aggregate_super_kernels(
    graph: TaskGraph, schedule: Schedule, costs: CostModel, can_join: CanJoin, communication: bool = False
) -> Schedule:
    """The schedule with regions of tasks that mostly wait for their own launch.

    A region is a run of the order of issue, so no task is moved, least of all over one that changes memory. It ends at
    every task that is no part of one: what the target cannot merge, a collective unless allowed, work that is longer
    than a launch. It is as long as its own chain gains by it, which leaves out what would have to wait for the rest of
    the region for longer than its launch takes.

    Args:
        graph: the tasks.
        schedule: where they run; its streams, events and times are not changed.
        costs: the target's figures.
        can_join: whether the target can merge a task.
        communication: whether collectives may join.

    Raises:
        ScheduleError: the target has no figure for a step inside of a region.
    """
    launch, step = costs.launch.value, _step_of(costs)
    links = Links.of(graph, schedule)

    def is_barrier(name: str) -> bool:
        task = links.tasks[name]
        is_long = task.seconds > 2 * launch
        return is_long or (task.engine == "communication" and not communication) or not can_join(task)

    clock = Clock(links)
    regions: list[SuperKernel] = []
    order, at = schedule.issue_order(), 0
    while at < len(order):
        grown = None
        if links.tasks[order[at]].seconds > 0 and not is_barrier(order[at]):
            grown = _best_run(clock, order, at, launch, step, is_barrier)
        if grown is None:
            clock.run_alone(order[at])
            at += 1
        else:
            clock.run_merged(grown)
            regions.append(_named(len(regions), grown, schedule.stream_of))
            at += len(grown.names)
    if clock.last > schedule.predicted:
        return replace(schedule, super_kernels=())
    return replace(schedule, super_kernels=tuple(regions))


def predict_merged(graph: TaskGraph, schedule: Schedule, costs: CostModel) -> MergedPrediction:
    """What the regions of a schedule should save, in launches and in seconds.

    Raises:
        ScheduleError: there are regions, and the target has no figure for a step inside of one.
    """
    links = Links.of(graph, schedule)
    clock = Clock(links)
    region_of = {name: region for region in schedule.super_kernels for name in region.tasks}
    for name in schedule.issue_order():
        region = region_of.get(name)
        if region is None:
            clock.run_alone(name)
        elif name == region.tasks[0]:
            run = MergedRun(clock, costs.launch.value, _step_of(costs))
            for member in region.tasks:
                run.add(member)
            clock.run_merged(run)
    launched = {task.name for task in graph.tasks if task.seconds > 0}
    merged = [sum(name in launched for name in region.tasks) for region in schedule.super_kernels]
    saved = sum(count - 1 for count in merged if count)
    return MergedPrediction(len(launched), len(launched) - saved, schedule.predicted, clock.last)


def _best_run(
    clock: Clock, order: Sequence[str], at: int, launch: float, step: float, is_barrier: Callable[[str], bool]
) -> MergedRun | None:
    """The run of the order from `at` on that gains most by being merged, or None where none gains."""
    grown = MergedRun(clock, launch, step)
    best, best_gain = 0, 1e-9 * launch
    for count, name in enumerate(_until(order, at, is_barrier), start=1):
        grown.add(name)
        if grown.gain > best_gain:
            best, best_gain = count, grown.gain
        if count - best > _PATIENCE:
            break
    if best < 2:
        return None
    chosen = MergedRun(clock, launch, step)
    for name in order[at : at + best]:
        chosen.add(name)
    return chosen


def _until(order: Sequence[str], at: int, is_barrier: Callable[[str], bool]) -> Iterator[str]:
    for name in order[at:]:
        if is_barrier(name):
            return
        yield name


def _named(number: int, run: MergedRun, stream_of: dict[str, int]) -> SuperKernel:
    is_wide = len({stream_of[name] for name in run.names}) > 1
    return SuperKernel(f"k31_super_kernel_{number}", tuple(run.names), (("stream-fusion", "1"),) if is_wide else ())


def _step_of(costs: CostModel) -> float:
    if costs.join is None:
        raise ScheduleError(
            f"the figures of {costs.target!r} have none for a step inside a super kernel",
            hint="give the target's file of costs a figure 'join', or leave its tasks unmerged",
        )
    return costs.join.value
