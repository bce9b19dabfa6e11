"""One way to read the leaves of a KDA layer: samples, the constants that its glue holds, roundings, the operator."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import fx

from k31compile.graph.confirm import TOLERANCE, Mismatch, Reading
from k31compile.graph.evaluate import coarsest_unit, run_as_written
from k31compile.graph.portable import portable
from k31compile.graph.region import Region
from k31compile.graph.sizes import Substitution, is_float, numel_of, shape_under, symbols_of, value_of
from k31compile.passes.recognise.delta_reading import distance
from k31compile.passes.recognise.heads import Held
from k31compile.passes.recognise.mega_parts import Parts
from k31compile.passes.recognise.operands import Values, spread

_LARGEST_EPS = 0.1
_SAME_FLOAT32 = 1e-5
_SHARE, _HOPELESS = 0.99, 0.8
# Enough rounded values for a share of them to mean something, from as few runs as may be.
_ROUNDED_VALUES, _MOST_RUNS = 1024, 32
_HALVES = (torch.bfloat16, torch.float16)

Numbers = Mapping[str, list[float]]
"""The constants in the glue that makes query, key, gate, beta, and the rows of the norm from the rule's output."""


@dataclass(frozen=True)
class MegaOperands:
    """Leaves and outputs in their forms; `windows` are the convolutions' states where they are kept."""

    windows: tuple[fx.Node, ...]
    raw_gate: Held
    a_log: Held
    dt_bias: Held | None
    raw_beta: Held
    state: Held
    out_gate: Held
    norm_weight: Held
    out: Held
    final: Held | None

    def given(self) -> dict[str, Held]:
        """The operands by name, without those that are not there and without results."""
        named = {part.name: getattr(self, part.name) for part in fields(self)[1:8]}
        return {name: held for name, held in named.items() if held is not None}


@portable
@dataclass(frozen=True)
class Constants:
    """What the runs taught: numbers of the glue, and where the author rounds."""

    lower_bound: float | None
    l2_eps: float
    beta_factor: float
    scale: float
    beta_dtype: torch.dtype | None = None
    core_dtype: torch.dtype | None = None
    weight_cast: str = "before"


