"""A slice as a reading of the routed experts: it is called, where a region would be run node by node."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from k31compile.graph.confirm import Mismatch, Sample, allowed_bytes
from k31compile.graph.region import Region
from k31compile.graph.sizes import Substitution, hint
from k31compile.leaves.form import leaf_nodes
from k31compile.passes.recognise.experts_reading import (
    Activation,
    ExpertOperands,
    ExpertsReading,
    Projection,
    activations,
    bounds_among,
)
from k31compile.passes.recognise.operands import Values
from k31compile.slices.call import Numbers, SliceCall
from k31compile.slices.form import Matrices
from k31compile.slices.held import Place
from k31compile.slices.roles import Roles

_SMALL_WIDTH, _SMALL_INNER, _SMALL_OUT = 20, 12, 28


class CalledExperts(ExpertsReading):
    """One reading at one number of tokens; samples and judgement are those of a region."""

    def __init__(
        self, call: SliceCall, roles: Roles, lead: tuple[int, ...], numbers: Numbers, *, small: bool, trials: int
    ) -> None:
        """`lead` is batch and length of the tokens, `numbers` what goes with them; `small` where experts are shrunk."""
        self.call, self.roles, self.lead, self.numbers, self.trials = call, roles, lead, numbers, trials
        self.tokens, self.small = math.prod(lead), small
        self.nodes = self._nodes()
        gate, up, down = map(self._projection, roles.projections)
        rows = self.nodes[roles.rows.x], self.nodes[roles.rows.experts], self.nodes[roles.rows.weights]
        operands = ExpertOperands(*rows, gate, up, down)
        region = Region(tuple(self.nodes.values()), (operands.x,), ())
        super().__init__(region, operands, roles.rows.experts in call.distinct)
        self._bounds = bounds_among(call.floats())
        self._activations = activations(self._bounds if "tanh" in call.names() else None)
        self._outside = [*([] if self.distinct else [-1]), operands.count, 2 * operands.count + 1]

    def knowing(self, learned: Activation) -> CalledExperts:
        """The same where the activation is known."""
        self._activations = [learned]
        return self

    def _projection(self, part: Matrices) -> Projection:
        return Projection(tuple(self.nodes[place] for place in part.places), part.transposed, part.half)

    def _nodes(self) -> dict[Place, fx.Node]:
        rows, tensors = self.roles.rows, self.call.held.tensors
        slots = hint(tensors[rows.experts].shape[-1])
        width, matrices = small_shapes(self.roles, tensors) if self.small else real_shapes(self.roles, tensors)
        if 8 * sum(map(math.prod, matrices.values())) > allowed_bytes() // 4:
            raise Mismatch("its experts are too large to be run, and cannot be run on smaller ones")
        shapes: dict[Place, tuple[int, ...]] = {
            rows.x: (self.tokens, width),
            rows.experts: (self.tokens, slots),
            rows.weights: (self.tokens, slots),
            **matrices,
        }
        nodes = leaf_nodes({f"t{i}": len(shape) for i, shape in enumerate(shapes.values())})
        for (place, shape), node in zip(shapes.items(), nodes.values(), strict=True):
            node.meta["val"] = torch.empty(shape, dtype=tensors[place].dtype, device="meta")
        return dict(zip(shapes, nodes.values(), strict=True))

    def substitutions(self) -> list[Substitution]:
        """The sizes are chosen already."""
        return [{}]

    def _inside(self) -> int:
        return self.trials

    def _experts(self, trial: int) -> torch.Tensor:
        """Integers [N, k]; in every third trial one choice for all tokens, so that an expert's capacity would show."""
        experts = super()._experts(trial)
        if trial % 3 == 1 and trial < self.trials:
            experts = experts[:1].expand_as(experts).clone()
        return experts

    def values(self, sample: Mapping[fx.Node, torch.Tensor]) -> dict[Place, torch.Tensor]:
        """A sample by place, tokens with as many leading sizes as those of the call."""
        values = {place: sample[node] for place, node in self.nodes.items()}
        if self.roles.rows.spread:
            values[self.roles.rows.weights] = self._spread(values)
        for place in (self.roles.rows.x, self.roles.rows.experts, self.roles.rows.weights):
            if self.call.held.tensors[place].dim() > 2:
                values[place] = values[place].reshape(*self.lead, values[place].shape[-1])
        return values

    def _spread(self, values: Mapping[Place, torch.Tensor]) -> torch.Tensor:
        """Weights of every expert; those of experts that a token did not choose must not matter."""
        weights, experts = values[self.roles.rows.weights], values[self.roles.rows.experts].long()
        generator = torch.Generator().manual_seed(31)
        all_weights = torch.randn((self.tokens, self.operands.count), generator=generator, dtype=weights.dtype)
        return all_weights.scatter(1, experts, weights)

    def in_own_types(self, trial: int) -> dict[Place, torch.Tensor]:
        """A sample by place, in the types of the call."""
        self.begin({})
        values = self.values(self.sample(torch.Generator().manual_seed(17 + trial), 0))
        return {place: value.to(self.call.held.tensors[place].dtype) for place, value in values.items()}

    def run(self, sample: Sample, substitution: Substitution, trial: int) -> Sequence[torch.Tensor]:
        """What the slice gives for a sample; nothing where it rejects numbers that are no expert's."""
        try:
            result = self.call.run_in_float64(self.values(sample), self.numbers)
        except (IndexError, RuntimeError):
            if trial < self.trials:
                raise
            return ()
        return [self.as_rows(result)]

    def judge(self, sample: Values, outputs: Sequence[torch.Tensor]) -> float:
        """As of a region; where a number is below 0 an author may count from the end, which the operator does not."""
        try:
            return super().judge(sample, outputs)
        except Mismatch:
            experts = sample[self.operands.experts]
            if not bool((experts < 0).any()):
                raise
            return super().judge({**sample, self.operands.experts: experts % self.operands.count}, outputs)

    def as_rows(self, result: object) -> torch.Tensor:
        """A result as one row for each token.

        Raises:
            Mismatch: it is something else.
        """
        if not isinstance(result, torch.Tensor):
            raise Mismatch(f"it gives a {type(result).__name__}, not a tensor")
        down = self.operands.down
        width = self._shapes[down.source[0]][-1 if down.transposed else -2]
        if result.shape[-1:] != (width,) or result.numel() != self.tokens * width:
            raise Mismatch(f"it gives {list(result.shape)} for {self.tokens} tokens")
        return result.reshape(self.tokens, width)


