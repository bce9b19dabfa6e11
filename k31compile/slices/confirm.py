"""Confirm a slice by calling it: small experts, any number of tokens, in float64, against the operator's definition."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensor

from k31compile.graph.confirm import Mismatch, confirm_at, relative_error
from k31compile.graph.sizes import hint
from k31compile.leaves.bytecode import Unfit
from k31compile.leaves.call import alone
from k31compile.leaves.confirm import LONGEST, Denied
from k31compile.leaves.results import compare_rounding
from k31compile.slices.call import Numbers, SliceCall
from k31compile.slices.called import CalledExperts, real_shapes
from k31compile.slices.form import Evidence, Form
from k31compile.slices.held import Place
from k31compile.slices.roles import Roles, roles_of

_TOKENS = 7
_MOST_READINGS = 64
_CANNOT = "its tokens [.., L], experts and weights [.., k], with two or three matrices an expert, cannot be told apart"


class NoExperts(Unfit):
    """Nothing that a slice reads looks like routed experts: most loops are about something else."""


@dataclass(frozen=True)
class Counting:
    """Which of the given numbers count tokens: those of `batch` times those of `length` are all of them.

    `only` is the one batch and length that can be tried, where the numbers cannot be told apart.
    """

    batch: tuple[Place, ...] = ()
    length: tuple[Place, ...] = ()
    only: tuple[int, ...] = ()

    def lead(self, tokens: int) -> tuple[int, ...]:
        """Batch and length for so many tokens."""
        batch = max(d for d in range(1, math.isqrt(tokens) + 1) if tokens % d == 0)
        return self.only or (batch, tokens // batch)

    def numbers(self, tokens: int) -> Numbers:
        """The numbers that go with so many tokens."""
        batch, length = self.lead(tokens) if self.batch else (1, tokens)
        return {place: n for places, n in ((self.batch, batch), (self.length, length)) for place in places}


def confirm_slice(call: SliceCall) -> Form:
    """The form that a slice has, confirmed.

    Raises:
        Unfit: the slice, or something that it reads, cannot be replaced.
        Denied: it computes something else; the reason has numbers.
    """
    found = list(itertools.islice(roles_of(call), _MOST_READINGS))
    if not found:
        raise NoExperts(_CANNOT)
    largest = max(_boundaries(call, found[0]), default=0)
    if largest > LONGEST:
        raise Unfit(f"it holds the number {largest}, and more than {LONGEST} tokens are not tried")
    furthest = Denied(_CANNOT)
    with alone():
        for roles, small, counting in itertools.product(found, (True, False), _countings(call, found[0])):
            try:
                return _hold(call, roles, counting, small=small)
            except Mismatch as mismatch:
                trials = mismatch.args[1] if len(mismatch.args) > 1 else 0
                if trials >= furthest.trials:
                    furthest = Denied(str(mismatch.args[0]), trials)
    raise furthest


def _hold(call: SliceCall, roles: Roles, counting: Counting, *, small: bool) -> Form:
    """The form with its evidence, or Mismatch at the first sample that contradicts it."""
    first, *others = _tokens_to_try(call, roles, counting)

    def reading(tokens: int, trials: int) -> CalledExperts:
        lead, numbers = counting.lead(tokens), counting.numbers(tokens)
        return CalledExperts(call, roles, lead, numbers, small=small, trials=trials)

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
        *(roles.rows.x, roles.rows.experts, roles.rows.weights),
        *roles.projections,
        main.learned,
        *_result_of(call, main),
        first if counting.only else None,
        Evidence(samples, tuple(sorted({first, *others})), worst),
    )
    _check_rounding(form, main)
    if small:
        _check_at_real_sizes(form, call, counting, roles)
    return form


def _countings(call: SliceCall, roles: Roles) -> list[Counting]:
    """Ways to tell the numbers of tokens among the numbers that are given."""
    x = call.held.tensors[roles.rows.x]
    lead = tuple(hint(size) for size in x.shape[:-1])
    tokens = math.prod(lead)
    by_value: dict[int, list[Place]] = defaultdict(list)
    for place, value in call.numbers().items():
        by_value[value].append(place)
    ways = [Counting()]
    if tokens in by_value:
        ways.append(Counting(length=tuple(by_value[tokens])))
    for batch, length in itertools.permutations(by_value, 2):
        if batch * length == tokens and 1 not in (batch, length):
            ways.append(Counting(tuple(by_value[batch]), tuple(by_value[length])))
    if all(isinstance(size, int) for size in x.shape) and tokens <= LONGEST:
        ways.append(Counting(only=lead if len(lead) > 1 else (1, *lead)))
    return ways


def _tokens_to_try(call: SliceCall, roles: Roles, counting: Counting) -> list[int]:
    """Enough tokens to meet every expert; then numbers on both sides of each at which behaviour may change."""
    if counting.only:
        return [math.prod(counting.only)]
    slots = hint(call.held.tensors[roles.rows.experts].shape[-1])
    many = max(_TOKENS, -(-_count(call, roles) // slots))
    around = [n for number in _boundaries(call, roles) for n in (number, number + 1, 2 * number + 3) if n > 0]
    return list(dict.fromkeys([many, 1, 2, 12, *around]))


def _boundaries(call: SliceCall, roles: Roles) -> list[int]:
    """Whole numbers in the code, and among what it reads those that are no size of the experts."""
    tensors = call.held.tensors
    _, shapes = real_shapes(roles, tensors)
    sizes = {size for shape in shapes.values() for size in shape}
    sizes |= {hint(tensors[roles.rows.experts].shape[-1]), _count(call, roles), *(size // 2 for size in sizes)}
    given = call.numbers()
    read = [value for place, value in call.held.constants.items() if type(value) is int and place not in given]
    found = {number for source in call.sources.values() for number in source.integers}
    return sorted(abs(number) for number in found | {number for number in read if number not in sizes})


def _count(call: SliceCall, roles: Roles) -> int:
    places = roles.gate.places
    return len(places) if len(places) > 1 else hint(call.held.tensors[places[0]].shape[0])


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
        compare_rounding(truth, theirs, ours)


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
    order = torch.randperm(_count(call, roles), generator=generator)
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
