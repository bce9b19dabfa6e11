"""One assignment of leaves to the operands of a delta rule: samples, comparison, operator (K3.1 spec 2.4, 2.5)."""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from k31compile.graph.confirm import TOLERANCE, Mismatch, Reading
from k31compile.graph.evaluate import run_in_float64
from k31compile.graph.layout import Layout, layouts
from k31compile.graph.region import Region
from k31compile.graph.sizes import Substitution, shape_of, symbols_of, value_of
from k31compile.passes.recognise.gates import FlatGate, GateForm
from k31compile.passes.recognise.operands import Dense, Values

LN2 = math.log(2)
SMALL_HEADS = 3
_LARGE_HEADS = 8
_LONG_KEYS = 5.0
"""Keys of one sample are this long: products of keys beyond what a clamp for unit keys would leave alone."""


Memo = dict[object, Sequence[torch.Tensor]]


@dataclass(frozen=True)
class DeltaOperands:
    """Leaves with their layouts; gate has letters bthk or btw, or bth for a scalar gate; outputs as layouts.

    Where only the state leaves, as of a prompt that is read ahead, there is no query and no `out`.
    """

    query: Dense | None
    key: Dense
    value: Dense
    gate: Dense
    beta: Dense
    state: Dense | None
    out: Layout | None
    final: Layout | None

    @property
    def asked(self) -> Dense:
        """What reads the state: the query, or the key where nobody looks at what is read."""
        return self.key if self.query is None else self.query

    @property
    def vectors(self) -> tuple[Dense, ...]:
        """What a first sample treats alike, so that it serves every order of them."""
        return (self.key, self.value) if self.query is None else (self.query, self.key, self.value)

    @property
    def is_scalar(self) -> bool:
        """Whether one gate serves all channels of a head: then it is no KDA."""
        return self.gate.layout.letters == "bth"


