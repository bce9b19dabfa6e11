"""What is scheduled, as data: tasks in program order, and which of them must come before which."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from k31compile.errors import ScheduleError
from k31compile.passes.schedule.bounds import lower_bound

Engine = Literal["cube", "vector", "memory", "communication"]

ENGINES: tuple[str, ...] = get_args(Engine)

# Two products at once share the cube, so that nothing is gained; two collectives share the links.
ONE_AT_A_TIME: tuple[str, ...] = ("cube", "communication")

# Two collectives that nothing orders may start in another order on each rank, and then wait for each other for ever.
IN_ONE_ORDER: tuple[str, ...] = ("communication",)


@dataclass(frozen=True)
class Task:
    """Something that runs on one stream from its start to its end.

    The result of a task is memory under the task's own name, so `inputs` are reads of it; a task that changes a
    result in place lists that name among its `writes`.

    Attributes:
        name: unlike every other task's.
        seconds: what it takes alone, its launch included.
        engine: what it keeps busy.
        reads: memory that it reads besides its inputs, such as a cache.
        writes: memory that it writes besides its result; a buffer that is used again has the same name again.
        inputs: tasks whose results it takes.
    """

    name: str
    seconds: float
    engine: Engine
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()

    @property
    def read(self) -> tuple[str, ...]:
        """All memory that it reads, each once."""
        return tuple(dict.fromkeys((*self.inputs, *self.reads)))

    @property
    def written(self) -> tuple[str, ...]:
        """All memory that it writes, each once: its own result first."""
        return tuple(dict.fromkeys((self.name, *self.writes)))


class TaskGraph:
    """Tasks in program order, each with the earlier ones that it has to wait for.

    Program order is what the author wrote: it decides who of two tasks with a memory in common comes first, and since
    every task stands after its inputs, there is no cycle.

    Attributes:
        tasks: in program order.
        places: the place of each name in that order.
        before: for each place those of the tasks that must have ended: where an input, a memory that is read, or one
            that is written had its last writer, and for a write also the readers since then.
    """

    def __init__(self, tasks: Iterable[Task]) -> None:
        self.tasks = tuple(tasks)
        self.places: dict[str, int] = {}
        for place, task in enumerate(self.tasks):
            self._check(task)
            self.places[task.name] = place
        self.before = tuple(self._dependences())

    def _check(self, task: Task) -> None:
        if task.name in self.places:
            raise ScheduleError(f"two tasks are named {task.name!r}", hint="give each task a name of its own")
        if task.engine not in ENGINES:
            raise ScheduleError(
                f"task {task.name!r} names no engine: {task.engine!r}", hint=f"known: {', '.join(ENGINES)}"
            )
        if not (math.isfinite(task.seconds) and task.seconds >= 0):
            raise ScheduleError(f"task {task.name!r} takes {task.seconds} seconds", hint="give it a time of 0 or more")
        for name in task.inputs:
            if name not in self.places:
                raise ScheduleError(
                    f"task {task.name!r} takes {name!r}, which does not come before it",
                    hint="list every task after its inputs; where that cannot be done there is a cycle",
                )

    def _dependences(self) -> Iterator[tuple[int, ...]]:
        writer: dict[str, int] = {}
        readers: dict[str, list[int]] = defaultdict(list)
        for place, task in enumerate(self.tasks):
            found: set[int] = set()
            for memory in task.read:
                if memory in writer:
                    found.add(writer[memory])
                readers[memory].append(place)
            for memory in task.written:
                found.update(readers.pop(memory, ()))
                if memory in writer:
                    found.add(writer[memory])
                writer[memory] = place
            found.discard(place)
            yield tuple(sorted(found))

    def edges(self) -> Iterator[tuple[str, str]]:
        """Every dependence as two names, the one that must end first in front."""
        for place, earlier in enumerate(self.before):
            for other in earlier:
                yield self.tasks[other].name, self.tasks[place].name

    @property
    def callers(self) -> frozenset[int]:
        """The places of the caller's entry and return (`enclose`), which are both on his stream; empty without them."""
        if len(self.tasks) < 2:
            return frozenset()
        first, *inside, last = self.tasks
        is_around = all(first.name in task.inputs for task in (*inside, last))
        return frozenset((0, len(self.tasks) - 1)) if is_around and first.seconds == 0 == last.seconds else frozenset()

    @property
    def serial(self) -> float:
        """The seconds of all tasks one after the other."""
        return math.fsum(task.seconds for task in self.tasks)

    @property
    def critical_path(self) -> float:
        """The seconds of the longest chain of dependences: no schedule is shorter."""
        ends: list[float] = []
        for task, earlier in zip(self.tasks, self.before, strict=True):
            ends.append(task.seconds + max((ends[other] for other in earlier), default=0.0))
        return max(ends, default=0.0)

    @property
    def locks(self) -> tuple[int, ...]:
        """For each task the number of its engine where that takes one task at a time, else -1."""
        numbers = {engine: number for number, engine in enumerate(ONE_AT_A_TIME)}
        return tuple(numbers.get(task.engine, -1) for task in self.tasks)

    @property
    def bound(self) -> float:
        """Seconds that every schedule takes: the critical path, or an engine's tasks between what they wait for and
        what waits for them.
        """
        return lower_bound([task.seconds for task in self.tasks], self.before, self.locks)


def enclose(tasks: Iterable[Task], first: str = "enter", last: str = "return") -> list[Task]:
    """The tasks between one that all wait for and one that waits for all, neither of which takes time.

    The caller made the arguments on its own stream and goes on there: what runs beside it has to wait for the one and
    be waited for by the other, also when all that it leaves behind is a cache that it wrote.
    """
    inside = list(tasks)
    begun = [
        Task(task.name, task.seconds, task.engine, task.reads, task.writes, (first, *task.inputs)) for task in inside
    ]
    taken = {name for task in inside for name in task.inputs}
    ends = tuple(task.name for task in inside if task.name not in taken)
    return [Task(first, 0.0, "memory"), *begun, Task(last, 0.0, "memory", inputs=(first, *ends))]
