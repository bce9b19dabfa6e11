"""The values of one call: when each is freed, and what a reader sees who comes too late."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from k31compile.errors import ScheduleError
from k31compile.passes.schedule.schedule import Schedule

# Every byte of freed memory: a NaN in each floating-point type, -1 in each integer.
_POISON = 0xFF


def uses_that_count(
    schedule: Schedule, owners: Mapping[str, Collection[fx.Node]], tasks: Collection[fx.Node], kept: Collection[fx.Node]
) -> dict[fx.Node, frozenset[str]]:
    """For each result that may be freed the tasks that this waits for: those of its stream or of one it is kept for.

    The task that makes it is among them.

    Args:
        schedule: whose `keeps` say for which other streams a result is kept.
        owners: for each task the nodes whose memory it reads or writes, its own result included.
        tasks: all tasks.
        kept: results that the call returns.
    """
    stream_of, keeps = schedule.stream_of, set(schedule.keeps)
    found: dict[fx.Node, set[str]] = {}
    for task, touched in owners.items():
        for owner in touched:
            if owner not in tasks or owner in kept:
                continue
            users = found.setdefault(owner, set())
            stream = stream_of[task]
            if stream_of[owner.name] == stream or (owner.name, stream) in keeps:
                users.add(task)
    return {owner: frozenset(users) for owner, users in found.items()}


class Values:
    """The values of one call by node, shared by the threads that run its streams."""

    def __init__(self, given: Mapping[fx.Node, Any], uses: Mapping[fx.Node, frozenset[str]], is_poisoned: bool) -> None:
        """`given` belong to the caller and are never freed; `uses` are what a result waits for before it is."""
        self._values = dict(given)
        self._left = {owner: len(users) for owner, users in uses.items()}
        self._uses = uses
        self._is_poisoned = is_poisoned
        self._lock = threading.Lock()
        self._holders = Counter(_storages(list(given.values())))

    def get(self, node: fx.Node, reader: str) -> Any:
        """A value for a task.

        Raises:
            ScheduleError: it was freed, or not computed yet.
        """
        try:
            return self._values[node]
        except KeyError:
            raise ScheduleError(
                f"the result of {node.name!r} is not there when {reader!r} reads it",
                where="freed too early, or not computed yet",
                hint="an event or a keep is missing: verify_schedule names it",
            ) from None

    def put(self, node: fx.Node, value: Any) -> None:
        """Store the result of a task."""
        with self._lock:
            self._values[node] = value
            if self._is_poisoned:
                self._holders.update(_storages(value))

    def done(self, task: str, touched: Collection[fx.Node]) -> None:
        """Note that a task has run, and free what nobody waits to use."""
        with self._lock:
            for owner in touched:
                if task in self._uses.get(owner, ()):
                    self._left[owner] -= 1
                    if not self._left[owner]:
                        self._free(owner)

    def _free(self, owner: fx.Node) -> None:
        """Drop a result, or overwrite its memory where nothing else that is alive lies in it."""
        if not self._is_poisoned:
            self._values.pop(owner, None)
            return
        value = self._values.get(owner)
        self._holders.subtract(_storages(value))
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, torch.Tensor) and not self._holders[leaf.untyped_storage().data_ptr()]:
                storage = leaf.untyped_storage()
                leaf.new_empty(0, dtype=torch.uint8).set_(storage).fill_(_POISON)


def _storages(value: Any) -> set[int]:
    return {leaf.untyped_storage().data_ptr() for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)}
