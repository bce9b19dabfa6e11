"""One way to read a region as an attention over depth: samples, comparison, operators (K3.1 spec 2.2)."""

import functools
import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from k31compile.graph.confirm import TOLERANCE, Mismatch, Reading, relative_error
from k31compile.graph.dataflow import ATEN, Dataflow
from k31compile.graph.evaluate import run_in_float64
from k31compile.graph.region import Region
from k31compile.graph.sizes import Substitution, is_tensor, numel_of, shape_of, shape_under, symbols_of, value_of
from k31compile.graph.views import is_view
from k31compile.passes.recognise.operands import Values, spread

_HIDES = {ATEN.masked_fill.Scalar, ATEN.masked_fill.Tensor, ATEN.where.self, ATEN.where.ScalarSelf}
_HIDES |= {ATEN.where.ScalarOther, ATEN.where.Scalar}
_LARGE, _SMALL = 16, (5, 3, 7)
_QUERIES = (1.0, 30.0, 1e-2, 1.0, 1e3, 0.3)
_DECADES = (1.0, 4.0, 0.3, 8.0, 2.0, 0.0)
_VECTORS, _MOST_VECTORS = 2, 6


@dataclass(frozen=True)
class Source:
    """A leaf of block sums: [.., D] where `axis` is None, else that dimension counts the blocks."""

    leaf: fx.Node
    axis: int | None

    def rows(self, values: Values) -> torch.Tensor:
        """The block sums as [M, n, D]."""
        value = values[self.leaf]
        if self.axis is None:
            return _viewed(value, (_count(value.shape[:-1]), 1, value.shape[-1]))
        tokens = [d for d in range(value.dim() - 1) if d != self.axis]
        order = (*tokens, self.axis, value.dim() - 1)
        moved = value if order == tuple(range(value.dim())) else value.permute(order)
        return _viewed(moved, (_count(moved.shape[:-2]), *moved.shape[-2:]))

    def row(self, values: Values) -> torch.Tensor:
        """The only block sum as [M, D]."""
        value = values[self.leaf]
        return _viewed(value, (_count(value.shape[:-1]), value.shape[-1]))

    def count(self, substitution: Substitution) -> int:
        """How many blocks there are."""
        return 1 if self.axis is None else shape_under(self.leaf, substitution)[self.axis]


