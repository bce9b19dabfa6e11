"""One assignment of leaves to the operands of the routed experts: samples, comparison, operator (K3.1 spec 2.18)."""

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from k31compile.graph.confirm import TOLERANCE, Mismatch, OverBudget, Reading, Sample, allowed_bytes, relative_error
from k31compile.graph.constants import COMPARISONS, plain_floats
from k31compile.graph.dataflow import ATEN
from k31compile.graph.portable import portable
from k31compile.graph.region import Region
from k31compile.graph.sizes import (
    Substitution,
    is_float,
    is_integer,
    numel_of,
    shape_of,
    shape_under,
    symbols_of,
    value_of,
)
from k31compile.graph.views import is_view
from k31compile.kernels.expert_checks import SITU, SWIGLU
from k31compile.passes.recognise.expert_matrices import (
    Matrices,
    are_only_compared,
    comparisons_with,
    has_arithmetic,
    shape_of_all,
)
from k31compile.passes.recognise.operands import Values, in_dtype

_SMALL_ELEMENTS = 1 << 20
_LARGE = 16
_MOST_BOUNDS = 6
_USUAL_BOUNDS = (4.0, 25.0)


@dataclass(frozen=True)
class Projection:
    """Where the matrices [out, in] of one projection are: in a stack or a list, transposed or not, whole or halved."""

    source: Matrices
    transposed: bool
    half: int | None = None

    def matrices(self, values: Values) -> list[torch.Tensor]:
        """One [E, out, in] or E times [out, in], as views."""
        return [self._view(values[node]) for node in self.source]

    def _view(self, stored: torch.Tensor) -> torch.Tensor:
        whole = stored.mT if self.transposed else stored
        if self.half is None:
            return whole
        size = whole.shape[-2] // 2
        return whole[..., self.half * size : (self.half + 1) * size, :]

    def size_out(self) -> int:
        """How many numbers a row of the product has."""
        size = shape_of_all(self.source)[2 if self.transposed else 1]
        return size if self.half is None else size // 2


@dataclass(frozen=True)
class ExpertOperands:
    """Leaves by role; `start` is what the experts' sum is added to, which may be x, or nothing."""

    x: fx.Node
    experts: fx.Node
    weights: fx.Node
    gate: Projection
    up: Projection
    down: Projection
    start: fx.Node | None = None

    @property
    def count(self) -> int:
        """How many experts there are."""
        return shape_of_all(self.gate.source)[0]

    @property
    def are_lists(self) -> bool:
        """Whether every expert has matrices of its own."""
        return len(self.gate.source) > 1


@portable
@dataclass(frozen=True)
class Activation:
    """The operator's options; `keeps_last` where of weights for one expert in a row only the last one counts."""

    activation: str
    situ_beta: float = _USUAL_BOUNDS[0]
    linear_beta: float | None = _USUAL_BOUNDS[1]
    keeps_last: bool = False


