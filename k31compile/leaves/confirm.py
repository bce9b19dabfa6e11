"""Confirm a function by calling it: small tensors of any length, in float64, against the operator's definition."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from k31compile.graph.confirm import Mismatch, first_line
from k31compile.leaves.bytecode import Unfit
from k31compile.leaves.call import Call, alone, run_in_float64
from k31compile.leaves.form import Evidence, Form
from k31compile.leaves.hypotheses import eps_of, exponents, forms_of
from k31compile.leaves.reading import CalledReading, Memo, by_name
from k31compile.leaves.results import check_rounding, with_results
from k31compile.leaves.source import Source

FIRST_LENGTH = 5
LONGEST = 1024
"""A whole number above this, in a function or its arguments, is a length that no confirmation would reach."""
_NO_LENGTH = 1e8
_STEPS = (16, 32, 64, 128, 256)
_SIZES = ((2, 3), (1, 2), (3, 1), (2, 4))
_HEADS = 64


class Denied(Exception):
    """No reading of a call agrees with its results; `trials` is how far the best one came."""

    def __init__(self, reason: str, trials: int = -1) -> None:
        super().__init__(reason)
        self.trials = trials


def confirm_call(call: Call, source: Source, chunked: bool | None = None, most: int | None = None) -> Form:
    """The form that a call has, confirmed; of the ways to tell its arguments apart `most`, the likeliest first.

    Raises:
        Unfit: the call, or the function, cannot be a leaf.
        Denied: it computes something else; the reason has numbers.
    """
    largest = max(_numbers(call, source), default=0)
    if largest > LONGEST:
        raise Unfit(f"it holds the number {largest}, and lengths beyond {LONGEST} are not tried")
    with alone():
        return _Trial(call, source, chunked).confirmed(most)


def agrees(form: Form, call: Call) -> bool:
    """Whether a remembered form agrees with the function on one sample: a file is not believed unseen."""
    with alone():
        try:
            repeat = max(operand.repeat for operand in form.operands.values())
            length = form.only or (form.step if form.step > 1 else FIRST_LENGTH)
            reading = CalledReading(form, call).at(2, length, 2 * repeat)
            sample = reading.sample(torch.Generator().manual_seed(29), 1)
            reading.judge(sample, reading.run(sample, {}, 1))
        except Exception:
            return False
    return True


def _numbers(call: Call, source: Source) -> list[int]:
    """The numbers at which the function may behave otherwise, were they compared with a length."""
    numbers = [*source.integers, *source.floats, *call.constants.values()]
    return sorted({math.floor(n) for n in numbers if type(n) in (int, float) and 4 < n < _NO_LENGTH})


class _Trial:
    """One call under confirmation."""

    def __init__(self, call: Call, source: Source, chunked: bool | None) -> None:
        self.call, self.source, self.chunked = call, source, chunked
        self.memo: Memo = {}
        self.furthest = Denied("its arguments cannot be told apart as q, k, v, gate and beta by their shapes")

    def confirmed(self, most: int | None) -> Form:
        """The first form that holds at every length."""
        forms = list(itertools.islice(forms_of(self.call, self.source, self.chunked), most))
        if not forms:
            raise self.furthest
        step = self._step(forms)
        for form in self._variants(forms, step):
            try:
                return self._hold(form)
            except Mismatch as mismatch:
                trials = mismatch.args[1] if len(mismatch.args) > 1 else 0
                if trials > self.furthest.trials:
                    self.furthest = Denied(str(mismatch.args[0]), trials)
        raise self.furthest

    def _step(self, forms: Sequence[Form]) -> int:
        """Of which number lengths must be multiples for the function to run at all; 0 for calls of one token only."""
        if forms[0].operands["value"].layout.dims[1] is None:
            return 0
        constants = _numbers(self.call, self.source)
        reason = ""
        for step in (1, *sorted({*_STEPS, *constants})):
            for form in forms[:2]:
                reading = CalledReading(form, self.call, self.memo).at(
                    2, step if step > 1 else FIRST_LENGTH, self._heads(form)
                )
                sample = by_name(reading.sample(torch.Generator().manual_seed(17), 0))
                try:
                    run_in_float64(self.call, sample)
                except Unfit:
                    raise
                except Exception as error:
                    reason = f"{type(error).__name__}: {first_line(error)}"
                    continue
                return step
        raise Denied(f"it cannot be called on samples: {reason}")

    def _heads(self, form: Form) -> int:
        return 3 * max(operand.repeat for operand in form.operands.values())

    def _variants(self, forms: Sequence[Form], step: int) -> Iterator[Form]:
        """Forms with their results read, as they are, normalised inside, or in other units of the gate."""
        length = {0: 1, 1: FIRST_LENGTH}.get(step, step)
        for exponent in exponents(self.source):
            for form in forms:
                one = replace(form, exponent=exponent, step=max(step, 1), only=1 if step == 0 else None)
                reading = CalledReading(one, self.call, self.memo).at(2, length, self._heads(one))
                normalised = self._normalised(reading)
                if normalised is None:
                    continue
                for seen in with_results(one, reading, self.call):
                    if normalised:
                        yield from self._with_norms(seen)
                    else:
                        yield seen

    def _normalised(self, reading: CalledReading) -> bool | None:
        """Whether q and k are normalised inside: then twice as long ones change nothing. None for one of the two."""
        sample = reading.sample(torch.Generator().manual_seed(17), 0)
        plain = self._called(by_name(sample))
        if plain is None:
            return None
        found = []
        for operand in reading.operands.vectors[:2]:
            scaled = self._called(by_name({**sample, operand.leaf: sample[operand.leaf] * 2}))
            if scaled is None:
                return None
            found.append(_close(plain, scaled))
        return found[0] if found[0] == found[1] else None

    def _called(self, values: dict[str, torch.Tensor]) -> list[torch.Tensor] | None:
        try:
            return _tensors(run_in_float64(self.call, values))
        except Unfit:
            raise
        except Exception:
            return None

    def _with_norms(self, form: Form) -> Iterator[Form]:
        for eps in eps_of(self.source):
            for floored in (False, True):
                operands = {
                    role: replace(part, eps=eps, floored=floored) if role in ("query", "key") else part
                    for role, part in form.operands.items()
                }
                yield replace(form, operands=operands)

    def _hold(self, form: Form) -> Form:
        """The form with scale and evidence, or Mismatch at the first sample that contradicts it."""
        reading = CalledReading(form, self.call, self.memo)
        samples, worst, lengths = 0, 0.0, []
        shortest = form.only or (1 if self._takes_one(reading) else max(form.step, 2))
        for i, length in enumerate(self._lengths(form, shortest)):
            sizes = [_SIZES[0]] if i == 0 else [_SIZES[i % len(_SIZES)]]
            if i == 1:
                sizes += self._real_sizes(form)
            for batch, heads in sizes:
                repeat = max(operand.repeat for operand in form.operands.values())
                reading.at(batch, length, heads * repeat)
                for trial in range(4 if i < 2 else 2):
                    worst = max(worst, self._judged(reading, trial + (0 if i < 2 else i), samples))
                    samples += 1
            lengths.append(length)
        assert reading.learned is not None
        evidence = Evidence(samples, tuple(sorted(set(lengths))), worst)
        form = replace(form, scale=reading.learned, shortest=shortest, evidence=evidence)
        check_rounding(form, self.call)
        return form

    def _takes_one(self, reading: CalledReading) -> bool:
        if reading.form.step > 1:
            return False
        reading.at(2, 1, self._heads(reading.form))
        return self._called(by_name(reading.sample(torch.Generator().manual_seed(17), 0))) is not None

    def _lengths(self, form: Form, shortest: int) -> list[int]:
        """Lengths on both sides of every number at which behaviour may change; whole chunks if it takes only those."""
        if form.only is not None:
            return [form.only] * len(_SIZES)
        numbers = _numbers(self.call, self.source)
        if form.step > 1:
            around = [form.step * math.ceil(n / form.step) + form.step for n in numbers]
            return list(dict.fromkeys([form.step, 3 * form.step, 2 * form.step, *around]))
        around = [length for n in numbers for length in (n + 1, n, 2 * n + 3)]
        first = [FIRST_LENGTH, 19, 2, 3] + ([1] if shortest == 1 else [])
        return list(dict.fromkeys([*first, *around]))

    def _real_sizes(self, form: Form) -> list[tuple[int, int]]:
        """Batch and heads of the call itself, where they are few enough to run."""
        value, query = form.operands["value"], form.operands["query"]
        shape = self.call.tensors[value.name].shape
        batch, heads = (value.layout.size(letter, shape) for letter in "bh")
        known = all(isinstance(size, int) for size in (batch, heads))
        return [(batch, heads // query.repeat)] if known and batch * heads <= _HEADS else []

    def _judged(self, reading: CalledReading, trial: int, count: int) -> float:
        generator = torch.Generator().manual_seed(1009 * count + 17)
        sizes = ", ".join(f"{letter}={size}" for letter, size in reading.sizes().items() if letter != "N")
        try:
            sample = reading.sample(generator, trial)
            return reading.judge(sample, reading.run(sample, {}, trial))
        except Mismatch as mismatch:
            raise Mismatch(f"{mismatch.args[0]} in sample {count + 1} ({sizes})", count) from None
        except Unfit:
            raise
        except Exception as error:
            what = f"{type(error).__name__}: {first_line(error)}"
            raise Mismatch(f"it fails in sample {count + 1} ({sizes}): {what}", count) from error


def _tensors(result: Any) -> list[torch.Tensor]:
    parts = [result] if isinstance(result, torch.Tensor) else list(result)
    return [part for part in parts if isinstance(part, torch.Tensor)]


def _close(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> bool:
    """Whether two results are the same but for the eps of a norm."""
    return all(float((a - b).abs().max()) <= 1e-3 * float(a.abs().max()) for a, b in zip(left, right, strict=True))