class DepthReading(Reading):
    """Sources, the last of which may be the running sum, and vectors whose product is the query.

    What is learned: for each source which of its blocks count, or None where all do.
    """

    def __init__(
        self,
        name: str,
        region: Region,
        sources: Sequence[Source],
        partial: Source | None,
        weights: Sequence[fx.Node],
        eps: float,
        scale: float,
    ) -> None:
        """Not yet confirmed; `sources` hold `partial` too."""
        self.name, self.region, self.sources, self.partial = name, region, tuple(sources), partial
        self.weights, self.eps, self.scale = tuple(weights), eps, scale
        self.learned: tuple[tuple[bool, ...], ...] | None = None
        self._hides = any(node.target in _HIDES for node in region.nodes)

    def substitutions(self) -> list[Substitution]:
        """Symbols made small and odd; and fewer tokens first, where their numbers mean nothing else."""
        shapes = [value_of(leaf).shape for leaf in self.region.leaves]
        symbols: Substitution = {s: 3 + 2 * i for i, s in enumerate(symbols_of(x for shape in shapes for x in shape))}
        fewer = self._fewer_tokens()
        return [{**symbols, **fewer}, symbols] if fewer else [symbols]

    def _fewer_tokens(self) -> dict[int, int]:
        *tokens, width = shape_of(self.region.outputs[0])
        taken = {width, *(shape_of(s.leaf)[s.axis] for s in self.sources if s.axis is not None), len(self.sources)}
        if any(_is_constant_of(node, tokens) for node in self.region.nodes):
            return {}
        fewer: dict[int, int] = {}
        full = less = 1
        for size in tokens:
            small = _SMALL[len(fewer) % 3] if size > _LARGE else size
            full, less = full * size, less * small
            for long, short in ((size, small), (full, less)):
                if long > _LARGE and fewer.setdefault(long, short) != short:
                    return {}
        return {} if taken & set(fewer) else fewer

    def begin(self, substitution: Substitution) -> None:
        """Take these sizes and forget which blocks count."""
        self._substitution = substitution
        self.learned = None
        rows = 1
        for size in shape_under(self.region.outputs[0], substitution)[:-1]:
            rows *= size
        count = sum(source.count(substitution) for source in self.sources)
        self._sizes = {"M": rows, "N": count, "D": shape_of(self.region.outputs[0])[-1]}

    def sizes(self) -> Mapping[str, int]:
        """M tokens, N sources, D."""
        return self._sizes

    def samples(self) -> int:
        """Twice through the magnitudes where a sample has few rows."""
        return 6 if self._sizes["M"] >= 8 else 12

    def sample(self, generator: torch.Generator, trial: int) -> dict[fx.Node, torch.Tensor]:
        """Rows of all magnitudes, some where eps is half of the mean square and some zero; queries weak and strong."""
        sample: dict[fx.Node, torch.Tensor] = {}
        for source in self.sources:
            shape = shape_under(source.leaf, self._substitution)
            rows = spread(shape, generator, _DECADES[trial % 6], len(shape) - 1)
            kind = torch.rand((*shape[:-1], 1), generator=generator, dtype=torch.float64)
            tiny = torch.randn(shape, generator=generator, dtype=torch.float64) * self.eps**0.5
            sample[source.leaf] = torch.where(kind < 0.25, tiny, torch.where(kind > 0.95, 0.0, rows))
        for i, weight in enumerate(self.weights):
            shape = shape_under(weight, self._substitution)
            values = torch.randn(shape, generator=generator, dtype=torch.float64)
            sample[weight] = values * (_QUERIES[trial % 6] if i == 0 else 1.0)
        for leaf in self.region.leaves:
            if leaf not in sample:  # a vector of another query, which must not matter
                shape = shape_under(leaf, self._substitution)
                sample[leaf] = torch.randn(shape, generator=generator, dtype=torch.float64)
        return sample

    def judge(self, sample: Values, outputs: Sequence[torch.Tensor]) -> float:
        """The error of the mixture, after a look at which blocks count."""
        if self.learned is None:
            self.learned = self._counted(sample, outputs[0])
        got = outputs[0].reshape(-1, outputs[0].shape[-1])
        error = relative_error(got, self._mixed(sample, torch.float64))
        if not error < TOLERANCE:
            raise Mismatch(f"its output differs from an attention over {self._sizes['N']} sums by {error:.1e}")
        return error

    def _counted(self, sample: Values, output: torch.Tensor) -> tuple[tuple[bool, ...], ...]:
        """For each source which blocks move the output; all of them where nothing can be hidden."""
        counts = [source.count(self._substitution) for source in self.sources]
        if not self._hides:
            return tuple((True,) * count for count in counts)
        return tuple(
            tuple(self._moves(sample, output, source, i) for i in range(count))
            for source, count in zip(self.sources, counts, strict=True)
        )

    def _moves(self, sample: Values, output: torch.Tensor, source: Source, block: int) -> bool:
        changed = sample[source.leaf].clone()
        rows = changed if source.axis is None else changed.select(source.axis, block)
        rows.copy_(rows.flip(-1) * 3 + 1)
        (moved,) = run_in_float64(self.region, {**sample, source.leaf: changed}, self._substitution)
        return not torch.equal(moved, output)

    def build(self, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Both operators, or the first one and a quotient where there is no running sum."""
        old = value_of(self.region.outputs[0])
        mixed = self._mixed(dict(zip(self.region.leaves, leaves, strict=True)), old.dtype)
        return (self._as_output(mixed, dict(zip(self.region.leaves, leaves, strict=True))),)

    def _mixed(self, values: Values, dtype: torch.dtype) -> torch.Tensor:
        query = functools.reduce(operator.mul, (_as_query(values[w]) for w in self.weights))
        if self.scale != 1.0:
            query = query * self.scale
        bank = self._bank(values)
        maximum, total, mixture = torch.ops.k31.attn_res_prepare(bank, query.unsqueeze(0), eps=self.eps)
        maximum, total, mixture = maximum.select(1, 0), total.select(1, 0), mixture.select(1, 0)
        if self.partial is None:
            alone: torch.Tensor = mixture / total.unsqueeze(-1)
            return alone if alone.dtype == dtype else alone.to(dtype)
        partial = self.partial.row(values)
        joined: Sequence[torch.Tensor] = torch.ops.k31.attn_res_update(
            partial, None, maximum, total, mixture, query, eps=self.eps, dtype=dtype
        )
        return joined[1]

    def _bank(self, values: Values) -> torch.Tensor:
        """[M, N, D], the frozen sums that count."""
        assert self.learned is not None
        parts: list[torch.Tensor] = []
        for source, counted in zip(self.sources, self.learned, strict=True):
            if source is self.partial:
                if not all(counted):
                    raise Mismatch("the running sum does not count")
                continue
            parts += _those(source.rows(values), counted)
        if not parts:
            raise Mismatch("no frozen sum counts")
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _as_output(self, mixed: torch.Tensor, values: Values) -> torch.Tensor:
        """[M, D] in the shape of the author's output; its sizes come from a leaf, so that they stay symbols."""
        wanted = shape_of(self.region.outputs[0])
        leaf, axis = self.sources[-1].leaf, self.sources[-1].axis
        tokens = [s for d, s in enumerate(values[leaf].shape[:-1]) if d != axis]
        hints = [s for d, s in enumerate(shape_of(leaf)[:-1]) if d != axis]
        if [s for s in wanted[:-1] if s != 1] == [s for s in hints if s != 1]:
            long = [size for size, known in zip(tokens, hints, strict=True) if known != 1]
            sizes = [long.pop(0) if known != 1 else 1 for known in wanted[:-1]]
            return mixed.view(*sizes, mixed.shape[-1])
        if len([s for s in wanted[:-1] if s != 1]) > 1:
            raise ValueError("the replacement has the tokens in another order")
        for dim in range(len(wanted) - 2):
            mixed = mixed.unsqueeze(dim if wanted[dim] == 1 else 1)
        return mixed


def depth_readings(name: str, flow: Dataflow, region: Region, leaves: Sequence[fx.Node]) -> Iterator[DepthReading]:
    """Every way to read a region whose sources are `leaves` in the author's order."""
    width = shape_of(region.outputs[0])[-1]
    rows = [leaf for leaf in leaves if _holds_one(leaf, region.outputs[0])]
    partial = max(rows, key=lambda leaf: (_age(flow, leaf), leaves.index(leaf))) if rows else None
    weights = [leaf for leaf in region.leaves if leaf not in leaves]
    if len(leaves) + len(weights) != len(region.leaves) or not weights or _may_change_its_mask(region):
        return
    ordered = [leaf for leaf in leaves if leaf is not partial] + ([partial] if partial is not None else [])
    for sources in _axes(ordered, region.outputs[0]):
        last = sources[-1] if partial is not None else None
        for eps in _eps(region):
            for scale in _scales(region, width):
                for chosen in _vectors(weights):
                    yield DepthReading(name, region, sources, last, chosen, eps, scale)


def _vectors(weights: Sequence[fx.Node]) -> list[tuple[fx.Node, ...]]:
    """The vectors whose product may be the query: two, or one; where several queries are met at once there are more."""
    if len(weights) > _MOST_VECTORS:
        return []
    return [chosen for count in (_VECTORS, 1) for chosen in itertools.combinations(weights, count)]


def _axes(leaves: Sequence[fx.Node], out: fx.Node) -> Iterator[tuple[Source, ...]]:
    """Every dimension that may count the blocks, for each leaf that holds more than one."""
    if not leaves:
        yield ()
        return
    first, shape, tokens = leaves[0], shape_of(leaves[0]), [s for s in shape_of(out)[:-1] if s != 1]
    axes: list[int | None] = [None]
    if not _holds_one(first, out):
        axes = [d for d in (*range(len(shape) - 2, -1, -1),) if _without(shape, d) in (tokens, _product(tokens))]
        if len(tokens) == 1:
            count = tokens[0]
            axes += [
                d for d in range(len(shape) - 2, -1, -1) if d not in axes and _product(_without(shape, d)) == [count]
            ]
    for axis in axes:
        for others in _axes(leaves[1:], out):
            yield (Source(first, axis), *others)


def _without(shape: Sequence[int], dim: int) -> list[int]:
    return [s for d, s in enumerate(shape[:-1]) if d != dim and s != 1]


def _product(sizes: Sequence[int]) -> list[int]:
    return [_count(sizes)]


def _holds_one(leaf: fx.Node, out: fx.Node) -> bool:
    return numel_of(leaf) == numel_of(out)


def _age(flow: Dataflow, leaf: fx.Node) -> int:
    """The place of a computed value; what is given, or a part of it, is older than all of them."""
    node = leaf
    while is_view(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return -1 if node.op == "placeholder" else flow.position[leaf]


def _those(rows: torch.Tensor, counted: Sequence[bool]) -> list[torch.Tensor]:
    """The blocks of [M, n, D] that count: slices of neighbours."""
    if all(counted):
        return [rows]
    found: list[torch.Tensor] = []
    start: int | None = None
    for i, counts in enumerate((*counted, False)):
        if counts and start is None:
            start = i
        elif not counts and start is not None:
            found.append(rows.narrow(1, start, i - start))
            start = None
    return found


def _as_query(weight: torch.Tensor) -> torch.Tensor:
    wide = weight if weight.dtype in (torch.float64, torch.float32) else weight.to(torch.float32)
    return wide if wide.dim() == 1 else _viewed(wide, (wide.shape[-1],))


def _count(sizes: Sequence[int]) -> int:
    return functools.reduce(operator.mul, sizes, 1)


def _viewed(value: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A view where the strides allow one, else a copy."""
    try:
        return value.view(shape)
    except RuntimeError:
        return value.clone(memory_format=torch.contiguous_format).view(shape)


def _numbers(region: Region, *targets: object) -> list[float]:
    found = [a for n in region.nodes if n.target in targets for a in n.args if type(a) in (float, int)]
    return [float(a) for a in dict.fromkeys(found)]  # type: ignore[arg-type]


def _eps(region: Region) -> list[float]:
    """Small numbers that are added to something: one of them is the eps."""
    numbers = _numbers(region, ATEN.add.Tensor, ATEN.add.Scalar, ATEN.rms_norm.default, ATEN.clamp_min.default)
    return [number for number in numbers if 0 < number < 0.1][:4]


def _scales(region: Region, width: int) -> list[float]:
    """What the logits may be multiplied by: nothing, the usual root, or a number that stands in the region."""
    factors = _numbers(region, ATEN.mul.Tensor, ATEN.mul.Scalar)
    factors += [1 / number for number in _numbers(region, ATEN.div.Tensor, ATEN.div.Scalar) if number]
    attentions = [n for n in region.nodes if n.target is ATEN.scaled_dot_product_attention.default]
    factors += [float(n.kwargs["scale"]) for n in attentions if isinstance(n.kwargs.get("scale"), float)]  # type: ignore[arg-type]
    usual = [width**-0.5] if attentions else []
    return list(dict.fromkeys([*usual, 1.0, width**-0.5, *factors]))[:6]


def _is_constant_of(node: fx.Node, tokens: Sequence[int]) -> bool:
    """A tensor that no leaf made and that knows the number of tokens: it may mean more than a length."""
    if not is_tensor(node) or node.all_input_nodes:
        return False
    return any(size > _LARGE and size in tokens for size in shape_of(node))


def _may_change_its_mask(region: Region) -> bool:
    """Whether what is hidden may depend on a size that another call gives anew."""
    if not any(node.target in _HIDES for node in region.nodes):
        return False
    values = [value_of(source) for node in region.nodes for source in node.all_input_nodes]
    return any(isinstance(value, torch.SymInt | torch.SymBool | torch.SymFloat) for value in values)
