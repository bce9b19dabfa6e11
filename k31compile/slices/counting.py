"""Numbers that a slice is given or holds: which count tokens, which are sizes, at which its behaviour may change."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from k31compile.graph.confirm import Mismatch
from k31compile.graph.sizes import hint, symbols_of
from k31compile.leaves.bytecode import Unfit
from k31compile.leaves.confirm import LONGEST
from k31compile.slices.call import Numbers, SliceCall
from k31compile.slices.called import real_shapes, small_ends
from k31compile.slices.form import Counted
from k31compile.slices.held import Place
from k31compile.slices.roles import Roles, count_of

_TOKENS = 7
_FEW = 64
_MOST_PRODUCTS = 2 << 30


@dataclass(frozen=True)
class Counting:
    """Which of the given numbers count tokens: those of `batch` times those of `length` are all of them.

    `only` is the one batch and length that can be tried, where the numbers cannot be told apart.
    """

    counted: Counted = field(default_factory=Counted)
    only: tuple[int, ...] = ()

    def lead(self, tokens: int) -> tuple[int, ...]:
        """Batch and length for so many tokens."""
        batch = max(d for d in range(1, math.isqrt(tokens) + 1) if tokens % d == 0)
        return self.only or (batch, tokens // batch)

    def numbers(self, tokens: int) -> Numbers:
        """The numbers that go with so many tokens."""
        batch, length = self.lead(tokens) if self.counted.batch else (1, tokens)
        named = ((self.counted.batch, batch), (self.counted.length, length))
        return {place: n for places, n in named for place in places}


@dataclass(frozen=True)
class Scale:
    """Whether experts are made small, and which numbers, taken for sizes of theirs, are made small with them."""

    small: bool
    sizes: Numbers = field(default_factory=dict)


def scales(call: SliceCall, roles: Roles) -> list[Scale]:
    """Ways to run: small experts with the numbers that look like their sizes, small ones alone, and the caller's."""
    smaller = _smaller_numbers(call, roles)
    return [*([Scale(True, smaller)] if smaller else []), Scale(True), Scale(False)]


def countings(call: SliceCall, roles: Roles) -> list[Counting]:
    """Ways to tell the numbers of tokens among the numbers that are given."""
    x = call.held.tensors[roles.rows.x]
    lead = tuple(hint(size) for size in x.shape[:-1])
    tokens = math.prod(lead)
    by_value: dict[int, list[Place]] = defaultdict(list)
    for place, value in call.numbers().items():
        by_value[value].append(place)
    ways = [Counting()]
    if tokens in by_value:
        ways.append(Counting(Counted(length=tuple(by_value[tokens]))))
    for batch, length in itertools.permutations(by_value, 2):
        if batch * length == tokens and 1 not in (batch, length):
            ways.append(Counting(Counted(tuple(by_value[batch]), tuple(by_value[length]))))
    if all(isinstance(size, int) for size in x.shape) and tokens <= LONGEST:
        ways.append(Counting(only=lead if len(lead) > 1 else (1, *lead)))
    return ways


def refuse_large_numbers(call: SliceCall, roles: Roles) -> None:
    """Raise Unfit for a number in the code, or in a module, that may be one of tokens and is never reached."""
    sizes, given = _sizes(call, roles), call.numbers()
    held = {v for place, v in call.held.constants.items() if type(v) is int and place not in given and v not in sizes}
    largest = max(map(abs, held | _written(call)), default=0)
    if largest > LONGEST:
        raise Unfit(f"it holds the number {largest}, and more than {LONGEST} tokens are not tried")


