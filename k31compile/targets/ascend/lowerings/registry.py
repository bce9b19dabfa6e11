"""Lowerings by operator, in the order in which they are tried, and what a choice among them says."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from k31compile.targets.ascend.profiles import Profile

Objections = Callable[..., Sequence[str]]

FORMULA, TORCH_NPU = "formula", "torch_npu"


@dataclass(frozen=True)
class Lowering:
    """One way to run a k31 operator on an NPU.

    Attributes:
        operator: the k31 operator.
        provider: `TORCH_NPU`, or `FORMULA` for plain operators.
        run: takes the profile and the operator's arguments.
        objections: takes the profile and the operator's arguments; each constraint that they break, as a sentence.

    """

    operator: str
    provider: str
    run: Callable[..., Any]
    objections: Objections


@dataclass(frozen=True)
class Decision:
    """Which lowering a call got, and why not the ones before it."""

    operator: str
    provider: str
    passed_over: tuple[str, ...]


LOWERINGS: dict[str, list[Lowering]] = {}


def lowers(operator: str, provider: str, objections: Objections = lambda *_, **__: ()) -> Callable[..., Any]:
    """Register a function as a lowering of an operator; earlier ones are tried first.

    A formula takes the operator's arguments and knows no product; any other provider's takes the profile before them.
    """

    def register(run: Callable[..., Any]) -> Callable[..., Any]:
        takes_profile = run if provider != FORMULA else lambda _profile, *args, **kwargs: run(*args, **kwargs)
        LOWERINGS.setdefault(operator, []).append(Lowering(operator, provider, takes_profile, objections))
        return run

    return register


def choose(operator: str, profile: Profile, *args: Any, **kwargs: Any) -> tuple[Lowering, Decision] | None:
    """The first lowering without an objection to these arguments; None where the operator has none at all."""
    passed_over: list[str] = []
    for lowering in LOWERINGS.get(operator, []):
        objections = lowering.objections(profile, *args, **kwargs)
        if not objections:
            return lowering, Decision(operator, lowering.provider, tuple(passed_over))
        passed_over += [f"{lowering.provider}: {objection}" for objection in objections]
    return None
