"""What a call returns, in its own types: which tensor is the output, which the state, and how both are rounded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from k31compile.graph.confirm import Mismatch
from k31compile.leaves.bytecode import Unfit
from k31compile.leaves.call import Call, run_in_float64, run_watched
from k31compile.leaves.form import Form, Result, unpacked
from k31compile.leaves.reading import CalledReading, by_name
from k31compile.passes.recognise.delta_reading import plain_layouts

_TOKENS = 5
_LATE = 1 << 20  # a contradiction here came later than any of a sample


def with_results(form: Form, reading: CalledReading, call: Call) -> Iterator[Form]:
    """The form with each way to read what the function returns; it is called in its own types, at the reading's sizes.

    Raises:
        Unfit: it returns something else than tensors, or it is not a function of its arguments alone.
    """
    values = _in_own_types(reading, call, trial=0)
    result = run_watched(values, lambda: call.run(values))
    returned = [result] if isinstance(result, torch.Tensor) else result
    if type(returned) not in (tuple, list) or not all(r is None or isinstance(r, torch.Tensor) for r in returned):
        raise Unfit(f"it returns a {type(result).__name__}, not tensors or a tuple of them")
    container = "tensor" if isinstance(result, torch.Tensor) else type(returned).__name__
    states = list(_read(returned, "bhkv", reading))
    count = sum(part is not None for part in returned)
    for out in _read(returned, "bthv", reading):
        others = [state for state in states if state.index != out.index]
        for final in [None] if count == 1 else others:
            yield replace(form, out=out, final=final, container=container, width=len(returned))


def _read(returned: Sequence[Any], letters: str, reading: CalledReading) -> Iterator[Result]:
    """Each returned tensor that has the letters' sizes in some order."""
    known = reading.letters(letters)
    for index, part in enumerate(returned):
        if part is None:
            continue
        for layout in plain_layouts(tuple(part.shape), letters, known):
            order = tuple(sorted(range(part.dim()), key=[-stride for stride in part.stride()].__getitem__))
            dtype = str(part.dtype).removeprefix("torch.")
            yield Result(index, part.dim(), letters, layout.dims, dtype, order)


def _in_own_types(reading: CalledReading, call: Call, trial: int) -> dict[str, torch.Tensor]:
    sample = by_name(reading.sample(torch.Generator().manual_seed(17), trial))
    return {name: value.to(call.tensors[name].dtype) for name, value in sample.items()}


def check_rounding(form: Form, call: Call) -> None:
    """Hold function and operator, both in the types of the call, against float64.

    A confirmation in float64 does not see what a function does only for narrower types.

    Raises:
        Mismatch: the function is further from float64 than rounding explains, or the operator much further than the
            function, or the two return other types or shapes.
    """
    heads = 3 * max(operand.repeat for operand in form.operands.values())
    reading = CalledReading(form, call).at(2, form.only or max(form.step, _TOKENS), heads)
    for trial in (0, 1):
        values = _in_own_types(reading, call, trial)
        exact = run_in_float64(call, {name: value.double() for name, value in values.items()})
        theirs, ours = call.run(values), reading.program(values)
        for truth, their, our in zip(*(unpacked(form, result) for result in (exact, theirs, ours)), strict=True):
            compare_rounding(truth, their, our)


def compare_rounding(truth: torch.Tensor, their: torch.Tensor, our: torch.Tensor) -> None:
    """Hold an author's result and ours against float64.

    Raises:
        Mismatch: theirs is further away than rounding explains, or ours much further, or types or shapes differ.
    """
    if (their.dtype, their.shape) != (our.dtype, our.shape):
        returned = f"it returns {their.dtype} {list(their.shape)}, the operator {our.dtype} {list(our.shape)}"
        raise Mismatch(returned, _LATE)
    unit, size = torch.finfo(our.dtype).eps, truth.abs().max().clamp_min(1e-30)
    our_error, their_error = (float((x.double() - truth).abs().max() / size) for x in (our, their))
    if not their_error <= (16 * unit if unit > 1e-4 else 1e-4):
        raise Mismatch(f"in {their.dtype} it differs from itself in float64 by {their_error:.1e} of its size", _LATE)
    if not our_error <= 4 * their_error + 8 * unit:
        reason = f"in {our.dtype} the operator is {our_error:.1e} away from float64, the function {their_error:.1e}"
        raise Mismatch(reason, _LATE)
