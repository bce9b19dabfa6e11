"""Confirm by running: a region against an operator's definition, on the operator's own samples, in float64.

Agreement on samples is strong evidence and no derivation; every text says "confirmed on N samples". What agreed once
is remembered by the region's canonical hash, so that equal layers cost one confirmation.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch
from torch import fx

from k31compile.errors import OperatorError
from k31compile.graph.evaluate import run_in_float64
from k31compile.graph.region import Region
from k31compile.graph.sizes import Substitution, shape_under, value_of

SAMPLES = 4
MOST_SAMPLES = 16
TOLERANCE = 1e-9

# What the tensors of one run may take, unless an option says otherwise; a larger region is refused with the reason.
BYTE_BUDGET = 4 << 30
_BUDGET: ContextVar[int] = ContextVar("confirm_bytes", default=BYTE_BUDGET)
# A contradiction at shrunk sizes is looked at again at the real ones only where that is cheap.
SECOND_TRY_BYTES = 256 << 20

Sample = Mapping[fx.Node, torch.Tensor]


class Mismatch(Exception):
    """A reading of a region that its run contradicts; the text is a reason for a user."""


class OverBudget(Mismatch):
    """A region that was not run because it would take too much memory: no word about what it computes."""


@contextmanager
def byte_budget(count: int) -> Iterator[None]:
    """Let one run of a region take `count` bytes, in float64, inside the block."""
    token = _BUDGET.set(count)
    try:
        yield
    finally:
        _BUDGET.reset(token)


def allowed_bytes() -> int:
    """What one run of a region may take, in bytes."""
    return _BUDGET.get()


@dataclass(frozen=True)
class Confirmation:
    """What was shown, and how: the words of a report are made from this."""

    name: str
    samples: int
    sizes: Mapping[str, int]
    tolerance: float
    worst_error: float

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "name": self.name,
            "samples": self.samples,
            "sizes": dict(self.sizes),
            "tolerance": self.tolerance,
            "worst_error": self.worst_error,
            "text": f"confirmed on {self.samples} samples in float64",
        }


class Reading(ABC):
    """One way to read a region's leaves as the operands of an operator.

    A reading may learn from the runs (a scale, which keys are visible) and then builds the replacement. What it
    learned is its `learned` attribute, which is remembered with the region's hash. `extra_operands` are sizes of the
    graph that `build` takes after the leaves. `context` is what a confirmation assumed of the graph around the
    region; what is remembered serves only under the same assumptions.
    """

    name: str
    region: Region
    learned: Any = None
    extra_operands: tuple[fx.Node, ...] = ()
    context: str = ""

    @property
    def replaced(self) -> tuple[fx.Node, ...]:
        """The outputs that `build` gives anew: the last one, unless a reading says otherwise."""
        return self.region.outputs[-1:]

    @abstractmethod
    def substitutions(self) -> Sequence[Substitution]:
        """Sizes to confirm at, chosen so that a wrong region shows: shrunk ones first, then as they are."""

    @abstractmethod
    def begin(self, substitution: Substitution) -> None:
        """Take these sizes and forget what earlier samples taught."""

    def samples(self) -> int:
        """How many samples a confirmation takes: more where each has few rows, so that rare positions are met."""
        sizes = self.sizes()
        return max(SAMPLES, min(MOST_SAMPLES, 128 // (sizes["B"] * sizes["T"])))

    @abstractmethod
    def sizes(self) -> Mapping[str, int]:
        """The sizes of the operator's letters in a confirmation, for the report."""

    @abstractmethod
    def sample(self, generator: torch.Generator, trial: int) -> Sample:
        """Leaf values from the operator's domain: magnitudes over decades, boundary indices forced."""

    def run(self, sample: Sample, substitution: Substitution, trial: int) -> Sequence[torch.Tensor]:
        """The region's outputs on a sample, in float64."""
        return run_in_float64(self.region, sample, substitution)

    @abstractmethod
    def judge(self, sample: Sample, outputs: Sequence[torch.Tensor]) -> float:
        """The relative error of the region's outputs against the definition.

        Raises:
            Mismatch: the region computes something else; the text says what.
        """

    @abstractmethod
    def build(self, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The replacement as a program over the leaf values; it is traced into the graph as it stands."""


@dataclass
class Memory:
    """What was confirmed and what was contradicted, by the hash of region and recogniser."""

    confirmed: dict[str, tuple[int, Any, Confirmation]] = field(default_factory=dict)
    contradicted: dict[str, str] = field(default_factory=dict)


MEMORY = Memory()


def confirm(readings: Iterable[Reading], key: str, memory: Memory = MEMORY) -> tuple[Reading, Confirmation]:
    """The first reading that agrees with the region on every sample.

    Raises:
        Mismatch: no reading agrees; the text is that of the reading that got furthest.
    """
    if key in memory.contradicted:
        raise Mismatch(memory.contradicted[key])
    furthest: tuple[int, Mismatch] | None = None
    for ordinal, reading in enumerate(readings):
        if key in memory.confirmed:
            known_ordinal, learned, confirmation = memory.confirmed[key]
            if ordinal != known_ordinal:
                continue
            reading.learned = reading_learned(reading, learned)
            return reading, confirmation
        try:
            confirmation = _confirm_one(reading)
        except Mismatch as mismatch:
            trials = mismatch.args[1] if len(mismatch.args) > 1 else 0
            if furthest is None or trials > furthest[0]:
                furthest = (trials, mismatch)
            continue
        memory.confirmed[key] = (ordinal, portable_learned(reading), confirmation)
        return reading, confirmation
    last = furthest[1] if furthest else Mismatch("its inputs cannot be told apart by shape")
    reason = str(last.args[0])
    if not isinstance(last, OverBudget):
        memory.contradicted[key] = reason
    raise Mismatch(reason)


def _confirm_one(reading: Reading) -> Confirmation:
    """Confirm at the first sizes that fit the budget, or at larger ones where the smaller cannot be run."""
    substitutions = reading.substitutions()
    failure: Mismatch | None = None
    for i, substitution in enumerate(substitutions):
        needed = bytes_of_run(reading.region, substitution)
        if failure is not None and needed > SECOND_TRY_BYTES:
            raise failure
        if needed > allowed_bytes():
            raise OverBudget(
                f"confirming it would take {in_gib(needed)}, more than the {in_gib(allowed_bytes())} that option "
                f"confirm_bytes allows (trace it with shorter or dynamic lengths, or allow confirm_bytes={needed})"
            )
        try:
            return confirm_at(reading, substitution)
        except Mismatch as mismatch:
            failure = mismatch
            if i + 1 == len(substitutions):
                raise
    raise AssertionError("a reading has at least one substitution")


def confirm_at(reading: Reading, substitution: Substitution) -> Confirmation:
    """Confirm at these sizes.

    Raises:
        Mismatch: a sample contradicts the reading; the second argument is its number.
    """
    reading.begin(substitution)
    worst = 0.0
    samples = reading.samples()
    for trial in range(samples):
        generator = torch.Generator().manual_seed(1009 * trial + 17)
        try:
            sample = reading.sample(generator, trial)
            outputs = reading.run(sample, substitution, trial)
            worst = max(worst, reading.judge(sample, outputs))
        except Mismatch as mismatch:
            raise Mismatch(str(mismatch.args[0]), trial) from None
        except (RuntimeError, IndexError, TypeError, ValueError, NotImplementedError, OperatorError) as error:
            what = f"{type(error).__name__}: {first_line(error)}"
            raise Mismatch(f"it cannot be run on samples: {what}", trial) from error
    return Confirmation(reading.name, samples, reading.sizes(), TOLERANCE, worst)


def bytes_of_run(region: Region, substitution: Substitution) -> int:
    """The bytes of the largest three values of a run in float64: what is alive at its widest point, roughly."""
    sizes = []
    for node in region.nodes:
        if isinstance(value_of(node), torch.Tensor):
            count = 8
            for size in shape_under(node, substitution):
                count *= size
            sizes.append(count)
    return sum(sorted(sizes)[-3:])


def in_gib(count: int) -> str:
    """A number of bytes for a reader."""
    return f"{count / 2**30:.3g} GiB"


def first_line(error: BaseException) -> str:
    """The first line of an error's text."""
    return next(iter(str(error).splitlines()), "")


def portable_learned(reading: Reading) -> Any:
    """What a reading learned, with leaves as numbers so that it serves an equal region elsewhere."""
    index = {leaf: i for i, leaf in enumerate(reading.region.leaves)}
    return _translate(reading.learned, lambda n: ("leaf", index[n]) if isinstance(n, fx.Node) else n)


def reading_learned(reading: Reading, learned: Any) -> Any:
    """The inverse of `portable_learned` for this reading's region."""
    leaves = reading.region.leaves

    def node(value: Any) -> Any:
        is_leaf = isinstance(value, tuple) and len(value) == 2 and value[0] == "leaf"
        return leaves[value[1]] if is_leaf else value

    return _translate(learned, node)


def _translate(value: Any, change: Callable[[Any], Any]) -> Any:
    changed = change(value)
    if changed is not value:
        return changed
    if isinstance(value, dict):
        return {k: _translate(v, change) for k, v in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        parts = {part.name: getattr(value, part.name) for part in fields(value)}
        moved = {name: _translate(part, change) for name, part in parts.items()}
        return replace(value, **moved) if any(moved[n] is not parts[n] for n in parts) else value
    return value


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, relative to the largest expected value of its last-dimension row."""
    scale = expected.abs().amax(dim=-1, keepdim=True).clamp_min(1e-300)
    return float(((got - expected).abs() / scale).max()) if got.numel() else 0.0
