"""A case of a benchmark: what is computed, by whom, against which truth, and what is expected of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from k31compile.bench.goals import Goals

Thunk = Callable[[], Any]
"""One call of one variant, with its arguments."""

OURS = "k31"
OPPONENTS = ("inductor", "max-autotune", "eager")
"""Whom k31 is measured against; the first and the last unless asked otherwise."""
DEFAULT_OPPONENTS = ("inductor", "eager")


@dataclass(frozen=True)
class Form:
    """One way in which an author would write a case in plain PyTorch.

    Attributes:
        name: what tells it from the other ways; "" where there is one only.
        function: what is compiled, or called as it is for "eager".
        bind: given that function, compiled or not, the call of it; made once for each variant.
        dynamic: compile it for sizes that change.
        opponents: whose variants have this form; all of them when empty.

    """

    name: str
    function: Callable[..., Any]
    bind: Callable[[Callable[..., Any]], Thunk]
    dynamic: bool = False
    opponents: tuple[str, ...] = ()

    def as_run_by(self, opponent: str) -> Thunk:
        """The call as this opponent runs it."""
        if opponent == "eager":
            return self.bind(self.function)
        mode = "max-autotune-no-cudagraphs" if opponent == "max-autotune" else None
        return self.bind(torch.compile(self.function, dynamic=self.dynamic, mode=mode))


class Roof(NamedTuple):
    """Useful work of one call, and the probe that says how much of it this machine does in a nanosecond.

    kind: "float32" or "bfloat16", counted in multiplications and additions; "in place", in bytes read and written; or
    "read", in bytes.
    """

    kind: str
    work: float


@dataclass
class Work:
    """A case whose tensors are there.

    Attributes:
        ours: one call of the k31 operator.
        forms: what the opponents run; of several the faster one counts.
        check: given a result and a tolerance, what is wrong with it in one line, or None.
        tolerance: of our result; `plain_tolerance` of the opponents', which may round where we do not.
        roof: of one call; None where no probe is named.
        calls: how many calls make one sample; None chooses so that the clock can tell.

    """

    ours: Thunk
    forms: Sequence[Form]
    check: Callable[[Any, float], str | None]
    tolerance: float
    plain_tolerance: float
    roof: Roof | None = None
    calls: int | None = None


@dataclass(frozen=True)
class Case:
    """One row of a benchmark, to be made when its turn comes.

    Attributes:
        name: the operator or model.
        label: which sizes of it.
        make: allocates and fills its tensors.
        goals: what it is held to.
        series, size: the line and the place on it where a chart shows the case; "" for none.
        is_quick: part of what `--quick` measures.

    """

    name: str
    label: str
    make: Callable[[], Work]
    goals: Goals = field(default_factory=Goals)
    series: str = ""
    size: float = 0.0
    is_quick: bool = False

    @property
    def full_name(self) -> str:
        """Name and sizes, as `--only` sees them."""
        return f"{self.name} {self.label}"
