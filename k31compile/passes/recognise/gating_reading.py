"""One assignment of leaves to logits and bias of a router: samples, comparison, operator (K3.1 spec 2.18)."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from k31compile.graph.confirm import TOLERANCE, Mismatch, Reading, relative_error
from k31compile.graph.constants import plain_floats
from k31compile.graph.dataflow import ATEN
from k31compile.graph.portable import portable
from k31compile.graph.region import Region
from k31compile.graph.sizes import Substitution, numel_of, shape_of, shape_under, symbols_of, value_of
from k31compile.kernels.expert_checks import GROUP_MAXIMUM, GROUP_TWO_BEST, SIGMOID, SOFTMAX
from k31compile.passes.recognise.operands import Values, in_dtype
from k31compile.passes.recognise.selection import Selection

_ROWS = 256
_MOST_SAMPLES = 64
_SMALL_ROWS, _LARGE_ROWS = 37, 64
_SMALLEST_EPS = (1e-20, 0.0)
_BOUNDS = {ATEN.clamp_min.default, ATEN.clamp.default, ATEN.maximum.default}


@portable
@dataclass(frozen=True)
class GatingForm:
    """The options of the operator that a region may have; `eps` None where its weights are not renormalised.

    With a `floor` raw weights are divided by their sum or by that, behind the operator, as `F.normalize` does.
    """

    norm_type: int
    group_count: int
    k_group: int
    group_select_mode: int
    eps: float | None
    floor: float | None = None
    factor: float | None = None

    def run(self, logits: torch.Tensor, bias: torch.Tensor | None, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The operator on logits [N, E]."""
        weights, experts = torch.ops.k31.moe_gating_top_k(
            logits,
            k,
            bias=bias,
            k_group=self.k_group,
            group_count=self.group_count,
            group_select_mode=self.group_select_mode,
            renorm=self.eps is not None,
            norm_type=self.norm_type,
            routed_scaling_factor=1.0 if self.factor is None or self.floor is not None else self.factor,
            eps=_SMALLEST_EPS[0] if self.eps is None else self.eps,
        )
        if self.floor is not None:
            weights = weights / weights.sum(-1, keepdim=True).clamp_min(self.floor)
            weights = weights if self.factor is None else weights * self.factor
        return weights, experts


