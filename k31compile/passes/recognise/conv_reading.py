"""One assignment of leaves to the operands of a short convolution: samples, comparison, operator (K3.1 spec 2.6)."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import fx

from k31compile.graph.confirm import TOLERANCE, Mismatch, Reading
from k31compile.graph.evaluate import coarsest_unit, run_as_written
from k31compile.graph.layout import Layout
from k31compile.graph.region import Region
from k31compile.graph.sizes import Substitution, is_float, is_integer, shape_of, symbols_of, value_of
from k31compile.passes.recognise.delta_reading import plain_layouts
from k31compile.passes.recognise.operands import Dense, Values, spread

_SAMPLES = 5
_LARGE = 1 << 20
_SMALL_LENGTH = 11


@dataclass(frozen=True)
class ConvOperands:
    """Leaves with their layouts, letters btc, cw, c, bsc and b; outputs as layouts."""

    x: Dense
    weight: Dense
    bias: Dense | None
    state: Dense | None
    lengths: Dense | None
    out: Layout
    kept: Layout | None

    @property
    def taps(self) -> int:
        """The number of taps."""
        return self.weight.size("w")

    @property
    def state_length(self) -> int:
        """The inputs that the state holds: as many as taps, or one less."""
        return self.state.size("s") if self.state is not None else 0

    def given(self) -> dict[str, Dense]:
        """The operands that there are, by name."""
        named = {part.name: getattr(self, part.name) for part in fields(self)}
        return {name: operand for name, operand in named.items() if isinstance(operand, Dense)}


class ConvReading(Reading):
    """Leaves read as x, weight, bias, state and valid lengths."""

    def __init__(self, region: Region, operands: ConvOperands, activation: str) -> None:
        """One assignment, not yet confirmed."""
        self.name, self.region, self.operands, self.activation = "short_conv", region, operands, activation

    @property
    def replaced(self) -> tuple[fx.Node, ...]:
        """The result, and the state where it is kept."""
        return self.region.outputs

    def substitutions(self) -> list[Substitution]:
        """Symbols made small and odd; a long sequence made short first, where its length means nothing else."""
        shapes = [value_of(leaf).shape for leaf in self.region.leaves]
        symbols = {symbol: 5 + 2 * i for i, symbol in enumerate(symbols_of(s for shape in shapes for s in shape))}
        sizes = self._letters(symbols)
        length = sizes["t"]
        if sizes["b"] * length * sizes["c"] <= _LARGE or length <= 64:
            return [symbols]
        fewer = {length + shift: _SMALL_LENGTH + shift for shift in range(sizes["w"] + 1)}
        others = {sizes["b"], sizes["c"], sizes["c"] * sizes["w"]}
        return [symbols] if others & set(fewer) else [{**fewer, **symbols}, symbols]

    def _letters(self, substitution: Substitution) -> dict[str, int]:
        sizes = {letter: self.operands.x.size(letter, substitution) for letter in "btc"}
        return sizes | {"w": self.operands.weight.size("w", substitution)}

    def begin(self, substitution: Substitution) -> None:
        """Take these sizes."""
        self._substitution, self._trial = substitution, 0

    def samples(self) -> int:
        """Five, each with many channels."""
        return _SAMPLES

    def sizes(self) -> Mapping[str, int]:
        """B, T, C, W."""
        return {letter.upper(): size for letter, size in self._letters(self._substitution).items()}

    def sample(self, generator: torch.Generator, trial: int) -> dict[fx.Node, torch.Tensor]:
        """Inputs over decades, small, large and very large; lengths of nothing, of everything and between."""
        self._trial = trial
        sample: dict[fx.Node, torch.Tensor] = {}
        for name, operand in self.operands.given().items():
            shape = [operand.size(letter, self._substitution) for letter in operand.layout.letters]
            if name == "lengths":
                drawn = self._lengths(generator, trial, value_of(operand.leaf).dtype)
            else:
                size = (1.0, 1e-2, 1e2, 1e5, 1.0)[trial] if name in ("x", "state") else 1.0
                drawn = size * spread(shape, generator, 1.0, len(shape))
            sample |= operand.place(drawn)
        return sample

    def _lengths(self, generator: torch.Generator, trial: int, dtype: torch.dtype) -> torch.Tensor:
        sizes = self._letters(self._substitution)
        drawn = torch.randint(0, sizes["t"] + 1, (sizes["b"],), generator=generator, dtype=dtype)
        drawn[trial % sizes["b"]] = 0 if trial % 2 else sizes["t"]
        return drawn

    def judge(self, sample: Values, outputs: Sequence[torch.Tensor]) -> float:
        """The error against the sum of the products' magnitudes; a state must be the very inputs.

        Raises:
            Mismatch: it is another window, sum, activation or state, or a state that is rounded elsewhere.
        """
        expected, kept = self._call(sample, self.activation)
        magnitude, _ = self._call({leaf: _magnitude(value) for leaf, value in sample.items()}, "none")
        got = self.operands.out.canonical(outputs[0])
        error = float(((got - expected).abs() / magnitude.clamp_min(1e-200)).nan_to_num(torch.inf).max())
        if not error < TOLERANCE:
            raise Mismatch(f"its output differs from a causal convolution per channel by {error:.1e} of its size")
        if self.operands.kept is not None and not torch.equal(self.operands.kept.canonical(outputs[1]), kept):
            raise Mismatch("the state that it keeps is not the last inputs")
        if self._trial == _SAMPLES - 1:
            self._hold_rounding(sample)
        return error

    def _hold_rounding(self, sample: Values) -> None:
        """In the author's own dtypes: a state of the same bits, a result as near as those dtypes are."""
        written = {leaf: value.to(value_of(leaf).dtype) for leaf, value in sample.items()}
        theirs = run_as_written(self.region, written, self._substitution)
        mine = self.build(*(written[leaf] for leaf in self.region.leaves))
        if self.operands.kept is not None and not torch.equal(mine[1], theirs[1]):
            raise Mismatch("the state that it keeps is rounded elsewhere")
        exact = {
            leaf: _magnitude(value.to(drawn.dtype))
            for (leaf, drawn), value in zip(sample.items(), written.values(), strict=True)
        }
        magnitude = self.operands.out.restore(self._call(exact, "none")[0], mine[0].dim())
        away = ((mine[0] - theirs[0]).double().abs() / magnitude.clamp_min(1e-30)).nan_to_num(torch.inf)
        if float(away.max()) > 16 * coarsest_unit(self.region):
            raise Mismatch("its result is further from the operator's than its dtypes explain")

    def _call(self, values: Values, activation: str) -> tuple[torch.Tensor, torch.Tensor]:
        """The operator on leaf values, with letters in order; the state before it in a type that holds x too."""
        given = {name: operand.canonical(values) for name, operand in self.operands.given().items()}
        x = given.pop("x")
        x = _wide_enough(x, value_of(self.region.outputs[0]).dtype)
        state = given.get("state")
        if state is not None:
            extra = self.operands.state_length - self.operands.taps + 1
            state = state[:, extra:] if extra else state
            state = _wide_enough(state, x.dtype) if self.operands.kept is not None else state
        found: tuple[torch.Tensor, torch.Tensor] = torch.ops.k31.short_conv(
            x,
            given["weight"],
            bias=given.get("bias"),
            state=state,
            actual_seq_lengths=given.get("lengths"),
            activation=activation,
        )
        return found

    def build(self, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The operator, its results in the layouts and dtypes of the author's."""
        found = self._call(dict(zip(self.region.leaves, leaves, strict=True)), self.activation)
        results = []
        layouts = (self.operands.out, self.operands.kept)
        for node, value, layout in zip(self.region.outputs, found, layouts, strict=False):
            if layout is not None:
                old = value_of(node)
                restored = layout.restore(value, old.dim())
                results.append(restored if restored.dtype == old.dtype else restored.to(old.dtype))
        return tuple(results)


def _wide_enough(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The value in a type that holds both its own and `dtype`."""
    both = torch.promote_types(value.dtype, dtype)
    return value if value.dtype == both else value.to(both)


def _magnitude(value: torch.Tensor) -> torch.Tensor:
    return value.abs() if value.is_floating_point() else value


def assignments(region: Region, channels: int, count: int) -> Iterator[ConvOperands]:
    """Every way to read the leaves by shape, for `count` taps on each of `channels` channels."""
    floats = [leaf for leaf in region.leaves if is_float(leaf)]
    integers = [leaf for leaf in region.leaves if is_integer(leaf)]
    if not 2 <= len(floats) <= 4 or len(integers) > 1 or len(floats) + len(integers) != len(region.leaves):
        return
    for out in plain_layouts(shape_of(region.outputs[0]), "btc", {"c": channels}):
        known = {letter: out.size(letter, shape_of(region.outputs[0])) for letter in "btc"} | {"w": count}
        for x, weight, *rest in itertools.permutations(floats):
            for roles in _roles(rest):
                yield from _read(region, [x, weight, *roles, integers[0] if integers else None], out, known)


def _roles(rest: Sequence[fx.Node]) -> list[tuple[fx.Node | None, fx.Node | None]]:
    """The remaining leaves as bias and state."""
    if not rest:
        return [(None, None)]
    return [(rest[0], None), (None, rest[0])] if len(rest) == 1 else [(rest[0], rest[1])]


def _read(
    region: Region, roles: Sequence[fx.Node | None], out: Layout, known: Mapping[str, int]
) -> Iterator[ConvOperands]:
    kept = region.outputs[1] if len(region.outputs) > 1 else None
    before = {**known, "s": known["w"] - 1}
    full = {**known, "s": known["w"]}
    if roles[4] is not None and kept is None:
        return
    letters = ("btc", "cw", "c", "bsc", "b")
    x, weight, bias, state, lengths = (_dense(leaf, of, before) for leaf, of in zip(roles, letters, strict=True))
    state = state or _dense(roles[3], "bsc", full)
    finals: Sequence[Layout | None] = [None] if kept is None else plain_layouts(shape_of(kept), "bsc", before)
    for read in itertools.product(x, weight, bias, state, lengths):
        if read[0] is not None and read[1] is not None:
            for final in finals:
                yield ConvOperands(read[0], read[1], *read[2:], out, final)


def _dense(leaf: fx.Node | None, letters: str, known: Mapping[str, int]) -> list[Dense | None]:
    if leaf is None:
        return [None]
    wanted = {letter: known[letter] for letter in letters}
    return [Dense(leaf, layout) for layout in plain_layouts(shape_of(leaf), letters, wanted)]