class MegaReading(Reading):
    """Leaves read as the operands of mega_kda."""

    def __init__(self, region: Region, parts: Parts, operands: MegaOperands, numbers: Numbers) -> None:
        """One assignment, not yet confirmed."""
        self.name, self.region, self.parts, self.operands = "mega_kda", region, parts, operands
        self.numbers = numbers
        self.learned: Constants | None = None

    @property
    def replaced(self) -> tuple[fx.Node, ...]:
        """The result and the states."""
        return self.region.outputs

    def substitutions(self) -> list[Substitution]:
        """Symbols made small and odd."""
        shapes = [value_of(leaf).shape for leaf in self.region.leaves]
        return [{symbol: 3 + 2 * i for i, symbol in enumerate(symbols_of(s for shape in shapes for s in shape))}]

    def begin(self, substitution: Substitution) -> None:
        """Take these sizes and forget the constants."""
        self._substitution, self._trial = substitution, 0
        self.learned = None

    def samples(self) -> int:
        """Six: magnitudes differ from head to head in each."""
        return 6

    def sizes(self) -> Mapping[str, int]:
        """B, T, H, K, V, W."""
        shapes = self._shapes()
        batch, tokens, heads, width = shapes["raw_gate"]
        taps = shape_under(self._conv(0)[1], self._substitution)[1]
        return {"B": batch, "T": tokens, "H": heads, "K": width, "V": shapes["out_gate"][3], "W": taps}

    def _shapes(self) -> dict[str, list[int]]:
        """The operands' shapes with their letters in order."""
        shapes = {}
        for name, held in self.operands.given().items():
            empty = torch.empty(shape_under(held.node, self._substitution), device="meta")
            shapes[name] = list(held.form.canonical(empty).shape)
        return shapes

    def _conv(self, i: int) -> tuple[fx.Node, fx.Node, fx.Node | None]:
        conv = self.parts.convs[i]
        x, weight = conv.args[:2]
        assert isinstance(x, fx.Node)
        assert isinstance(weight, fx.Node)
        state = conv.kwargs.get("state")
        return x, weight, state if isinstance(state, fx.Node) else None

    def sample(self, generator: torch.Generator, trial: int) -> dict[fx.Node, torch.Tensor]:
        """Inputs over decades, so that eps is nothing in some heads and everything in others; gates open and closed."""
        self._trial = trial
        return self._drawn(generator, (1.0, 1e-3, 1.0, 1e2, 1e-2, 1.0)[trial], 1.0)

    def _drawn(self, generator: torch.Generator, size: float, decades: float) -> dict[fx.Node, torch.Tensor]:
        def normal(shape: Sequence[int], decades: float = 0.0) -> torch.Tensor:
            return spread(shape, generator, decades, max(len(shape) - 1, 0))

        sample: dict[fx.Node, torch.Tensor] = {}
        for i in range(len(self.parts.convs)):
            x, weight, before = self._conv(i)
            for leaf in (x, before):
                if leaf is not None:
                    sample[leaf] = size * spread(shape_under(leaf, self._substitution), generator, decades, 3)
            sample[weight] = normal(shape_under(weight, self._substitution))
        # Rates up to e^5: a clamp that ordinary ones do not reach would show.
        sizes = {"raw_gate": 4.0, "raw_beta": 3.0, "out_gate": 3.0, "a_log": 2.0}
        for name, shape in self._shapes().items():
            wide = 2 * decades if name == "state" else 0.0
            drawn = sizes.get(name, 1.0) * normal(shape, wide)
            held = self.operands.given()[name]
            sample[held.node] = held.restore(drawn).contiguous()
        return sample

    def judge(self, sample: Values, outputs: Sequence[torch.Tensor]) -> float:
        """The error of result and states; the first sample teaches the constants, the last is followed by roundings.

        Raises:
            Mismatch: it is another layer, or one that rounds elsewhere.
        """
        if self.learned is None:
            self.learned = self._constants(sample, outputs)
        error = max(self._errors(self._call(sample, self.learned), outputs))
        if not error < TOLERANCE:
            raise Mismatch(f"it differs from the KDA layer by {error:.1e} of its size")
        if self._trial == self.samples() - 1:
            self.learned = self._with_roundings(self.learned)
        return error

    def _errors(self, found: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> list[float]:
        """The state's error first: it depends on fewer constants."""
        result, kept, state = found
        final, windows = self.operands.final, self.operands.windows
        errors = [distance(final.canonical_of(outputs[1]), self._as_kept(state))] if final is not None else []
        errors.append(distance(self.operands.out.canonical_of(outputs[0]), result))
        got = outputs[len(outputs) - len(windows) :]
        errors += [float((a - b).abs().max()) for a, b in zip(got, self._windows(kept), strict=True) if a.numel()]
        return errors

    def _as_kept(self, state: torch.Tensor) -> torch.Tensor:
        """The operator's state, its last two axes in the order in which the author keeps it."""
        final = self.operands.final
        same = final is None or final.form.layout.letters == self.operands.state.form.layout.letters
        return state if same else state.transpose(-1, -2)

    def _windows(self, kept: torch.Tensor) -> list[torch.Tensor]:
        """The packed state by convolution, those that the author keeps."""
        convs = self.parts.convs
        if len(convs) == 1:
            return [kept] * len(self.operands.windows)
        split = kept.split([value_of(self._conv(i)[0]).shape[2] for i in range(len(convs))], dim=-1)
        owners = [window.args[0] for window in self.operands.windows]
        return [part for conv, part in zip(convs, split, strict=True) if conv in owners]

    def _constants(self, sample: Values, outputs: Sequence[torch.Tensor]) -> Constants:
        """The first constants of the glue that give these outputs; a state does not depend on the scale.

        Raises:
            Mismatch: none do.
        """
        least = torch.inf
        for constants in self._candidates():
            for scale in self._scales():
                scaled = replace(constants, scale=scale)
                errors = self._errors(self._call(sample, scaled), outputs)
                if max(errors) < TOLERANCE:
                    return scaled
                least = min(least, max(errors))
                if self.operands.final is not None and not errors[0] < TOLERANCE:
                    break
        raise Mismatch(
            f"what stands between its parts is not that of a KDA layer: it differs by {least:.1e} of its size "
            "(unit query and key, log decay by a bounded sigmoid or softplus, sigmoid beta)"
        )

    def _candidates(self) -> Iterator[Constants]:
        bounds = [*sorted({-abs(number) for number in self.numbers["gate"]}), None]
        small = [number for number in self.numbers["query"] + self.numbers["key"] if 0 < number < _LARGEST_EPS]
        factors = (2.0, 1.0) if 2.0 in map(abs, self.numbers["beta"]) else (1.0,)
        for bound, eps, factor in itertools.product(bounds, dict.fromkeys(small), factors):
            yield Constants(bound, eps, factor, 1.0)

    def _scales(self) -> list[float]:
        own = float(self.parts.rule.kwargs.get("scale", 1.0))  # type: ignore[arg-type]
        numbers = [*self.numbers["query"], *self.numbers["core"]]
        factors = [factor for number in numbers for factor in (number, 1 / number)]
        return list(dict.fromkeys(own * factor for factor in (1.0, *factors)))

    def _call(self, values: Values, constants: Constants) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The operator on leaf values; casts of the author where they are not float64."""
        convs = [self._conv(i) for i in range(len(self.parts.convs))]
        before = [values[state] for _, _, state in convs if state is not None]
        given = {name: held.canonical(values) for name, held in self.operands.given().items()}
        norm = self.parts.norm.kwargs
        exact = values[convs[0][0]].dtype == torch.float64 != value_of(convs[0][0]).dtype
        dtype = value_of(self.parts.norm).dtype
        is_default = exact or dtype == (constants.core_dtype or torch.float32)
        found: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = torch.ops.k31.mega_kda(
            [values[x] for x, _, _ in convs],
            [values[weight] for _, weight, _ in convs],
            before or None,
            given["raw_gate"],
            given["a_log"],
            given.get("dt_bias"),
            given["raw_beta"],
            given["state"],
            given["out_gate"],
            given["norm_weight"],
            norm_eps=norm["eps"],
            lower_bound=constants.lower_bound,
            l2_eps=constants.l2_eps,
            beta_factor=constants.beta_factor,
            scale=constants.scale,
            state_layout="VK" if self.operands.state.form.layout.letters == "bhvk" else "KV",
            beta_dtype=None if exact else constants.beta_dtype,
            core_dtype=None if exact else constants.core_dtype,
            norm_activation=norm.get("activation", "sigmoid"),
            norm_before_gate=norm.get("norm_before_gate", True),
            weight_cast=constants.weight_cast,
            dtype=None if is_default else dtype,
        )
        return found

    def _with_roundings(self, constants: Constants) -> Constants:
        """The same with the roundings that give the author's own numbers in the author's own dtypes.

        Raises:
            Mismatch: none do.
        """
        shares: dict[Constants, list[float]] = {variant: [] for variant in self._roundings(constants)}
        best = 0.0
        for values, theirs in self._runs_as_written():
            for variant, found in shares.items():
                found.append(self._share_of_equal(self._call(values, variant), theirs))
            best = max(found[-1] for found in shares.values())
            shares = {variant: found for variant, found in shares.items() if found[-1] > _HOPELESS}
            if not shares:
                break
        means = {variant: sum(found) / len(found) for variant, found in shares.items()}
        best = max(means.values(), default=best)
        if not means or best < _SHARE:
            raise Mismatch(
                f"it rounds elsewhere than the operator does: at best {best:.0%} of its results are equal "
                "(unit vectors, gates and step in float32 are recognised)"
            )
        return max(means, key=lambda variant: means[variant])

    def _roundings(self, constants: Constants) -> Iterator[Constants]:
        rows, norm = self.parts.norm.args[0], self.parts.norm
        assert isinstance(rows, fx.Node)
        stored, cast = value_of(rows).dtype, str(norm.kwargs.get("weight_cast", "before"))
        between = {value_of(n).dtype for n in self.region.nodes if is_float(n) and numel_of(n) == numel_of(rows)}
        halves = [dtype for dtype in _HALVES if dtype in between]
        cores: list[tuple[torch.dtype | None, str]] = [(stored, cast)]
        if stored not in _HALVES:
            cores = [(None, cast), *((dtype, "before") for dtype in halves)]
        beta = value_of(self.operands.raw_beta.node).dtype
        for (core, weight_cast), rounded in itertools.product(cores, [None, *([beta] if beta in _HALVES else [])]):
            yield replace(constants, core_dtype=core, weight_cast=weight_cast, beta_dtype=rounded)

    def _runs_as_written(self) -> Iterator[tuple[Values, Sequence[torch.Tensor]]]:
        """Runs of the region as it is written, until there are enough values where halves are among them."""
        generator = torch.Generator().manual_seed(31)
        sizes = self.sizes()
        count = sizes["B"] * sizes["T"] * sizes["H"] * sizes["V"]
        rounds = coarsest_unit(self.region) > torch.finfo(torch.float32).eps
        for _ in range(min(_MOST_RUNS, -(-_ROUNDED_VALUES // count)) if rounds else 2):
            drawn = self._drawn(generator, 1.0, 0.0)
            values = {leaf: value.to(value_of(leaf).dtype) for leaf, value in drawn.items()}
            yield values, run_as_written(self.region, values, self._substitution)

    def _share_of_equal(self, found: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> float:
        """The share of results that are equal but for float32's last bits; 0 where a state or a number is far off."""
        mine, state = found[0].double(), found[2].double()
        theirs = self.operands.out.canonical_of(outputs[0]).double()
        final = self.operands.final
        if final is not None:
            kept, state = final.canonical_of(outputs[1]).double(), self._as_kept(state)
            if not distance(kept, state) < _SAME_FLOAT32:
                return 0.0
        away = (mine - theirs).abs() / theirs.abs().amax(-1, keepdim=True).clamp_min(1e-30)
        if not float(away.nan_to_num(torch.inf).max()) < max(2 * coarsest_unit(self.region), _SAME_FLOAT32):
            return 0.0
        return float((away <= _SAME_FLOAT32).double().mean())

    def build(self, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The operator, its results in the forms and dtypes of the author's."""
        assert self.learned is not None
        result, kept, state = self._call(dict(zip(self.region.leaves, leaves, strict=True)), self.learned)
        final = self.operands.final
        states = [final.restore(self._as_kept(state))] if final is not None else []
        results = [self.operands.out.restore(result), *states, *self._windows(kept)]
        olds = [value_of(node).dtype for node in self.region.outputs]
        return tuple(new if new.dtype == old else new.to(old) for new, old in zip(results, olds, strict=True))
