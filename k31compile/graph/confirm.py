"""Confirm by running: a region against an operator's definition, on the operator's own samples, in float64.

Agreement on samples is strong evidence and no derivation; every text says "confirmed on N samples". What agreed once
is remembered (memory.py), so that equal layers cost one confirmation and the next process none.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import fx

from k31compile.errors import OperatorError
from k31compile.graph.describe import Describer
from k31compile.graph.evaluate import run_in_float64
from k31compile.graph.memory import Verdict, place_of, session
from k31compile.graph.portable import NotPortable, from_plain, to_plain
from k31compile.graph.region import Region
from k31compile.graph.sizes import Substitution, shape_under, value_of
from k31compile.report import as_remembered

log = logging.getLogger("k31compile")

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


class OfTheMoment(Mismatch):
    """A region that could not be run here and now, for want of memory for one: no word about what it computes."""


class OverBudget(OfTheMoment):
    """A region that was not run because it would take more memory than it may."""


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
    """What was shown, and how: the words of a report are made from this. `remembered`: it was known before."""

    name: str
    samples: int
    sizes: Mapping[str, int]
    tolerance: float
    worst_error: float
    remembered: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        found = {
            "name": self.name,
            "samples": self.samples,
            "sizes": dict(self.sizes),
            "tolerance": self.tolerance,
            "worst_error": self.worst_error,
            "remembered": False,
            "text": f"confirmed on {self.samples} samples in float64",
        }
        return as_remembered(found) if self.remembered else found


class Reading(ABC):
    """One way to read a region's leaves as the operands of an operator.

    A reading may learn from the runs (a scale, which keys are visible) and then builds the replacement. What it
    learned is its `learned` attribute, which is remembered; classes in it say `@portable`. `extra_operands` are sizes
    of the graph that `build` takes after the leaves.

    A verdict is remembered for all that the reading holds when it is made, but for the attributes that
    `decides_nothing` names. So what decides its runs, beside the region, must be an attribute by then, and its runs
    must not look at the graph around the region.
    """

    name: str
    region: Region
    learned: Any = None
    extra_operands: tuple[fx.Node, ...] = ()
    decides_nothing: ClassVar[frozenset[str]] = frozenset({"region"})

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


@dataclass(frozen=True)
class Confirmed:
    """The reading that agreed; equal `key`s have equal regions, readings and learned values."""

    reading: Reading
    confirmation: Confirmation
    key: str


def confirm(readings: Iterable[Reading]) -> Confirmed:
    """The first reading that agrees with the region on every sample, or is remembered to have agreed.

    Raises:
        Mismatch: no reading agrees; the text is that of the reading that got furthest.
    """
    asking = session()
    furthest = Verdict(reason="its inputs cannot be told apart by shape", trials=-1)
    describer: Describer | None = None
    for reading in readings:
        if describer is None or describer.region_described is not reading.region:
            describer = Describer(reading.region)
        place = place_of(describer.region, describer.reading(reading, reading.decides_nothing))
        verdict = asking.find(place)
        if verdict is None or not _takes_learned(reading, verdict):
            is_from_before, verdict = False, _judged(reading)
            asking.keep(place, verdict)
        else:
            is_from_before = asking.is_from_before(place)
        if verdict.evidence is not None:
            confirmation = Confirmation(**verdict.evidence, remembered=is_from_before)
            return Confirmed(reading, confirmation, f"{place.region}:{place.reading}")
        if verdict.trials > furthest.trials:
            furthest = verdict
    raise Mismatch(furthest.reason)


def _takes_learned(reading: Reading, verdict: Verdict) -> bool:
    """Whether what is remembered of a reading is understood here, which is then what the reading has learned."""
    try:
        if verdict.evidence is not None:
            reading.learned = from_plain(verdict.learned, reading.region.leaves)
    except (NotPortable, TypeError) as error:
        log.warning("what is remembered of a %s is not used, it is confirmed anew: %s", reading.name, error)
        return False
    return True


def _judged(reading: Reading) -> Verdict:
    """What comes of a reading when it is run."""
    try:
        seen = _confirm_one(reading)
    except Mismatch as mismatch:
        trials = mismatch.args[1] if len(mismatch.args) > 1 else 0
        return Verdict(reason=str(mismatch.args[0]), trials=trials, lasts=not isinstance(mismatch, OfTheMoment))
    evidence = {part.name: getattr(seen, part.name) for part in fields(seen) if part.name != "remembered"}
    evidence["sizes"] = dict(seen.sizes)
    try:
        return Verdict(evidence, to_plain(reading.learned, reading.region.leaves))
    except NotPortable:
        return Verdict(evidence, lasts=False)


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
            raise type(mismatch)(str(mismatch.args[0]), trial) from None
        except (RuntimeError, IndexError, TypeError, ValueError, NotImplementedError, OperatorError) as error:
            what = f"it cannot be run on samples: {type(error).__name__}: {first_line(error)}"
            raise (OfTheMoment if _is_of_the_machine(error) else Mismatch)(what, trial) from error
    return Confirmation(reading.name, samples, reading.sizes(), TOLERANCE, worst)


def _is_of_the_machine(error: Exception) -> bool:
    """Whether an error tells of a machine that is out of something, and nothing of the region."""
    said = str(error).lower()
    return isinstance(error, RuntimeError) and any(word in said for word in ("memory", "allocate", "thread"))


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


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, relative to the largest expected value of its last-dimension row."""
    scale = expected.abs().amax(dim=-1, keepdim=True).clamp_min(1e-300)
    return float(((got - expected).abs() / scale).max()) if got.numel() else 0.0