def tokens_to_try(call: SliceCall, roles: Roles, counting: Counting, scale: Scale) -> list[int]:
    """Enough tokens to meet every expert; then numbers on both sides of each at which behaviour may change.

    Raises:
        Mismatch: too many tokens would have to be tried.
    """
    if counting.only:
        return [math.prod(counting.only)]
    slots = hint(call.held.tensors[roles.rows.experts].shape[-1])
    many = max(_TOKENS, -(-count_of(call, roles.gate.places) // slots))
    boundaries = sorted(_boundaries(call, counting, scale))
    most = _most_tokens(call, roles, scale)
    if boundaries and boundaries[-1] > most:
        raise Mismatch(f"it holds the number {boundaries[-1]}, and so many tokens are not tried with such experts", 0)
    around = [n for number in boundaries for n in (number, number + 1, 2 * number + 3) if n > 0]
    return list(dict.fromkeys([many, 1, 2, 12, *around]))


def _boundaries(call: SliceCall, counting: Counting, scale: Scale) -> set[int]:
    """Whole numbers in the code, and among what it reads, that do not count tokens."""
    counted = {*counting.counted.batch, *counting.counted.length}
    held = call.held.constants.items()
    whole = {place: int(v) for place, v in held if type(v) is int or (type(v) is float and v > 1 and v == int(v))}
    read = {scale.sizes.get(place, value) for place, value in whole.items() if place not in counted}
    symbols = {value for place, value in call.numbers().items() if place not in {*counted, *whole}}
    return {abs(number) for number in read | symbols | _written(call)}


def _written(call: SliceCall) -> set[int]:
    return {number for source in call.sources.values() for number in source.integers}


def _most_tokens(call: SliceCall, roles: Roles, scale: Scale) -> int:
    """How many tokens can be run in a moment."""
    if scale.small:
        return LONGEST
    tensors = call.held.tensors
    one = 3 * math.prod(tensors[roles.down.places[0]].shape[-2:]) * hint(tensors[roles.rows.experts].shape[-1])
    return max(_FEW, min(LONGEST, _MOST_PRODUCTS // hint(one)))


def _sizes(call: SliceCall, roles: Roles) -> set[int]:
    """Numbers that are most likely sizes of the experts."""
    tensors = call.held.tensors
    _, shapes = real_shapes(roles, tensors)
    sizes = {size for shape in shapes.values() for size in shape}
    return sizes | {
        hint(tensors[roles.rows.experts].shape[-1]),
        count_of(call, roles.gate.places),
        *(n // 2 for n in sizes),
    }


def _smaller_numbers(call: SliceCall, roles: Roles) -> Numbers:
    """What goes with small experts instead of the numbers that are sizes of theirs, where they can be told apart."""
    tensors = call.held.tensors
    real, less = small_ends(roles, tensors)
    smaller = _told_apart([*zip(real, less, strict=True), (2 * real[1], 2 * less[1])])
    others = {count_of(call, roles.gate.places), hint(tensors[roles.rows.experts].shape[-1])}
    held = call.held.constants.items()
    found = {place: value for place, value in held if type(value) is int and value in smaller and value not in others}
    return {place: smaller[value] for place, value in found.items() if smaller[value] != value}


def _told_apart(pairs: Iterable[tuple[int, int]]) -> Mapping[int, int]:
    by_real: dict[int, set[int]] = defaultdict(set)
    for real, less in pairs:
        by_real[real].add(less)
    return {real: min(less) for real, less in by_real.items() if len(less) == 1}


def check_numbers(call: SliceCall, counted: Counted, x: torch.Tensor) -> None:
    """Hold the numbers of a call to what they were confirmed as.

    Raises:
        Unfit: one counts something else now, or may change with every call.
    """
    lead = tuple(x.shape[:-1])
    rows = math.prod(lead)
    values = call.held.constants
    for place, value in values.items():
        if not isinstance(value, torch.SymInt) or place in {*counted.batch, *counted.length}:
            continue
        if set(symbols_of([value])) & set(symbols_of(lead)):
            raise Unfit(f"{place[0]} changes with the number of tokens, and is not that number")
        int(value)  # Dynamo guards that it stays what it was confirmed with
    batches, lengths = [values[place] for place in counted.batch], [values[place] for place in counted.length]
    right = all(batch * length == rows for batch in batches or [1] for length in lengths or [rows])
    if len(lead) > 1 and batches:
        right = right and all(n == lead[0] for n in batches) and all(n == lead[1] for n in lengths)
    if not right:
        raise Unfit("a number that counted its tokens counts something else")
