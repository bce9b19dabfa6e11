"""Check the regions of a schedule that are launched as one, knowing nothing of how they were chosen."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping

from k31compile.errors import ScheduleError
from k31compile.passes.schedule.schedule import Schedule, SuperKernel
from k31compile.passes.schedule.tasks import Task

CanJoin = Callable[[Task], bool]


def verify_super_kernels(
    tasks: Mapping[str, Task],
    schedule: Schedule,
    conflicts: Iterable[tuple[str, str]],
    can_join: CanJoin | None = None,
) -> None:
    """Raise unless every region can be run as one without changing what follows on what.

    Regions are disjoint, each an unbroken part of the order of issue, and nothing that a stream, an event or memory in
    common puts behind one of a region's tasks comes before another of them, unless it belongs to the region. Then the
    regions and all other tasks can be run one after the other, each region as a whole.

    Args:
        tasks: by name.
        schedule: which was found to be right but for its regions.
        conflicts: two tasks each that memory in common orders, the first one first.
        can_join: whether the target can merge a task; None where every one will do.

    Raises:
        ScheduleError: with the region and the task that it is about.
    """
    if not schedule.super_kernels:
        return
    order = schedule.issue_order()
    position = {name: at for at, name in enumerate(order)}
    _check_members(tasks, schedule.super_kernels, can_join)
    after = _followers(schedule, conflicts)
    for region in schedule.super_kernels:
        _check_convex(region, order, position, after)
        _check_unbroken(region, order, position)
        _check_options(region, schedule.stream_of)


def _check_members(tasks: Mapping[str, Task], regions: Iterable[SuperKernel], can_join: CanJoin | None) -> None:
    owner: dict[str, str] = {}
    names: set[str] = set()
    for region in regions:
        if not region.name or region.name in names:
            raise ScheduleError(f"two super kernels are named {region.name!r}, or one has no name")
        names.add(region.name)
        if len(region.tasks) < 2:
            raise ScheduleError(f"super kernel {region.name!r} merges nothing", where=", ".join(region.tasks))
        for name in region.tasks:
            if name not in tasks:
                raise ScheduleError(f"super kernel {region.name!r} holds {name!r}, which is no task")
            if name in owner:
                raise ScheduleError(f"{name!r} is in super kernel {owner[name]!r} and again in {region.name!r}")
            if can_join is not None and not can_join(tasks[name]):
                raise ScheduleError(f"super kernel {region.name!r} holds {name!r}, which the target cannot merge")
            owner[name] = region.name


def _followers(schedule: Schedule, conflicts: Iterable[tuple[str, str]]) -> dict[str, set[str]]:
    after: dict[str, set[str]] = {}
    streams = (pair for names in schedule.streams for pair in itertools.pairwise(names))
    for one, other in (*streams, *schedule.events, *conflicts):
        after.setdefault(one, set()).add(other)
    return after


def _check_convex(
    region: SuperKernel, order: tuple[str, ...], position: Mapping[str, int], after: Mapping[str, set[str]]
) -> None:
    """Walk from the first to the last member: what lies behind a member and outside must not lead to a member."""
    members = set(region.tasks)
    places = [position[name] for name in region.tasks]
    behind: dict[str, str] = {}
    for name in order[min(places) : max(places) + 1]:
        source = name if name in members else behind.get(name)
        if source is None:
            continue
        for follower in sorted(after.get(name, ())):
            if follower not in members:
                behind.setdefault(follower, source)
            elif name not in members:
                raise ScheduleError(
                    f"{name!r} comes after {source!r} and before {follower!r}, and is no part of their super kernel",
                    where=region.name,
                )


def _check_unbroken(region: SuperKernel, order: tuple[str, ...], position: Mapping[str, int]) -> None:
    for one, other in itertools.pairwise(region.tasks):
        if position[other] != position[one] + 1:
            raise ScheduleError(
                f"{order[position[one] + 1] if position[one] + 1 < len(order) else 'nothing'!r} is issued after "
                f"{one!r}, and super kernel {region.name!r} goes on with {other!r}"
            )


def _check_options(region: SuperKernel, stream_of: Mapping[str, int]) -> None:
    streams = {stream_of[name] for name in region.tasks}
    if len(streams) > 1 and ("stream-fusion", "1") not in region.options:
        raise ScheduleError(
            f"super kernel {region.name!r} holds tasks of {len(streams)} streams", where="without stream-fusion=1"
        )