class DeltaReading(Reading):
    """Leaves read as q, k, v, gate, beta and a state, for one of four operators."""

    decides_nothing = Reading.decides_nothing | {"_memo"}

    def __init__(self, name: str, region: Region, operands: DeltaOperands, form: GateForm, memo: Memo) -> None:
        """One assignment, not yet confirmed; gates are held in one form, and `memo` is shared by all orders."""
        self.name, self.region, self.operands, self.gate_form = name, region, operands, form
        self.learned: float | None = None
        self._memo = memo

    @property
    def replaced(self) -> tuple[fx.Node, ...]:
        """Output and state, or the one of them that leaves."""
        return self.region.outputs

    def begin(self, substitution: Substitution) -> None:
        """Take these sizes and forget the scale."""
        self._substitution = substitution
        self._letters = self._letters_under(substitution)
        self.learned = None

    def substitutions(self) -> list[Substitution]:
        """Symbols made small and odd; and fewer heads first, where their number means nothing else."""
        shapes = [value_of(leaf).shape for leaf in self.region.leaves]
        symbols = {symbol: 3 + 2 * i for i, symbol in enumerate(symbols_of(s for shape in shapes for s in shape))}
        letters = self._letters_under(symbols)
        heads, batch = letters["h"], letters["b"]
        numbers = {size for letter, size in letters.items() if letter != "h"} | {16, 32, 64, 128}
        products = {batch * heads, heads * letters["k"], heads * letters["v"]}
        if heads <= _LARGE_HEADS or heads in numbers or products & numbers or len(products) < 2:
            return [symbols]
        fewer = {heads: SMALL_HEADS}
        for size in (batch, letters["k"], letters["v"], batch * letters["t"]):
            fewer.setdefault(heads * size, SMALL_HEADS * size)
        return [{**symbols, **fewer}, symbols]

    def _letters_under(self, substitution: Substitution) -> dict[str, int]:
        letters = {letter: self.operands.asked.size(letter, substitution) for letter in "bthk"}
        letters["v"] = self.operands.value.size("v", substitution)
        return letters

    def sizes(self) -> Mapping[str, int]:
        """B, T, H, K, V."""
        return {letter.upper(): size for letter, size in self._letters.items()}

    def samples(self) -> int:
        """Four where a sample has many tokens, more where it has few."""
        return 4 if self._letters["t"] > 4 else 6

    def sample(self, generator: torch.Generator, trial: int) -> dict[fx.Node, torch.Tensor]:
        """Short keys, gates from none to the strongest, beta in 0..2; from the second sample on values over decades."""
        sample: dict[fx.Node, torch.Tensor] = {}
        for leaf in self.region.leaves:
            for operand in self.operands.vectors:
                if operand.leaf is leaf:
                    sample |= operand.place(self._vectors(operand, generator, trial))
            if leaf is self.operands.gate.leaf:
                sample |= self.operands.gate.place(self._gates(generator, trial))
            if leaf is self.operands.beta.leaf:
                sample |= self.operands.beta.place(self._betas(generator, trial))
            if self.operands.state is not None and leaf is self.operands.state.leaf:
                sizes = [self._letters[letter] for letter in "bhkv"]
                state = torch.randn(sizes, generator=generator, dtype=torch.float64)
                sample |= self.operands.state.place(state * (1.0, 30.0, 1e-3, 1.0)[trial % 4])
        return sample

    def _vectors(self, operand: Dense, generator: torch.Generator, trial: int) -> torch.Tensor:
        sizes = [self._letters[letter] for letter in operand.layout.letters]
        vectors = torch.nn.functional.normalize(torch.randn(sizes, generator=generator, dtype=torch.float64), dim=-1)
        # Lengths below one: a normalisation inside shows, and the recurrence does not explode.
        lengths = 0.3 + 0.7 * torch.rand(sizes[:3], generator=generator, dtype=torch.float64)[..., None]
        if operand is self.operands.key:
            return vectors * lengths * (1.0, 1.0, _LONG_KEYS, 1.0)[trial % 4]
        if trial == 0:
            return vectors * lengths
        decades = torch.rand(sizes[:3], generator=generator, dtype=torch.float64)[..., None] * 4 - 2
        return vectors * 10**decades * (1.0, 1.0, 1.0, 1e6)[trial % 4]

    def _gates(self, generator: torch.Generator, trial: int) -> torch.Tensor:
        sizes = [self._letters[letter] for letter in ("bth" if self.operands.is_scalar else "bthk")]
        strongest = (0.3, 5.0, 0.02, 0.3)[trial % 4]
        gates = -strongest * torch.rand(sizes, generator=generator, dtype=torch.float64)
        if trial % 4 == 3:
            # A few channels forget everything at once; more of them would overflow forms that are right.
            rare = torch.rand(sizes, generator=generator, dtype=torch.float64) < max(0.02, 1 / self._letters["t"] / 8)
            gates = torch.where(rare, -60.0, gates)
        return self.gate_form.held(gates)

    def _betas(self, generator: torch.Generator, trial: int) -> torch.Tensor:
        sizes = [self._letters[letter] for letter in "bth"]
        # beta |k|^2 stays below two, or the recurrence explodes.
        strongest = (1.0, 1.9, 1.9 / _LONG_KEYS**2, 0.5)[trial % 4]
        return torch.rand(sizes, generator=generator, dtype=torch.float64) * strongest

    def run(self, sample: Values, substitution: Substitution, trial: int) -> Sequence[torch.Tensor]:
        """The region's outputs; a first sample is the same for every order of the vectors and is run once."""
        if trial:
            return run_in_float64(self.region, sample, substitution)
        operands = self.operands
        ordered = sorted((o.leaf.name, o.layout.dims) for o in operands.vectors)
        others = (operands.gate, operands.beta, operands.state)
        placed = (o.layout.dims if o else None for o in others)
        turned = isinstance(operands.gate, FlatGate) and operands.gate.heads_last
        key = (*ordered, *placed, turned, str(sorted(substitution.items(), key=str)))
        if key not in self._memo:
            self._memo[key] = run_in_float64(self.region, sample, substitution)
        return self._memo[key]

    def judge(self, sample: Values, outputs: Sequence[torch.Tensor]) -> float:
        """o equal up to one factor, the state exactly."""
        expected, state = self._definition(sample)
        error = self._judge_output(outputs[0], expected) if self.operands.out is not None else 0.0
        if self.operands.final is not None:
            final = distance(self.operands.final.canonical(outputs[-1]), state)
            if not final < TOLERANCE:
                raise Mismatch(f"its state differs from that of the {self._rule()} by {final:.1e} of its size")
            error = max(error, final)
        return error

    def _judge_output(self, output: torch.Tensor, expected: torch.Tensor) -> float:
        assert self.operands.out is not None
        got = self.operands.out.canonical(output)
        if self.learned is None:
            # twelve digits: what an author writes as one factor or another has no more in common
            self.learned = float(f"{float((got * expected).sum() / expected.square().sum().clamp_min(1e-300)):.12g}")
        error = distance(got, self.learned * expected)
        if not error < TOLERANCE or self.learned == 0:
            raise Mismatch(f"its output differs from the {self._rule()} by {error:.1e} of its size")
        return error

    def _rule(self) -> str:
        return "gated delta rule (decay, predict, write, read)"

    def _definition(self, sample: Values) -> tuple[torch.Tensor, torch.Tensor]:
        operands = self.operands
        query, key, value, gate, beta = (
            o.canonical(sample) for o in (operands.asked, operands.key, operands.value, operands.gate, operands.beta)
        )
        sizes = [self._letters[letter] for letter in "bhkv"]
        state = torch.zeros(sizes, dtype=torch.float64) if operands.state is None else operands.state.canonical(sample)
        return _operator(self.name)(query, key, value, self.gate_form.logarithms(gate), beta, state)

    def build(self, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The operator, its results in the layouts and dtypes of the author's."""
        operands, values = self.operands, dict(zip(self.region.leaves, leaves, strict=True))
        query, key, value, gate, beta = (
            o.canonical(values) for o in (operands.asked, operands.key, operands.value, operands.gate, operands.beta)
        )
        gate = self.gate_form.logarithms(gate)
        layout = "VK" if _holds_values_first(operands) else "KV"
        state = None
        if operands.state is not None:
            state = operands.state.canonical(values)
            state = state.transpose(-1, -2) if layout == "VK" else state
        elif not self.name.endswith("chunk"):
            state = query.new_zeros(
                *query.shape[:1], query.shape[2], query.shape[3], value.shape[3], dtype=torch.float32
            )
            state = state.transpose(-1, -2) if layout == "VK" else state
        scale = self.learned if operands.out is not None else 1.0
        assert scale is not None
        out, final = _operator(self.name)(query, key, value, gate, beta, state, scale=scale, state_layout=layout)
        results = []
        if operands.out is not None:
            results.append(_as_held(out, operands.out, self.region.outputs[0]))
        if operands.final is not None:
            final = final.transpose(-1, -2) if layout == "VK" else final
            results.append(_as_held(final, operands.final, self.region.outputs[-1]))
        return tuple(results)


def _as_held(result: torch.Tensor, layout: Layout, output: fx.Node) -> torch.Tensor:
    """A result in the layout and dtype that the author gave it."""
    old = value_of(output)
    return layout.restore(result, old.dim()).to(old.dtype)


def _operator(name: str) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    operator: Callable[..., tuple[torch.Tensor, torch.Tensor]] = getattr(torch.ops.k31, name)
    return operator


def _holds_values_first(operands: DeltaOperands) -> bool:
    """Whether the state lies in memory as [.., V, K]."""
    layout = operands.state.layout if operands.state is not None else operands.final
    if layout is None:
        return False
    key, value = layout.dims[2], layout.dims[3]
    return key is not None and value is not None and value < key


def distance(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, relative to the largest value of a head's row."""
    if not got.numel():
        return 0.0
    scale = expected.abs().amax(dim=(-1,), keepdim=True).clamp_min(1e-300)
    floor = expected.abs().max() * 1e-6
    return float(((got - expected).abs() / torch.maximum(scale, floor)).max())


def assignments(
    region: Region,
    gate: fx.Node,
    rest: Sequence[fx.Node],
    out: fx.Node,
    final: fx.Node | None,
    is_scalar: bool,
) -> Iterator[DeltaOperands]:
    """Every way to read the leaves by shape, those where all have batch, tokens and heads in one order first.

    `rest` are the float leaves but for the gate.
    """
    found = functools.partial(_assignments, region, gate, rest, out, final, is_scalar)
    yield from filter(_are_in_one_order, found())
    yield from itertools.filterfalse(_are_in_one_order, found())


def _are_in_one_order(operands: DeltaOperands) -> bool:
    """Whether no two tensors hold batch, tokens and heads in different orders, nor two states their sides."""
    read = [*operands.vectors, operands.gate, operands.beta, *([operands.state] if operands.state else [])]
    layouts_read = [*(one.layout for one in read), *(one for one in (operands.out, operands.final) if one)]
    ordered = {pair for layout in layouts_read for pair in _pairs_in_order(layout, "bth")}
    states = [layout for layout in (operands.state and operands.state.layout, operands.final) if layout]
    sides = {pair for layout in states for pair in _pairs_in_order(layout, "kv")}
    return not any((second, first) in ordered | sides for first, second in ordered | sides)


def _pairs_in_order(layout: Layout, letters: str) -> Iterator[tuple[str, str]]:
    """Some letters of a layout, two by two, the one of the lower dimension first."""
    held = sorted(
        (dim, x) for x, dim in zip(layout.letters, layout.dims, strict=True) if dim is not None and x in letters
    )
    return ((first, second) for (_, first), (_, second) in itertools.combinations(held, 2))


def _assignments(
    region: Region,
    gate: fx.Node,
    rest: Sequence[fx.Node],
    out: fx.Node,
    final: fx.Node | None,
    is_scalar: bool,
) -> Iterator[DeltaOperands]:
    for out_layout in plain_layouts(shape_of(out), "bthv", {}):
        known = {letter: out_layout.size(letter, shape_of(out)) for letter in "bthv"}
        tokens = {letter: known[letter] for letter in "bth"}
        for order in itertools.permutations(rest):
            query, key, value, beta, *states = order
            if len(states) > 1:
                return
            for asked in _dense(query, "bthk", tokens):
                wanted = {**known, "k": asked.size("k")}
                states_read: Sequence[Dense | None] = _dense(states[0], "bhkv", wanted) if states else [None]
                finals: Sequence[Dense | None] = _dense(final, "bhkv", wanted) if final is not None else [None]
                for found in itertools.product(
                    _dense(key, "bthk", wanted),
                    _dense(value, "bthv", wanted),
                    _gates(gate, is_scalar, wanted),
                    _dense(beta, "bth", wanted),
                    states_read,
                    finals,
                ):
                    key_read, value_read, gate_read, beta_read, state, last = found
                    read = (asked, key_read, value_read, gate_read, beta_read, state)
                    yield DeltaOperands(*read, out_layout, last.layout if last else None)


def assignments_to_state(
    region: Region, gate: fx.Node, rest: Sequence[fx.Node], is_scalar: bool
) -> Iterator[DeltaOperands]:
    """Every way to read the leaves where the state is all that leaves: no query is among `rest`."""
    for final in plain_layouts(shape_of(region.outputs[0]), "bhkv", {}):
        known = {letter: final.size(letter, shape_of(region.outputs[0])) for letter in "bhkv"}
        for key, value, beta, *states in itertools.permutations(rest):
            for key_read in _dense(key, "bthk", {letter: known[letter] for letter in "bhk"}):
                wanted = {**known, "t": key_read.size("t")}
                states_read: Sequence[Dense | None] = _dense(states[0], "bhkv", wanted) if states else [None]
                for value_read, gate_read, beta_read, state in itertools.product(
                    _dense(value, "bthv", wanted),
                    _gates(gate, is_scalar, wanted),
                    _dense(beta, "bth", wanted),
                    states_read,
                ):
                    yield DeltaOperands(None, key_read, value_read, gate_read, beta_read, state, None, final)


def _gates(leaf: fx.Node, is_scalar: bool, known: Mapping[str, int]) -> list[Dense]:
    """A gate for each head or channel; where no layout has both, one whose heads are split later."""
    found = _dense(leaf, "bth" if is_scalar else "bthk", known)
    if found or is_scalar:
        return found
    flat = plain_layouts(shape_of(leaf), "btw", {**known, "w": known["h"] * known["k"]})
    return [FlatGate(leaf, layout, known["k"], last) for layout in flat for last in (False, True)]


def _dense(leaf: fx.Node, letters: str, known: Mapping[str, int]) -> list[Dense]:
    return [Dense(leaf, layout) for layout in plain_layouts(shape_of(leaf), letters, known)]


def plain_layouts(shape: Sequence[int], letters: str, known: Mapping[str, int]) -> tuple[Layout, ...]:
    """The layouts of a shape, one of those that differ only in where letters of size one are: the tidiest."""
    return _plain_layouts(tuple(shape), letters, tuple((x, known[x]) for x in letters if x in known))


@functools.lru_cache(maxsize=4096)
def _plain_layouts(shape: tuple[int, ...], letters: str, known: tuple[tuple[str, int], ...]) -> tuple[Layout, ...]:
    found: dict[tuple[int | None, ...], Layout] = {}
    for layout in layouts(shape, letters, dict(known)):
        found.setdefault(tuple(None if dim is None or shape[dim] == 1 else dim for dim in layout.dims), layout)
    return tuple(found.values())
