"""Lowerings by operator, how one of them is chosen for a call, and what the choice says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from k31compile.errors import TargetError
from k31compile.targets.ascend.lowerings.prices import predict_formula, predict_operator
from k31compile.targets.ascend.profiles import Profile
from k31compile.targets.ascend.providers import (
    FORMULA,
    OURS,
    TORCH_NPU,
    Function,
    lacks_in_torch_npu,
    why_not,
    why_not_own,
)

__all__ = ["FORMULA", "LOWERINGS", "TORCH_NPU", "Decision", "Lowering", "choose", "known", "lowers"]

Objections = Callable[..., Sequence[str]]


def _no_parts(*_args: Any, **_kwargs: Any) -> tuple[Decision, ...]:
    return ()


@dataclass(frozen=True)
class Lowering:
    """One way to run a k31 operator on an NPU.

    Attributes:
        operator: the k31 operator.
        provider: whose operators it calls, by its name in `providers.py`.
        run: takes the profile and the operator's arguments.
        objections: takes the profile and the operator's arguments; each constraint that they break, as a sentence.
        calls: the operator or function of the provider, as a reader would look it up.
        function: what is imported when it runs; None where nothing is.
        parts: the choices that it makes for smaller k31 operators inside of it.
        never: why no call ever becomes it; empty where some do.
        in_ge: whether torchair converts what it calls.

    """

    operator: str
    provider: str
    run: Callable[..., Any]
    objections: Objections
    calls: str = ""
    function: Function | None = None
    parts: Callable[..., tuple[Decision, ...]] = _no_parts
    never: str = ""
    in_ge: bool = True

    def why_not(self, profile: Profile, *args: Any, **kwargs: Any) -> list[str]:
        """Every reason why this call does not get this lowering; a package is imported only when none is left."""
        missing = why_not(self.provider, profile)
        if self.provider == OURS:
            missing = why_not_own(self.operator, profile)
        elif self.provider == TORCH_NPU:
            missing = lacks_in_torch_npu(self.calls)
        # Installing what would never be taken is no remedy, so that is what is told.
        found = [self.never or missing] if missing else list(self.objections(profile, *args, **kwargs))
        if not found and self.function is not None:
            broken = self.function.why_not()
            found = [broken] if broken else []
        return found


@dataclass(frozen=True)
class Decision:
    """Which lowering a call got, why, and why not the ones that were passed over.

    Attributes:
        operator: the k31 operator.
        provider: whose operators the call became.
        passed_over: each other provider with the reason why not.
        reason: why this one.
        seconds: its time as predicted by the target's cost model; None where nothing can be said.
        parts: the decisions for operators inside of it.

    """

    operator: str
    provider: str
    passed_over: tuple[str, ...]
    reason: str = ""
    seconds: float | None = None
    parts: tuple[Decision, ...] = ()


LOWERINGS: dict[str, list[Lowering]] = {}


def lowers(
    operator: str,
    provider: str,
    objections: Objections = lambda *_, **__: (),
    *,
    calls: str = "",
    function: Function | None = None,
    parts: Callable[..., tuple[Decision, ...]] = _no_parts,
    never: str = "",
    in_ge: bool = True,
) -> Callable[..., Any]:
    """Register a function as a lowering of an operator.

    A formula takes the operator's arguments and knows no product, unless it has parts; any other takes the profile
    before them.
    """

    def register(run: Callable[..., Any]) -> Callable[..., Any]:
        plain = provider == FORMULA and parts is _no_parts
        takes_profile = (lambda _profile, *args, **kwargs: run(*args, **kwargs)) if plain else run
        one = Lowering(
            operator, provider, takes_profile, objections, calls or run.__name__, function, parts, never, in_ge
        )
        LOWERINGS.setdefault(operator, []).append(one)
        return run

    return register


def known(operator: str, provider: str, calls: str, why_never: str) -> None:
    """Enter a provider's function that does something near to an operator, and why no call becomes it."""

    def refuse(*_args: Any, **_kwargs: Any) -> Any:
        raise TargetError(f"{provider}'s {calls} does not stand for k31::{operator}: {why_never}")

    lowers(operator, provider, lambda *_, **__: [why_never], calls=calls, never=why_never)(refuse)


def in_order(operator: str) -> list[Lowering]:
    """The lowerings of an operator as they are tried: formulas last."""
    return sorted(LOWERINGS.get(operator, []), key=lambda one: one.provider == FORMULA)


def choose(operator: str, profile: Profile, *args: Any, **kwargs: Any) -> tuple[Lowering, Decision]:
    """The lowering for a call: of the providers' that take it, the one of least predicted time; else the formula.

    Providers go before formulas whatever is predicted: one kernel is one launch on a device, and what GE makes of a
    formula's many nodes is not seen from here.

    Raises:
        TargetError: nothing takes these arguments; it names every reason.
    """
    passed_over: list[str] = []
    usable: list[Lowering] = []
    for lowering in in_order(operator):
        reasons = lowering.why_not(profile, *args, **kwargs)
        passed_over += [f"{lowering.provider}: {reason}" for reason in reasons]
        if not reasons:
            usable.append(lowering)
    if not usable:
        told = "; ".join(passed_over) or "none is written"
        raise TargetError(f"k31::{operator} has no lowering for {profile.name}: {told}", hint="change what is named")
    rivals = [one for one in usable if one.provider != FORMULA] or usable
    predicted = {id(one): _predict(one, profile, *args, **kwargs) for one in usable}
    chosen = min(rivals, key=lambda one: predicted[id(one)] or 0.0)
    passed_over += [f"{one.provider}: {_slower(one, chosen, predicted)}" for one in usable if one is not chosen]
    decision = Decision(
        operator, chosen.provider, tuple(passed_over), _reason(chosen, rivals), predicted[id(chosen)],
        chosen.parts(profile, *args, **kwargs),
    )  # fmt: skip
    return chosen, decision


def _predict(lowering: Lowering, profile: Profile, *args: Any, **kwargs: Any) -> float | None:
    if lowering.provider == FORMULA:
        return predict_formula(lowering.run, profile, *args, **kwargs)
    return predict_operator(lowering.operator, profile, *args, **kwargs)


def _reason(chosen: Lowering, rivals: Sequence[Lowering]) -> str:
    if chosen.provider == FORMULA:
        return "no provider takes this call"
    if len(rivals) == 1:
        return f"the only provider whose constraints hold; calls {chosen.calls}"
    return f"of {len(rivals)} providers whose constraints hold, none is predicted to be faster; calls {chosen.calls}"


def _slower(one: Lowering, chosen: Lowering, predicted: dict[int, float | None]) -> str:
    """Why a lowering that takes the call is not the one."""
    own, best = predicted[id(one)], predicted[id(chosen)]
    if one.provider == FORMULA:
        return "takes this call too" + ("" if own is None else f", predicted {own * 1e6:.1f} us")
    if own == best:
        return "takes this call too and is predicted to be as fast; it stands later in the order of providers"
    return f"takes this call too, predicted {(own or 0) * 1e6:.1f} us against {(best or 0) * 1e6:.1f} us"
