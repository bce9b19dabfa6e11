"""One assignment of leaves to the operands of a gated RMS norm: algebra in float64, then the author's roundings."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import fx

from k31compile.graph.confirm import TOLERANCE, Mismatch, Reading
from k31compile.graph.evaluate import coarsest_unit, run_as_written
from k31compile.graph.region import Region
from k31compile.graph.sizes import Substitution, shape_of, shape_under, symbols_of, value_of
from k31compile.passes.recognise.operands import Values, spread

_SAMPLES = 5
_LARGE = 1 << 18
_SMALL_ROWS = 5
# Enough rounded values for a share of them to mean something, from as few runs as may be.
_ROUNDED_VALUES, _MOST_RUNS = 4096, 64
SHARE = 0.99
_FLOAT32_ERROR = 2e-6


@dataclass(frozen=True)
class NormOperands:
    """The leaves, and which of the operator's variants they are read for."""

    x: fx.Node
    gate: fx.Node
    weight: fx.Node
    width: int
    eps: float
    activation: str
    norm_before_gate: bool

    def rows(self, value: torch.Tensor) -> torch.Tensor:
        """[..., D] of a value whose last axis is one row or several."""
        return value if value.shape[-1] == self.width else value.unflatten(-1, (-1, self.width))

    def weights(self, value: torch.Tensor) -> torch.Tensor:
        """[D] or [G, D]."""
        wide = [size for size in shape_of(self.weight) if size != 1]
        shape = wide if wide[-1] == self.width else [wide[0] // self.width, self.width]
        return value if len(shape) == value.dim() == len(wide) and shape == wide else value.reshape(shape)


class NormReading(Reading):
    """Leaves read as x, gate and weight; what is learned is where the author rounds."""

    def __init__(self, region: Region, operands: NormOperands) -> None:
        """One assignment, not yet confirmed."""
        self.name, self.region, self.operands = "gated_rms_norm", region, operands
        self.learned: str | None = None

    def substitutions(self) -> list[Substitution]:
        """Symbols made small and odd; a large number of rows made small first, where it means nothing else."""
        shapes = [value_of(leaf).shape for leaf in self.region.leaves]
        symbols = {symbol: 3 + 2 * i for i, symbol in enumerate(symbols_of(s for shape in shapes for s in shape))}
        fewer = _fewer_rows(shape_under(self.operands.x, symbols), self.operands.width)
        return [{**fewer, **symbols}, symbols] if fewer else [symbols]

    def begin(self, substitution: Substitution) -> None:
        """Take these sizes and forget the roundings."""
        self._substitution, self._trial = substitution, 0
        self.learned = None

    def samples(self) -> int:
        """Five: magnitudes differ from row to row in each."""
        return _SAMPLES

    def sizes(self) -> Mapping[str, int]:
        """Rows and their width."""
        wide = prod(shape_under(self.operands.x, self._substitution))
        return {"rows": wide // self.operands.width, "D": self.operands.width}

    def sample(self, generator: torch.Generator, trial: int) -> dict[fx.Node, torch.Tensor]:
        """Rows over ten decades, so that eps is nothing in some and everything in others, one of zeros; open gates
        and closed ones; weights of both signs."""
        self._trial = trial
        x, gate, weight = self._shapes()
        rows = spread(x, generator, 5.0, len(x) - 1)
        if trial == 1:
            rows.view(-1, self.operands.width)[0] = 0
        return {
            self.operands.x: rows,
            self.operands.gate: spread(gate, generator, 1.5, len(gate)),
            self.operands.weight: spread(weight, generator, 1.0, len(weight)),
        }

    def _shapes(self) -> list[tuple[int, ...]]:
        operands = self.operands
        return [shape_under(leaf, self._substitution) for leaf in (operands.x, operands.gate, operands.weight)]

    def judge(self, sample: Values, outputs: Sequence[torch.Tensor]) -> float:
        """The error of each number by itself: nothing cancels in a product. The last sample is followed by roundings.

        Raises:
            Mismatch: it is another norm or gate, or one that rounds elsewhere.
        """
        expected = self._call(sample, "before", torch.float64)
        if expected.numel() != outputs[0].numel():
            raise Mismatch("its result does not have the size of x")
        got = outputs[0].reshape(expected.shape)
        error = float(((got - expected).abs() / expected.abs().clamp_min(1e-200)).nan_to_num(torch.inf).max())
        if not error < TOLERANCE:
            raise Mismatch(f"its output differs from a gated RMS norm by {error:.1e} of its size")
        if self._trial == _SAMPLES - 1:
            self.learned = self._rounding()
        return error

    def _call(self, values: Values, weight_cast: str, dtype: torch.dtype) -> torch.Tensor:
        operands = self.operands
        x, gate = operands.rows(values[operands.x]), operands.rows(values[operands.gate])
        result: torch.Tensor = torch.ops.k31.gated_rms_norm(
            x,
            gate,
            operands.weights(values[operands.weight]),
            eps=operands.eps,
            activation=operands.activation,
            norm_before_gate=operands.norm_before_gate,
            weight_cast=weight_cast,
            dtype=None if dtype == x.dtype else dtype,
        )
        return result

    def _rounding(self) -> str:
        """The variant that gives the author's own bits, in the author's own dtypes.

        Raises:
            Mismatch: no variant does.
        """
        casts = ("before", "after", "between") if self.operands.norm_before_gate else ("before", "after")
        drawn = list(self._rounded_runs())
        shares = {cast: _mean([self._share_of_equal(cast, values, got) for values, got in drawn]) for cast in casts}
        best = max(casts, key=lambda cast: shares[cast])
        if shares[best] < SHARE:
            raise Mismatch(
                f"it rounds elsewhere than the operator does: at best {shares[best]:.0%} of its results are equal "
                "(norm and gate in float32 with one cast at the end are recognised)"
            )
        return best

    def _rounded_runs(self) -> Iterator[tuple[Values, torch.Tensor]]:
        """Runs of the region as it is written, joined until there are enough values; each with its leaf values."""
        generator = torch.Generator().manual_seed(29)
        count = prod(self._shapes()[0])
        for _ in range(min(_MOST_RUNS, -(-_ROUNDED_VALUES // count))):
            x, gate, weight = self._shapes()
            values = {
                self.operands.x: spread(x, generator, 1.0, len(x) - 1),
                self.operands.gate: 2 * torch.randn(gate, generator=generator, dtype=torch.float64),
                self.operands.weight: 1 + 0.3 * torch.randn(weight, generator=generator, dtype=torch.float64),
            }
            values = {leaf: drawn.to(value_of(leaf).dtype) for leaf, drawn in values.items()}
            yield values, run_as_written(self.region, values, self._substitution)[0]

    def _share_of_equal(self, cast: str, values: Values, got: torch.Tensor) -> float:
        return share_of_equal(self.region, self._call(values, cast, got.dtype).reshape(got.shape), got)

    def build(self, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The operator, its result in the author's shape and dtype."""
        assert self.learned is not None
        values = dict(zip(self.region.leaves, leaves, strict=True))
        old = value_of(self.region.outputs[-1])
        result = self._call(values, self.learned, old.dtype)
        if result.dim() == old.dim() + 1:
            result = result.flatten(-2)
        elif result.dim() == old.dim() - 1:
            result = result.unflatten(-1, (-1, self.operands.width))
        return (result,)


def share_of_equal(region: Region, mine: torch.Tensor, theirs: torch.Tensor) -> float:
    """The share of equal numbers, float32's last bits aside; 0 where one is further off than two roundings."""
    mine, theirs = mine.double(), theirs.double()
    size = torch.maximum(mine.abs(), theirs.abs()).clamp_min(torch.finfo(torch.float32).tiny)
    away = ((mine - theirs).abs() / size).nan_to_num(torch.inf)
    if float(away.max()) > max(2 * coarsest_unit(region), _FLOAT32_ERROR):
        return 0.0
    return float((away <= _FLOAT32_ERROR).double().mean())


def _mean(shares: Sequence[float]) -> float:
    """Their mean, or 0 where one of them is."""
    return sum(shares) / len(shares) if min(shares) > 0 else 0.0


def _fewer_rows(shape: Sequence[int], width: int) -> dict[int, int]:
    """The largest number of rows, and its products with the other sizes, made small; empty where it is ambiguous."""
    longest = max(shape[:-1], default=1)
    others = [*shape[:-1], width, shape[-1] // width]
    others.remove(longest)
    if prod(shape) <= _LARGE or longest <= 64:
        return {}
    fewer: dict[int, int] = {}
    for count in range(len(others) + 1):
        for chosen in itertools.combinations(others, count):
            fewer[longest * prod(chosen)] = _SMALL_ROWS * prod(chosen)
    return {} if any(size in fewer for size in (*others, shape[-1])) else fewer
