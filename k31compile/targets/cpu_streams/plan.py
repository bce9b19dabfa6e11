"""What each stream of a schedule does on a machine: units of one task or one super kernel, and whom each waits for."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from k31compile.errors import ScheduleError
from k31compile.passes.schedule.schedule import Schedule


@dataclass(frozen=True)
class Unit:
    """Something that one stream does at a time.

    Attributes:
        name: of its task or its super kernel.
        tasks: in the order of issue.
        nodes: those of its tasks that are nodes of the graph; a caller's entry or return has none.
        waits: the units of other streams that must have ended.
        is_merged: whether it is a super kernel.
    """

    name: str
    tasks: tuple[str, ...]
    nodes: tuple[fx.Node, ...]
    waits: tuple[str, ...]
    is_merged: bool


@dataclass(frozen=True)
class Plan:
    """The units of each stream in their order; `awaited` are those that another stream waits for.

    A super kernel is done by the stream of its first task, and the other streams of its tasks wait for it.
    """

    streams: tuple[tuple[Unit, ...], ...]
    awaited: frozenset[str]


def plan_streams(graph: fx.Graph, schedule: Schedule, is_merging: bool = True) -> Plan:
    """The plan of a schedule, with its super kernels or, unless `is_merging`, with each task by itself.

    Raises:
        ScheduleError: units wait for each other.
    """
    order = schedule.issue_order()
    regions = schedule.super_kernels if is_merging else ()
    members: dict[str, tuple[str, ...]] = {region.name: region.tasks for region in regions}
    unit_of = {name: region.name for region in regions for name in region.tasks}
    for name in order:
        members.setdefault(unit_of.setdefault(name, name), (name,))
    stream_of = schedule.stream_of
    units = list(dict.fromkeys(unit_of[name] for name in order))
    home = {unit: stream_of[members[unit][0]] for unit in units}
    waits = _waits(schedule, unit_of, home)
    _refuse_circles(units, waits)
    nodes = {node.name: node for node in graph.nodes if node.op == "call_function"}
    made: list[list[Unit]] = [[] for _ in schedule.streams]
    for unit in units:
        present = tuple(nodes[name] for name in members[unit] if name in nodes)
        is_merged = members[unit] != (unit,)
        made[home[unit]].append(Unit(unit, members[unit], present, tuple(waits.get(unit, ())), is_merged))
    return Plan(tuple(map(tuple, made)), frozenset(itertools.chain.from_iterable(waits.values())))


def _waits(schedule: Schedule, unit_of: Mapping[str, str], home: Mapping[str, int]) -> dict[str, dict[str, None]]:
    """For each unit those of other streams that it waits for; what one stream does is in order by itself."""
    waits: dict[str, dict[str, None]] = {}
    streams = (pair for names in schedule.streams for pair in itertools.pairwise(names))
    for after, before in (*schedule.events, *streams):
        one, other = unit_of[after], unit_of[before]
        if one != other and home[one] != home[other]:
            waits.setdefault(other, {})[one] = None
    return waits


def _refuse_circles(units: list[str], waits: Mapping[str, Mapping[str, None]]) -> None:
    place = {unit: at for at, unit in enumerate(units)}
    for unit in units:
        for other in waits.get(unit, ()):
            if place[other] >= place[unit]:
                raise ScheduleError(f"{unit!r} waits for {other!r}, which is issued after it")
