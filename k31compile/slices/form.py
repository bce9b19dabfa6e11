"""What a slice was confirmed to be: which place holds which operand of the routed experts, and for which calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import k31compile.kernels  # noqa: F401  (registers the operators)
from k31compile.passes.recognise.experts_reading import Activation
from k31compile.slices.held import Place, text_of

OPERATOR = "grouped_experts"


@dataclass(frozen=True)
class Matrices:
    """One projection: a stack at one place or a matrix an expert, transposed or not, whole or one half of it."""

    places: tuple[Place, ...]
    transposed: bool
    half: int | None = None

    def views(self, tensors: Mapping[Place, torch.Tensor]) -> list[torch.Tensor]:
        """[E, out, in], or E times [out, in]."""
        return [self._view(tensors[place]) for place in self.places]

    def _view(self, stored: torch.Tensor) -> torch.Tensor:
        whole = stored.mT if self.transposed else stored
        return whole if self.half is None else whole.chunk(2, dim=-2)[self.half]


@dataclass(frozen=True)
class Counted:
    """Numbers among the arguments that count tokens: each of `batch` times each of `length` is all of them."""

    batch: tuple[Place, ...] = ()
    length: tuple[Place, ...] = ()


@dataclass(frozen=True)
class Evidence:
    """What a confirmation ran."""

    samples: int
    tokens: tuple[int, ...]
    worst_error: float


@dataclass(frozen=True)
class Form:
    """A slice read as routed experts (K3.1 spec 2.18).

    Attributes:
        x, experts, weights: tokens [.., L], their experts and the weights of these [.., k]; of all where `spread`.
        gate, up, down: the projections.
        activation: what stands between them.
        shaped_as: the operand whose leading sizes the result has.
        dtype: of the result.
        counted: the numbers it was given that count tokens.
        only: the one batch and length it serves, where the numbers that it was given could not be told apart.

    """

    x: Place
    experts: Place
    weights: Place
    spread: bool
    gate: Matrices
    up: Matrices
    down: Matrices
    activation: Activation
    shaped_as: Place
    dtype: torch.dtype
    counted: Counted
    only: tuple[int, ...] | None
    evidence: Evidence

    @property
    def places(self) -> tuple[Place, ...]:
        """Every place that is read, each once."""
        projections = (self.gate, self.up, self.down)
        matrices = [place for part in projections for place in part.places]
        return tuple(dict.fromkeys([self.x, self.experts, self.weights, *matrices]))

    def program(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """What the slice gives, by the operator; the tensors are those of `places`."""
        values = dict(zip(self.places, tensors, strict=True))
        rows = [values[place].reshape(-1, values[place].shape[-1]) for place in (self.x, self.experts, self.weights)]
        if self.spread:
            rows[2] = rows[2].gather(1, rows[1].long())
        result: torch.Tensor = torch.ops.k31.grouped_experts(
            *rows,
            self.gate.views(values),
            self.up.views(values),
            self.down.views(values),
            activation=self.activation.activation,
            situ_beta=self.activation.situ_beta,
            linear_beta=self.activation.linear_beta,
        )
        lead = values[self.shaped_as].shape[:-1]
        return result.to(self.dtype).reshape(*lead, result.shape[-1])

    def fits(self, lead: Sequence[Any]) -> bool:
        """Whether it holds for tokens of these leading sizes."""
        given = tuple(lead) if len(lead) > 1 else (1, *lead)
        return self.only is None or (all(isinstance(size, int) for size in given) and given == self.only)

    def to_dict(self) -> dict[str, Any]:
        """What a report says of it, as plain JSON values."""
        seen = self.evidence
        return {
            "operands": {
                "x": text_of(self.x),
                "expert_idx": text_of(self.experts),
                "weights": text_of(self.weights),
                **{name: text_of(part.places[0]) for name, part in self._projections()},
            },
            "activation": self.activation.activation,
            "samples": seen.samples,
            "lengths": list(seen.tokens),
            "worst_error": seen.worst_error,
        }

    def _projections(self) -> list[tuple[str, Matrices]]:
        return [("gate_proj", self.gate), ("up_proj", self.up), ("down_proj", self.down)]
