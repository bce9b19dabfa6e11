"""The RMS norm that reads an attention over depth goes into its update (K3.1 spec 2.1, 2.2): one pass over a row.

Float64 shows that it is that norm; a run in the author's dtypes shows that it rounds where the operator rounds.
"""

import functools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import fx

from k31compile.graph.confirm import TOLERANCE, Mismatch, Reading, relative_error
from k31compile.graph.dataflow import ATEN, Dataflow
from k31compile.graph.evaluate import run_as_written
from k31compile.graph.region import Region
from k31compile.graph.sizes import Substitution, is_float, shape_of, shape_under, symbols_of, value_of
from k31compile.passes.recognise.depth_additions import UPDATE
from k31compile.passes.recognise.engine import Demand, Recogniser, outside_users
from k31compile.passes.recognise.norm_reading import SHARE, share_of_equal
from k31compile.passes.recognise.norms import Norm, before_casts, ends_of, norm_of, small_constants
from k31compile.passes.recognise.operands import Values, spread

_SQUARES = {ATEN.square.default, ATEN.pow.Tensor_Scalar, ATEN.mul.Tensor}
_MOST_ENDS = 3
_SAMPLES = 5
_ROUNDED_ROWS = 64


class DepthNormRecogniser(Recogniser):
    """Anchored on the root of a mean of squares of the rows that an update mixed."""

    name = "attn_res_update"

    def anchors(self, flow: Dataflow) -> Iterable[fx.Node]:
        """The roots over the rows of an update that normalises nothing yet."""
        return [node for node in flow.nodes if _mixed_below(flow, node) is not None]

    def demands(self, flow: Dataflow, anchor: fx.Node) -> Iterator[Demand]:
        """From the mixed rows to the last product or cast of the norm alone."""
        norm, mixed = norm_of(flow, anchor), _mixed_below(flow, anchor)
        assert norm is not None
        assert mixed is not None
        for end in ends_of(norm)[::-1][:_MOST_ENDS]:
            if value_of(end).dtype == value_of(mixed).dtype:
                core = {norm.squares, *flow.between([norm.squares], [end])}
                yield Demand((end,), frozenset(core), functools.partial(_may_be_weight, norm), (mixed,))

    def variants(self, flow: Dataflow, leaves: tuple[fx.Node, ...]) -> Iterator[tuple[fx.Node, ...]]:
        """The weight before its cast, then as found."""
        before = tuple(before_casts(leaf) for leaf in leaves)
        if before != leaves:
            yield before
        yield leaves

    def readings(self, flow: Dataflow, anchor: fx.Node, region: Region) -> Iterator[Reading]:
        """One weight beside the mixed rows; which small number is eps is told by running."""
        mixed = _mixed_below(flow, anchor)
        others = [leaf for leaf in region.leaves if leaf is not mixed]
        if mixed is None or mixed not in region.leaves or len(others) != 1:
            return
        for eps in small_constants(region):
            yield DepthNormReading(region, mixed, others[0], eps)

    def guards(self, flow: Dataflow, region: Region, reading: Reading) -> None:
        """Nobody else reads the rows before they are normalised: the operator does not give them then."""
        assert isinstance(reading, DepthNormReading)
        inner = [reading.mixed, *region.nodes]
        if outside_users(flow, inner, region.outputs):
            raise Mismatch("the rows are also read before they are normalised")

    def resembles(self, flow: Dataflow, anchor: fx.Node) -> bool:
        """Never: an update whose norm stays behind it is fused all the same."""
        return False