def real_shapes(roles: Roles, tensors: Mapping[Place, torch.Tensor]) -> tuple[int, dict[Place, tuple[int, ...]]]:
    """The width of the tokens and the shapes of the matrices, as they are."""
    shapes = {place: tuple(map(hint, tensors[place].shape)) for part in roles.projections for place in part.places}
    return hint(tensors[roles.rows.x].shape[-1]), shapes


def small_shapes(roles: Roles, tensors: Mapping[Place, torch.Tensor]) -> tuple[int, dict[Place, tuple[int, ...]]]:
    """The same for smaller experts of as many."""
    _, (width, inner, out) = small_ends(roles, tensors)
    shapes: dict[Place, tuple[int, ...]] = {}
    for part in roles.projections:
        ends = (out, inner) if part is roles.down else (inner, width)
        if part.half is not None:
            ends = (2 * ends[0], ends[1])
        for place in part.places:
            stacked = tuple(map(hint, tensors[place].shape[:-2]))
            shapes[place] = (*stacked, *(ends[::-1] if part.transposed else ends))
    return width, shapes


def small_ends(roles: Roles, tensors: Mapping[Place, torch.Tensor]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Width, inner size and size of the result of an expert: as they are, and small."""
    width = hint(tensors[roles.rows.x].shape[-1])
    out, inner = _out_and_in(roles.down, tensors)
    less = min(width, _SMALL_WIDTH)
    return (width, inner, out), (less, min(inner, _SMALL_INNER), less if out == width else min(out, _SMALL_OUT))


def _out_and_in(part: Matrices, tensors: Mapping[Place, torch.Tensor]) -> tuple[int, int]:
    out, inside = (hint(size) for size in tensors[part.places[0]].shape[-2:])
    return (inside, out) if part.transposed else (out, inside)
