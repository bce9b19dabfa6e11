"""What an operator should take on a target, from a file of figures that each name their source."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from k31compile.errors import ScheduleError
from k31compile.passes.schedule.tasks import ENGINES, Engine

_FOLDER = Path(__file__).parent / "costs"


@dataclass(frozen=True)
class Figure:
    """A number of a target, its unit, and where it comes from: "assumed" is said where that is all it is."""

    value: float
    unit: str
    source: str


@dataclass(frozen=True)
class CostModel:
    """The figures of a target. They are peaks, so what is predicted from them is short of what will be measured.

    Attributes:
        target: its name.
        device: what one device is.
        cube_flops: BF16 operations a second of the matrix engine.
        vector_flops: operations a second of everything else that computes.
        memory_bytes: bytes a second of the device's memory.
        link_bytes: bytes a second that one device sends to others.
        launch: seconds that each task takes besides its work.
        event: seconds from the end of a task to the start of one on another stream that waits for it.
        join: seconds from the end of a task to the start of the next inside one super kernel, which launches but once;
            None where the target merges no tasks.
    """

    target: str
    device: str
    cube_flops: Figure
    vector_flops: Figure
    memory_bytes: Figure
    link_bytes: Figure
    launch: Figure
    event: Figure
    join: Figure | None = None

    def seconds_of(self, flops: float, bytes_moved: float, engine: Engine) -> float:
        """The predicted seconds of one task: its launch, then the longer of computing and moving.

        Raises:
            ScheduleError: there is no such engine, or it would do less than nothing.
        """
        if engine not in ENGINES:
            raise ScheduleError(f"there is no engine {engine!r}", hint=f"known: {', '.join(ENGINES)}")
        if not (flops >= 0 and bytes_moved >= 0):
            raise ScheduleError(f"a task of {flops} operations and {bytes_moved} bytes", hint="give 0 or more of each")
        computing = self.cube_flops if engine == "cube" else self.vector_flops
        moving = self.link_bytes if engine == "communication" else self.memory_bytes
        return self.launch.value + max(flops / computing.value, bytes_moved / moving.value)


def known_targets() -> list[str]:
    """The targets that there are figures for."""
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


@cache
def load_costs(target: str) -> CostModel:
    """The figures of a target.

    Raises:
        ScheduleError: there are none.
    """
    if target not in known_targets():
        raise ScheduleError(f"there is no cost model for {target!r}", hint=f"known: {', '.join(known_targets())}")
    data = json.loads((_FOLDER / f"{target}.json").read_text(encoding="utf-8"))
    return CostModel(target, data["device"], **{name: Figure(**figure) for name, figure in data["figures"].items()})