class DepthNormReading(Reading):
    """The mixed rows and the weight of the norm behind them."""

    def __init__(self, region: Region, mixed: fx.Node, weight: fx.Node, eps: float) -> None:
        """One assignment, not yet confirmed."""
        self.name, self.region, self.mixed, self.weight, self.eps = "attn_res_update", region, mixed, weight, eps
        update = mixed.args[0]
        assert isinstance(update, fx.Node)
        self.update = update
        self.extra_operands = tuple(node for node in update.args if isinstance(node, fx.Node))
        sums = [user for user in update.users if user.target is operator.getitem and user.args[1] == 0]
        self._sums = tuple(sums[:1])

    @property
    def replaced(self) -> tuple[fx.Node, ...]:
        """The normalised rows, and the running sum where somebody reads it."""
        return (*self.region.outputs, *self._sums)

    def substitutions(self) -> list[Substitution]:
        """Symbols made small and odd."""
        return [{symbol: 3 + 2 * i for i, symbol in enumerate(symbols_of(value_of(self.mixed).shape))}]

    def begin(self, substitution: Substitution) -> None:
        """Take these sizes."""
        self._substitution, self._trial = substitution, 0

    def samples(self) -> int:
        """Five: magnitudes differ from row to row in each."""
        return _SAMPLES

    def sizes(self) -> Mapping[str, int]:
        """Rows and their width."""
        rows, width = shape_under(self.mixed, self._substitution)
        return {"M": rows, "D": width}

    def sample(self, generator: torch.Generator, trial: int) -> dict[fx.Node, torch.Tensor]:
        """Rows over ten decades, so that eps is nothing in some and everything in others; one of zeros."""
        self._trial = trial
        rows = spread(shape_under(self.mixed, self._substitution), generator, 5.0, 1)
        if trial == 1:
            rows[0] = 0
        weight = shape_under(self.weight, self._substitution)
        return {self.mixed: rows, self.weight: spread(weight, generator, 1.0, len(weight))}

    def judge(self, sample: Values, outputs: Sequence[torch.Tensor]) -> float:
        """The error against the norm; the last sample is followed by a run in the author's dtypes.

        Raises:
            Mismatch: it is another norm, or one that rounds elsewhere.
        """
        expected = _normalised(sample[self.mixed], sample[self.weight], self.eps)
        if expected.numel() != outputs[0].numel():
            raise Mismatch("its result does not have the size of the rows")
        error = relative_error(outputs[0].reshape(expected.shape), expected)
        if not error < TOLERANCE:
            raise Mismatch(f"its output differs from an RMS norm by {error:.1e} of its size")
        if self._trial == _SAMPLES - 1 and self._share_of_equal_bits() < SHARE:
            raise Mismatch("the norm behind rounds elsewhere than the operator does")
        return error

    def _share_of_equal_bits(self) -> float:
        generator = torch.Generator().manual_seed(31)
        shape = shape_under(self.mixed, self._substitution)
        shares = []
        for _ in range(-(-_ROUNDED_ROWS // shape[0])):
            values = {
                self.mixed: spread(shape, generator, 1.0, 1),
                self.weight: 1 + 0.3 * spread(shape_under(self.weight, self._substitution), generator, 0.1, 0),
            }
            values = {leaf: drawn.to(value_of(leaf).dtype) for leaf, drawn in values.items()}
            theirs = run_as_written(self.region, values, self._substitution)[0]
            mine = _normalised(values[self.mixed], values[self.weight], self.eps)
            shares.append(share_of_equal(self.region, mine.reshape(theirs.shape), theirs))
        return sum(shares) / len(shares) if min(shares) > 0 else 0.0

    def build(self, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The update again, with the norm; its rows in the author's shape."""
        values = dict(zip((*self.region.leaves, *self.extra_operands), leaves, strict=True))
        arguments = [values[node] if isinstance(node, fx.Node) else node for node in self.update.args]
        given: dict[str, Any] = {**self.update.kwargs, "norm_weight": values[self.weight].reshape(-1)}
        total, normed = UPDATE(*arguments, **given, norm_eps=self.eps)
        normed = normed.reshape(value_of(self.region.outputs[0]).shape)
        return (normed, total) if self._sums else (normed,)


def _normalised(rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """What the operator makes of its rounded rows; see `attn_res_update_reference`."""
    wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
    h = rows.to(wide)
    return (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps) * weight.reshape(-1).to(wide)).to(rows.dtype)


def _mixed_below(flow: Dataflow, anchor: fx.Node) -> fx.Node | None:
    """The mixed rows of an update, whole, whose norm the anchor is the root of."""
    norm = norm_of(flow, anchor)
    if norm is None:
        return None
    node = before_casts(_squared(norm.rows), with_views=True)
    update = node.args[0] if node.target is operator.getitem else None
    is_mixed = isinstance(update, fx.Node) and update.target is UPDATE and node.args[1] == 1
    if not is_mixed or not isinstance(update, fx.Node) or update.kwargs.get("norm_weight") is not None:
        return None
    return node if shape_of(node)[-1] == norm.width else None


def _squared(node: fx.Node) -> fx.Node:
    """What is squared: by name, as a power, or as a product with itself."""
    sources = [source for source in node.all_input_nodes if is_float(source)]
    return sources[0] if len(set(sources)) == 1 and node.target in _SQUARES else node


def _may_be_weight(norm: Norm, node: fx.Node) -> bool:
    """Whether a value is one row of numbers."""
    return is_float(node) and prod(shape_of(node)) == norm.width and shape_of(node)[-1] == norm.width