class GatingReading(Reading):
    """Logits, and a bias or none; which form of the operator it is, the runs tell."""

    name = "moe_gating_top_k"

    def __init__(self, region: Region, selection: Selection, logits: fx.Node, bias: fx.Node | None) -> None:
        """One assignment, not yet confirmed."""
        self.region, self.selection, self.logits, self.bias = region, selection, logits, bias
        self.learned: GatingForm | None = None
        self._forms = list(_forms(region, shape_of(logits)[-1], int(selection.count)))
        # A row over all experts, zero where not chosen.
        self._is_dense = shape_of(region.outputs[0]) != shape_of(region.outputs[1])

    @property
    def replaced(self) -> tuple[fx.Node, ...]:
        """Weights and experts."""
        return self.region.outputs

    def substitutions(self) -> list[Substitution]:
        """Symbols made small and odd; and fewer rows first, where their number means nothing else."""
        shape = shape_of(self.logits)
        symbols = {symbol: 5 + 2 * i for i, symbol in enumerate(symbols_of(value_of(self.logits).shape))}
        rows, experts = shape[0], shape[-1]
        fewer = {rows: _SMALL_ROWS}
        others = {size for node in self.region.nodes for size in shape_of(node) if size % rows}
        for size in others:
            fewer.setdefault(rows * size, _SMALL_ROWS * size)
        if len(shape) != 2 or rows <= _LARGE_ROWS or experts % rows == 0 or set(fewer) & others:
            return [symbols]
        return [{**symbols, **fewer}, symbols]

    def begin(self, substitution: Substitution) -> None:
        """Take these sizes; every form is possible again."""
        self._shape = shape_under(self.logits, substitution)
        self._possible = list(self._forms)
        self.learned = None

    def sizes(self) -> Mapping[str, int]:
        """N, E, k."""
        rows = numel_of_shape(self._shape[:-1])
        return {"N": rows, "E": self._shape[-1], "K": int(self.selection.count)}

    def samples(self) -> int:
        """More where each has few rows: a group that is left out shows in some rows only."""
        return max(5, min(_MOST_SAMPLES, _ROWS // self.sizes()["N"]))

    def sample(self, generator: torch.Generator, trial: int) -> dict[fx.Node, torch.Tensor]:
        """Logits over decades, whole rows down to where an eps is all of the sum; biases below and above the scores."""
        logits = torch.randn(self._shape, generator=generator, dtype=torch.float64)
        lead = (*self._shape[:-1], 1)
        decades = torch.rand(lead, generator=generator, dtype=torch.float64) * 2.5 - 1.5
        low = -75.0 * torch.rand(lead, generator=generator, dtype=torch.float64)
        is_low = torch.rand(lead, generator=generator, dtype=torch.float64) < 0.3
        # Above 20 sigmoids of different logits are the same number, and which of equal ones is best is open: a row that
        # reaches further is moved as a whole, since several of many experts would meet at a bound.
        rows = logits * 10**decades + low * is_low
        sample = {self.logits: rows - (rows.amax(-1, keepdim=True) - 20.0).clamp_min(0.0)}
        if self.bias is not None:
            size, shift = ((0.3, 0.0), (3.0, 0.0), (0.02, 0.0), (0.3, -1.0), (30.0, 0.0))[trial % 5]
            bias = torch.randn(self._shape[-1], generator=generator, dtype=torch.float64) * size + shift
            sample[self.bias] = bias.view(shape_of(self.bias))
        return sample

    def judge(self, sample: Values, outputs: Sequence[torch.Tensor]) -> float:
        """Keep the forms that give these experts, in their order where it was promised, with these weights."""
        k = int(self.selection.count)
        experts = outputs[1].reshape(-1, k)
        weights = outputs[0].reshape(len(experts), -1)
        logits = sample[self.logits].reshape(-1, self._shape[-1])
        bias = sample[self.bias].reshape(-1) if self.bias is not None else None
        worst, kept = 0.0, []
        self._differs = "the experts that it chooses"
        for form in self._possible:
            known, error = self._compare(form, logits, bias, weights, experts)
            if known is not None:
                kept.append(known)
                worst = max(worst, error) if len(kept) == 1 else worst
        if not kept:
            raise Mismatch(f"{self._differs} are not those of a sigmoid or softmax router")
        self._possible, self.learned = kept, kept[0]
        return worst

    def _compare(
        self,
        form: GatingForm,
        logits: torch.Tensor,
        bias: torch.Tensor | None,
        weights: torch.Tensor,
        experts: torch.Tensor,
    ) -> tuple[GatingForm | None, float]:
        expected, chosen = form.run(logits, bias, experts.shape[1])
        if self.selection.sorted:
            same = torch.equal(chosen.long(), experts.long())
        else:
            same = torch.equal(chosen.long().sort(-1).values, experts.long().sort(-1).values)
        if not same:
            return None, 0.0
        if self._is_dense or not self.selection.sorted:
            expected = torch.zeros_like(logits).scatter(1, chosen.long(), expected)
            if not self._is_dense:
                weights = torch.zeros_like(logits).scatter(1, experts.long(), weights)
        self._differs = "the weights of its experts"
        if form.factor is None:
            # twelve digits: what an author writes as one factor or another has no more in common
            top = expected.argmax(1, keepdim=True)
            ratios = weights.gather(1, top) / expected.gather(1, top)
            factor = float(f"{float(ratios.nanmedian()):.12g}")
            form, expected = replace(form, factor=factor), expected * factor
        error = relative_error(weights, expected)
        return (form, error) if error < TOLERANCE and form.factor else (None, 0.0)

    def build(self, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The operator, its results in the shapes and dtypes of the author's."""
        assert self.learned is not None
        values = dict(zip(self.region.leaves, leaves, strict=True))
        logits = values[self.logits]
        bias = values[self.bias] if self.bias is not None else None
        bias = bias.flatten() if bias is not None and bias.dim() > 1 else bias
        k = int(self.selection.count)
        rows = logits if logits.dim() == 2 else logits.flatten(0, -2)
        weights, experts = self.learned.run(rows, bias, k)
        old = [value_of(output) for output in self.region.outputs]
        weights, experts = in_dtype(weights, old[0].dtype), in_dtype(experts, old[1].dtype)
        if old[1].dim() != 2:
            weights, experts = (result.view(*logits.shape[:-1], k) for result in (weights, experts))
        if self._is_dense:
            empty = torch.zeros_like(logits if experts.dim() > 2 else rows, dtype=weights.dtype)
            weights = empty.scatter(-1, experts.long(), weights)
            weights = weights.view(logits.shape) if old[0].dim() > 2 else weights.flatten(0, -2)
        return weights, experts


def numel_of_shape(shape: Sequence[int]) -> int:
    """The number of elements of a tensor of this shape."""
    return torch.Size(shape).numel()


def _forms(region: Region, experts: int, k: int) -> Iterator[GatingForm]:
    """Every form that the region's shapes and constants leave possible, plain ones first."""
    numbers = plain_floats(region.nodes)
    small = (number for number in numbers if 0 < number < 1e-2)
    bounded = any(node.target in _BOUNDS for node in region.nodes)
    sums: list[tuple[float | None, float | None]] = [(eps, None) for eps in dict.fromkeys([*_SMALLEST_EPS, *small])]
    sums += [(None, number) for number in dict.fromkeys(numbers) if bounded and 0 < number < 1]
    for norm, groups, (eps, floor) in itertools.product(
        (SIGMOID, SOFTMAX), _groups(region, experts, k), [*sums, (None, None)]
    ):
        yield GatingForm(norm, *groups, eps, floor)


def _groups(region: Region, experts: int, k: int) -> Iterator[tuple[int, int, int]]:
    """`(group_count, k_group, group_select_mode)` as the shapes suggest; all k experts must be in the kept groups."""
    yield 1, 1, GROUP_TWO_BEST
    shapes = [shape_of(node) for node in region.nodes if numel_of(node)]
    sizes = {size for shape in shapes for size in shape}
    counts = {shape[-2] for shape in shapes if len(shape) > 1 and shape[-2] * shape[-1] == experts}
    for count in sorted(counts - {1, experts}):
        for kept in range(1, count):
            if kept in sizes and k <= kept * (experts // count):
                yield count, kept, GROUP_TWO_BEST
                yield count, kept, GROUP_MAXIMUM
