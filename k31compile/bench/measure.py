"""One case in this process: check every variant against the reference, then measure those that are right in turns."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from k31compile.bench.alternate import FEWEST_ROUNDS, alternate
from k31compile.bench.case import OURS, Case, Thunk, Work
from k31compile.bench.clock import Clock, calls_per_sample, clock_for, sample
from k31compile.bench.failure import in_one_line
from k31compile.bench.goals import Bound
from k31compile.bench.memory import peak_extra_bytes
from k31compile.bench.roof import Probed, cores_had
from k31compile.bench.rows import Row
from k31compile.bench.statistics import quartiles, ratio_of

ONE_THREAD = "k31 on one thread"
"""The opponent that a run with several threads has besides: what the threads are worth."""
_THREADS_GIVE = Bound(1.8)  # at two threads or more, where arithmetic is the limit


@dataclass(frozen=True)
class Settings:
    """How a run measures.

    against: the opponents; threads: of all; seconds: for the rounds of one case; fewest: rounds at least.
    """

    against: tuple[str, ...]
    threads: int = 1
    seconds: float = 3.0
    fewest: int = FEWEST_ROUNDS


@dataclass
class _Variant:
    opponent: str
    form: str
    call: Thunk
    extra: int | None = None
    error: str = ""
    skipped: str = ""

    @property
    def key(self) -> str:
        return f"{self.opponent} {self.form}"


def measure_case(suite: str, case: Case, settings: Settings) -> list[Row]:
    """The rows of a case, one for each opponent. A variant whose result is wrong gets an error instead of a time."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    with torch.no_grad():
        work = case.make()
        ours = _Variant(OURS, "", work.ours)
        _call_first(ours, work, work.tolerance)
        if ours.error:
            return [_row(suite, case, name, settings, error=f"k31: {ours.error}") for name in settings.against]
        others = _others(work, settings)
        for variant in others:
            _call_first(variant, work, work.plain_tolerance)
        right = [variant for variant in others if not variant.error and not variant.skipped]
        clock = clock_for(settings.threads)
        roof = Probed(work.roof, clock)
        roof.ask()
        had = [cores_had(settings.threads)]
        taken = _samples([ours, *right], work, clock, settings)
        roof.ask()
        had.append(cores_had(settings.threads))
    goals = case.goals
    if work.roof is not None and work.roof.kind != "in place":
        goals = replace(goals, ratios={**goals.ratios, ONE_THREAD: _THREADS_GIVE})
    share = roof.share(quartiles(taken[ours.key])[1])
    opponents = [*settings.against, *([ONE_THREAD] if settings.threads > 1 else [])]
    rows = []
    for opponent in opponents:
        own = [variant for variant in others if variant.opponent == opponent]
        row = _row(suite, case, opponent, settings, error=_joined(own, "error"))
        row.skipped = "" if any(variant in right for variant in own) else _joined(own, "skipped")
        if not own:
            row.skipped = "none of the forms is for it"
        row.peak_extra_bytes = ours.extra
        candidates = [variant for variant in right if variant.opponent == opponent]
        if candidates:
            _compare(row, ours, candidates, taken)
        row.refuse_where_others_worked(min(had))
        row.tell_roof(share)
        row.judge(goals)
        rows.append(row)
    return rows


def _others(work: Work, settings: Settings) -> list[_Variant]:
    made = [
        _Variant(opponent, form.name, form.as_run_by(opponent))
        for opponent in settings.against
        for form in work.forms
        if not form.opponents or opponent in form.opponents
    ]
    if settings.threads > 1:
        made.append(_Variant(ONE_THREAD, "", functools.partial(_on_one_thread, work.ours)))
    return made


def _on_one_thread(call: Callable[[], object]) -> object:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return call()
    finally:
        torch.set_num_threads(threads)


def _call_first(variant: _Variant, work: Work, tolerance: float) -> None:
    """Note extra memory of a second call, and what is wrong with the result: the first compiles and loads code.

    An opponent that cannot be compiled or fails is left out; ours must not fail.
    """
    try:
        variant.call()
        variant.extra = peak_extra_bytes(variant.call)
        result = variant.call()
    except Exception as failure:  # another's compiler may fail in any way
        why = in_one_line(failure)
        variant.error, variant.skipped = (why, "") if variant.opponent == OURS else ("", why)
        return
    variant.error = work.check(result, tolerance) or ""


def _samples(variants: Sequence[_Variant], work: Work, clock: Clock, settings: Settings) -> dict[str, list[float]]:
    samplers = {}
    for variant in variants:
        calls = work.calls or calls_per_sample(variant.call, clock)
        samplers[variant.key] = functools.partial(sample, variant.call, calls, clock)
    return alternate(samplers, settings.seconds, settings.fewest)


def _joined(variants: Sequence[_Variant], field: str) -> str:
    return "; ".join(f"{v.form or v.opponent}: {getattr(v, field)}" for v in variants if getattr(v, field))


def _compare(row: Row, ours: _Variant, candidates: Sequence[_Variant], taken: dict[str, list[float]]) -> None:
    """Against the faster form of an opponent."""
    best = min(candidates, key=lambda variant: quartiles(taken[variant.key])[1])
    row.form, row.other_peak_extra_bytes = best.form, best.extra
    middles = [quartiles(taken[variant.key])[1] for variant in (ours, best)]
    assert all(math.isfinite(middle) for middle in middles)
    row.take(ratio_of(taken[ours.key], taken[best.key]), *middles)


def _row(suite: str, case: Case, opponent: str, settings: Settings, error: str) -> Row:
    return Row(
        suite, case.name, case.label, opponent, settings.threads, error=error, series=case.series, size=case.size
    )