class ExpertsReading(Reading):
    """x, experts, weights and three projections; which activation stands between, the runs tell."""

    name = "grouped_experts"

    def __init__(self, region: Region, operands: ExpertOperands, distinct: bool) -> None:
        """One assignment, not yet confirmed; `distinct` where no row can name an expert twice."""
        self.region, self.operands, self.distinct = region, operands, distinct
        self.learned: Activation | None = None
        self._outside = _numbers_outside(region, operands)
        self._widens = _widens_matrices(region, operands)
        self._bounds = bounds_among(plain_floats(region.nodes))
        has_tanh = any(node.target is ATEN.tanh.default for node in region.nodes)
        self._activations = activations(self._bounds if has_tanh else None)
        if not distinct and any(node.target is ATEN.scatter.src for node in region.nodes):
            self._activations += [replace(one, keeps_last=True) for one in self._activations]

    def substitutions(self) -> list[Substitution]:
        """Symbols made small and odd; where the experts are large, smaller ones first."""
        sizes = [size for leaf in self.region.leaves for size in value_of(leaf).shape]
        symbols: Substitution = {symbol: 3 + 2 * i for i, symbol in enumerate(symbols_of(sizes))}
        elements = sum(numel_of(leaf) for leaf in self.region.leaves)
        if elements <= _SMALL_ELEMENTS:
            return [symbols]
        smaller = self._smaller()
        if smaller:
            return [{**symbols, **smaller}]
        if 8 * elements > allowed_bytes() // 4:
            raise OverBudget(
                "its experts are too large to be run, and two of their sizes are too alike to be made small"
            )
        return [symbols]

    def _smaller(self) -> dict[int, int]:
        """Sizes and what reshapes make of them, as smaller ones; nothing where a number means two of them."""
        *lead, k = shape_of(self.operands.experts)
        rows = math.prod(lead)
        inner, width, out = self.operands.gate.size_out(), shape_of(self.operands.x)[-1], self.operands.down.size_out()
        experts, are_lists = self.operands.count, self.operands.are_lists
        if _compares_with_others(self.region, range(experts) if are_lists else {experts, experts - 1, k}):
            return {}
        small = {inner: 12, width: 20, out: 20 if out == width else 28}
        if not are_lists:
            small[experts] = max(11, k + 3)
        if len(lead) == 1 and isinstance(value_of(self.operands.x).shape[0], int):
            small.setdefault(rows, 7)
        # Numbers below that of experts in a list are experts' own.
        least = max(_LARGE, experts - 1) if are_lists else _LARGE
        small = {full: min(full, less) for full, less in small.items() if full > least}

        def less(size: int) -> int:
            return small.get(size, size)

        derived, ambiguous = dict(small), False
        pairs = [(2 * inner, 2 * less(inner)), (experts - 1, less(experts) - 1), (rows * k, less(rows) * k)]
        pairs += [(rows * size, less(rows) * less(size)) for size in (width, out, inner)]
        pairs += [(rows * k * size, less(rows) * k * less(size)) for size in (width, out, inner, experts)]
        for full, value in pairs:
            if full > _LARGE and (full != value or full in derived):
                ambiguous |= derived.setdefault(full, value) != value
        ambiguous |= are_lists and min(derived, default=experts) < experts
        ambiguous |= len(lead) > 1 and not derived.keys().isdisjoint({rows, *lead})
        return {} if ambiguous or len({rows, inner, width, experts}) < 4 or k in small else derived

    def begin(self, substitution: Substitution) -> None:
        """Take these sizes; every activation is possible again."""
        self._shapes = {leaf: shape_under(leaf, substitution) for leaf in self.region.leaves}
        self._possible = list(self._activations)
        self.learned = None

    def sizes(self) -> Mapping[str, int]:
        """N, E, K, L."""
        *lead, k = self._shapes[self.operands.experts]
        source = self.operands.gate.source
        experts = len(source) if self.operands.are_lists else self._shapes[source[0]][0]
        return {"N": math.prod(lead), "E": experts, "K": k, "L": self._shapes[self.operands.x][-1]}

    def samples(self) -> int:
        """Enough to meet every expert, each of a list for certain; then numbers that are no expert's."""
        return self._inside() + len(self._outside)

    def _inside(self) -> int:
        sizes = self.sizes()
        rounds = -(-sizes["E"] // max(1, sizes["N"] * sizes["K"]))
        if self.operands.are_lists:
            return max(4, rounds if self.distinct else 2 * rounds)
        return max(4, min(64, rounds))

    def sample(self, generator: torch.Generator, trial: int) -> dict[fx.Node, torch.Tensor]:
        """Rows over decades, to far beyond every bound; weights of both signs; every expert in its turn."""
        operands = self.operands
        beyond = max([100.0, *(3 * bound for bound in self._bounds if bound < 1e4)])
        low, high = -2.0, math.log10(beyond)
        sample = {}
        projections = (operands.gate, operands.up, operands.down)
        for node in dict.fromkeys(node for part in projections for node in part.source):
            shape = self._shapes[node]
            sample[node] = torch.randn(shape, generator=generator, dtype=torch.float64) / math.sqrt(shape[-1])
        rows = torch.randn(self._shapes[operands.x], generator=generator, dtype=torch.float64)
        decades = torch.rand((*rows.shape[:-1], 1), generator=generator, dtype=torch.float64) * (high - low) + low
        sample[operands.x] = rows * 10**decades
        if operands.start not in (None, operands.x):
            shape = self._shapes[operands.start]
            sample[operands.start] = torch.randn(shape, generator=generator, dtype=torch.float64)
        sample[operands.weights] = torch.randn(self._shapes[operands.weights], generator=generator, dtype=torch.float64)
        experts = self._experts(trial).to(value_of(operands.experts).dtype)
        sample[operands.experts] = experts.view(self._shapes[operands.experts])
        return sample

    def _experts(self, trial: int) -> torch.Tensor:
        """Integers [N, k]: every expert in its turn, in every other trial one a row where nothing rules that out."""
        sizes = self.sizes()
        order = torch.randperm(sizes["E"], generator=torch.Generator().manual_seed(5))
        count = sizes["N"] * sizes["K"]
        turn = trial // 2 if self.operands.are_lists and not self.distinct else trial
        places = (torch.arange(count) + turn * count) % sizes["E"]
        experts = order[places].view(sizes["N"], sizes["K"])
        if not self.distinct and trial % 2:
            experts[:, 1:] = experts[:, :1].clone()
        if trial >= self._inside():
            experts.view(-1)[::2] = self._outside[trial - self._inside()]
        return experts

    def run(self, sample: Sample, substitution: Substitution, trial: int) -> Sequence[torch.Tensor]:
        """The region's output; none where it rejects numbers that are no expert's, as the author's own run would."""
        try:
            return super().run(sample, substitution, trial)
        except (IndexError, RuntimeError):
            if trial < self._inside():
                raise
            return ()

    def judge(self, sample: Values, outputs: Sequence[torch.Tensor]) -> float:
        """Keep the activations that give these numbers."""
        if not outputs:
            return 0.0
        kept, errors = [], []
        for activation in self._possible:
            error = relative_error(outputs[0], self._run(activation, sample))
            errors.append(error)
            if error < TOLERANCE:
                kept.append(activation)
        if not kept:
            again = not self.distinct and bool((sample[self.operands.experts].diff(dim=-1) == 0).any())
            where = " where a row names an expert twice, which nothing here rules out" if again else ""
            far = f"{min(errors):.1e} of its size"
            raise Mismatch(f"its output differs from the sum of SiTU or SwiGLU experts by {far}{where}")
        self._possible, self.learned = kept, kept[0]
        return min(errors)

    def _run(self, activation: Activation, values: Values) -> torch.Tensor:
        operands = self.operands
        x, experts, weights = (values[node] for node in (operands.x, operands.experts, operands.weights))
        if activation.keeps_last:
            weights = _last_of_each(experts, weights)
        result: torch.Tensor = torch.ops.k31.grouped_experts(
            x if x.dim() == 2 else x.flatten(0, -2),
            experts if x.dim() == 2 else experts.flatten(0, -2),
            weights if x.dim() == 2 else weights.flatten(0, -2),
            operands.gate.matrices(values),
            operands.up.matrices(values),
            operands.down.matrices(values),
            activation=activation.activation,
            situ_beta=activation.situ_beta,
            linear_beta=activation.linear_beta,
        )
        if x.dim() > 2:
            result = result.view(*x.shape[:-1], result.shape[-1])
        return result if operands.start is None else values[operands.start] + result

    def build(self, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The operator, its result in the dtype of the author's."""
        assert self.learned is not None
        values = dict(zip(self.region.leaves, leaves, strict=True))
        if self._widens:
            values[self.operands.x] = values[self.operands.x].float()
        result = self._run(self.learned, values)
        return (in_dtype(result, value_of(self.region.outputs[0]).dtype),)


def _widens_matrices(region: Region, operands: ExpertOperands) -> bool:
    """Whether narrow matrices are cast to more than 16 bits: then the author rounds no activation, and x is widened."""
    projections = (operands.gate, operands.up, operands.down)
    made = {node for part in projections for node in part.source if value_of(node).dtype.itemsize == 2}
    for node in region.nodes:
        sources = [source for source in node.all_input_nodes if is_float(source)]
        if sources and is_float(node) and made.issuperset(sources):
            if value_of(node).dtype.itemsize > 2:
                return True
            made.add(node)
    return False


def _last_of_each(experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The weights, zero where a later slot names the same expert: a scatter into a row keeps the last."""
    same = experts.unsqueeze(-1) == experts.unsqueeze(-2)
    return weights.masked_fill(same.triu(1).any(-1), 0.0)


def _compares_with_others(region: Region, sizes: Collection[int]) -> bool:
    """Whether integers meet a number in arithmetic or comparison that a smaller number of experts would not reach."""
    for node in region.nodes:
        named = node.args[1:] if node.op == "call_function" and not is_view(node) else ()
        first = node.args[0] if node.args else None
        on_integers = isinstance(first, fx.Node) and is_integer(first)
        compares = getattr(node.target, "__name__", "").partition(".")[0] in COMPARISONS
        if (on_integers or compares) and any(
            isinstance(number, int | float) and abs(number) > 1 and number not in sizes for number in named
        ):
            return True
    return False


def _numbers_outside(region: Region, operands: ExpertOperands) -> list[int]:
    """Numbers that are no expert's, where the region compares or computes with them: it must give nothing for them.

    Some layers let a token through unchanged where its choice is beyond the last expert, others count from the first.
    """
    compared = comparisons_with(operands.experts, region.nodes)
    if not compared and not has_arithmetic(operands.experts, region.nodes):
        return []
    near = {int(number) + step for number in compared.values() for step in (-1, 0, 1)}
    near |= {operands.count, 2 * operands.count + 1}
    least = -1 if are_only_compared(operands.experts, region.nodes) else operands.count
    return sorted(number for number in near if least <= number < 0 or number >= operands.count)


def activations(bounds: Sequence[float] | None) -> list[Activation]:
    """SwiGLU, and where there is a tanh SiTU with any of these bounds."""
    found = [Activation(SWIGLU)]
    if bounds is not None:
        found += [Activation(SITU, beta, linear) for beta, linear in itertools.product(bounds, [None, *bounds])]
    return found


def bounds_among(numbers: Iterable[float]) -> list[float]:
    """The usual bounds, and numbers of an author that may be others."""
    numbers = [number for number in numbers if 0 < number < 1e4]
    inverse = [float(f"{1 / number:.12g}") for number in numbers if number < 1]
    return list(dict.fromkeys([*_USUAL_BOUNDS, *inverse, *numbers]))[:_MOST_BOUNDS]


def assignments(
    rows: Sequence[fx.Node], experts: fx.Node, sources: Sequence[Matrices], out: fx.Node, start: fx.Node | None
) -> Iterator[ExpertOperands]:
    """Every way to read the leaves and the matrices by shape; tokens that the sum starts from are read once."""
    for x, weights in itertools.permutations(rows, 2):
        others = set(rows) - {x, weights, start}
        if others or shape_of(weights) != shape_of(experts) or shape_of(x)[:-1] != shape_of(experts)[:-1]:
            continue
        if start is weights:
            continue
        for gate, up, down in _projections(sources, shape_of(x)[-1], shape_of(out)[-1]):
            yield ExpertOperands(x, experts, weights, gate, up, down, start)


def _projections(
    sources: Sequence[Matrices], width: int, out: int
) -> Iterator[tuple[Projection, Projection, Projection]]:
    for order in itertools.permutations(sources):
        *first, last = order
        if len({shape_of_all(source)[0] for source in sources}) != 1:
            return
        ways = itertools.product((False, True), repeat=len(order))
        for turned in ways:
            down = Projection(last, turned[-1])
            if len(order) == 2:
                halves = [Projection(first[0], turned[0], half) for half in (0, 1)]
                pairs = [(halves[0], halves[1]), (halves[1], halves[0])]
            else:
                pairs = [(Projection(first[0], turned[0]), Projection(first[1], turned[1]))]
            for gate, up in pairs:
                if _fit(gate, width) and _fit(up, width) and _fit(down, gate.size_out(), out):
                    yield gate, up, down


def are_projections(sources: Sequence[Matrices]) -> bool:
    """Whether some sizes of tokens and results would make two or three sources the projections of experts."""
    if len(sources) not in (2, 3):
        return False
    sizes = {size for source in sources for size in shape_of_all(source)[1:]}
    return any(next(_projections(sources, width, out), None) for width in sizes for out in sizes)


def _fit(part: Projection, size_in: int, size_out: int | None = None) -> bool:
    shape = shape_of_all(part.source)
    even = part.half is None or shape[2 if part.transposed else 1] % 2 == 0
    return even and shape[1 if part.transposed else 2] == size_in and size_out in (None, part.size_out())
