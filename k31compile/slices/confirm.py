"""Confirm a slice by calling it: small experts, any number of tokens, in float64, against the operator's definition."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import torch
from torch._subclasses.fake_tensor import FakeTensor

from k31compile.graph.confirm import Mismatch, confirm_at, first_line, relative_error
from k31compile.graph.sizes import hint
from k31compile.leaves.bytecode import Unfit
from k31compile.leaves.call import alone
from k31compile.leaves.confirm import Denied
from k31compile.leaves.results import compare_rounding
from k31compile.slices.call import SliceCall
from k31compile.slices.called import CalledExperts, real_shapes
from k31compile.slices.counting import Counting, Scale, countings, refuse_large_numbers, scales, tokens_to_try
from k31compile.slices.form import Evidence, Form
from k31compile.slices.held import Place, text_of
from k31compile.slices.roles import Roles, count_of, has_rows, roles_of

_MOST_READINGS = 64
_CANNOT = "its tokens [.., L], experts and weights [.., k], with two or three matrices an expert, cannot be told apart"


class NoExperts(Unfit):
    """Nothing that a slice reads looks like routed experts: most loops are about something else."""


def confirm_slice(call: SliceCall) -> Form:
    """The form that a slice has, confirmed.

    Raises:
        Unfit: the slice, or something that it reads, cannot be replaced.
        Denied: it computes something else; the reason has numbers.
    """
    found = list(itertools.islice(roles_of(call), _MOST_READINGS))
    if not found:
        _refuse_repeated(call)
        raise NoExperts(_CANNOT)
    refuse_large_numbers(call, found[0])
    furthest = Denied(_CANNOT)
    with alone():
        for roles, scale, counting in itertools.product(found, scales(call, found[0]), countings(call, found[0])):
            try:
                return _hold(call, roles, counting, scale)
            except Mismatch as mismatch:
                trials = mismatch.args[1] if len(mismatch.args) > 1 else 0
                if trials > furthest.trials:
                    furthest = Denied(str(mismatch.args[0]), trials)
            except (IndexError, RuntimeError) as error:
                furthest = max(furthest, Denied(f"it cannot be run on samples: {first_line(error)}", 0), key=_trials)
    raise furthest


def _refuse_repeated(call: SliceCall) -> None:
    """Raise Unfit where a list of what may be experts holds one module in two places."""
    for place, first in call.held.repeated.items():
        if isinstance(place[-1], int) and isinstance(first[-1], int) and has_rows(call):
            raise Unfit(f"{text_of(place)} and {text_of(first)} are one module, and each expert needs one of its own")


def _trials(denied: Denied) -> int:
    return denied.trials


def _hold(call: SliceCall, roles: Roles, counting: Counting, scale: Scale) -> Form:
    """The form with its evidence, or Mismatch at the first sample that contradicts it."""
    first, *others = tokens_to_try(call, roles, counting, scale)

    def reading(tokens: int, trials: int) -> CalledExperts:
        lead, numbers = counting.lead(tokens), {**scale.sizes, **counting.numbers(tokens)}
        return CalledExperts(call, roles, lead, numbers, small=scale.small, trials=trials)

    main = reading(first, 4)
    seen = confirm_at(main, {})
    assert main.learned is not None
    samples, worst = seen.samples, seen.worst_error
    for tokens in others:
        try:
            seen = confirm_at(reading(tokens, 2).knowing(main.learned), {})
        except Mismatch as mismatch:
            raise Mismatch(f"{mismatch.args[0]} (of {tokens} tokens)", samples) from None
        samples, worst = samples + seen.samples, max(worst, seen.worst_error)
    form = Form(
        *(roles.rows.x, roles.rows.experts, roles.rows.weights, roles.rows.spread),
        *roles.projections,
        main.learned,
        *_result_of(call, main),
        counting.counted,
        counting.only or None,
        Evidence(samples, tuple(sorted({first, *others})), worst),
    )
    _check_rounding(form, main)
    _check_nan(form, main)
    if scale.small:
        _check_at_real_sizes(form, call, counting, roles)
    return form


def _result_of(call: SliceCall, reading: CalledExperts) -> tuple[Place, torch.dtype]:
    """The operand that lends its leading sizes to the result, and the type of it."""
    values = reading.in_own_types(0)
    result = call.run(values, reading.numbers)
    reading.as_rows(result)
    for place in (reading.roles.rows.x, reading.roles.rows.experts):
        if result.shape[:-1] == values[place].shape[:-1]:
            return place, result.dtype
    raise Mismatch(f"it gives {list(result.shape)} for {reading.tokens} tokens")


def _check_rounding(form: Form, reading: CalledExperts) -> None:
    """Hold slice and operator, both in the types of the call, against float64."""
    for trial in (0, 1):
        values = reading.in_own_types(trial)
        raised = {place: v.double() if v.is_floating_point() else v for place, v in values.items()}
        truth = reading.call.run_in_float64(raised, reading.numbers)
        theirs = reading.call.run(values, reading.numbers)
        ours = form.program([values[place] for place in form.places])
        try:
            compare_rounding(truth, theirs, ours)
        except Mismatch as mismatch:
            raise Mismatch(f"{mismatch.args[0]}{_told_of_types(form, values)}", *mismatch.args[1:]) from None


def _told_of_types(form: Form, values: Mapping[Place, torch.Tensor]) -> str:
    """What to do where experts of a narrow type leave the slice in a wider one."""
    narrow = values[form.x].dtype
    if torch.finfo(form.dtype).eps >= torch.finfo(narrow).eps:
        return ""
    return f"; its tokens are {narrow}: cast the sum to that right after the loop, y = y.to(x.dtype)"


def _check_nan(form: Form, reading: CalledExperts) -> None:
    """One token of NaN: its row is NaN, and no other."""
    values = reading.in_own_types(1)
    values[form.x].view(-1, values[form.x].shape[-1])[0] = torch.nan
    theirs = reading.as_rows(reading.call.run(values, reading.numbers))
    ours = reading.as_rows(form.program([values[place] for place in form.places]))
    if not torch.equal(theirs.isnan().any(dim=-1), ours.isnan().any(dim=-1)):
        raise Mismatch("a token that is no number changes other rows than its own, or is mended")


def _check_at_real_sizes(form: Form, call: SliceCall, counting: Counting, roles: Roles) -> None:
    """Run two tokens through the caller's own experts: what was tried on small ones alone may know its sizes."""
    tensors = call.held.tensors
    _, shapes = real_shapes(roles, tensors)
    if any(isinstance(tensors[place], FakeTensor) or tensors[place].is_meta for place in shapes):
        return
    tokens = math.prod(counting.only) if counting.only else 2
    lead = counting.lead(tokens)
    generator = torch.Generator().manual_seed(29)
    values = {place: tensors[place].detach() for place in shapes}
    order = torch.randperm(count_of(call, roles.gate.places), generator=generator)
    for place in (form.x, form.experts, form.weights):
        flat = lead if tensors[place].dim() > 2 else (tokens,)
        shape = (*flat, hint(tensors[place].shape[-1]))
        drawn = torch.randn(shape, generator=generator)
        if place == form.experts:
            drawn = order[torch.arange(drawn.numel()) % len(order)].reshape(shape)
        values[place] = drawn.to(tensors[place].dtype)
    theirs = call.run(values, counting.numbers(tokens))
    ours = form.program([values[place] for place in form.places])
    if theirs.shape != ours.shape:
        raise Mismatch(f"for the experts of the call it gives {list(theirs.shape)}, the operator {list(ours.shape)}")
    far = relative_error(ours.double().reshape(tokens, -1), theirs.double().reshape(tokens, -1))
    if not far <= 64 * torch.finfo(theirs.dtype).eps + 1e-5:
        raise Mismatch(f"with the experts of the call it differs from the operator by {far:.1e} of its size")
