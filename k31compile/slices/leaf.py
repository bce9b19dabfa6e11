"""A confirmed slice as one node of Dynamo's graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from k31compile.leaves.leaf import Kept, digest_texts
from k31compile.slices.form import OPERATOR, Evidence, Form

LOOP = "loop over data"
"""Why a slice is kept whole, as reports say it."""


@dataclass(frozen=True)
class SliceLeaf(Kept):
    """Statements of a function, kept whole.

    A graph that is not rewritten keeps the operator too: what was written is a loop that no graph can hold.
    """

    function: str
    where: str
    key: str
    form: Form

    def target(self) -> Callable[..., Any]:
        """What stands in the graph: takes the tensors of the form's places."""
        form = self.form

        def leaf(*tensors: torch.Tensor) -> torch.Tensor:
            return form.program(tensors)

        leaf.__name__ = leaf.__qualname__ = "k31_leaf_experts"
        leaf.k31_leaf = self  # type: ignore[attr-defined]
        leaf.k31_digest = self.digest()  # type: ignore[attr-defined]
        return leaf

    def identity(self) -> str:
        """Equal for calls that differ in sizes alone."""
        return f"{self.where} {self.key}"

    def digest(self) -> str:
        """A hash of the statements, of what they were called with, and of the form that they were confirmed to have."""
        return digest_texts(self.key, repr(replace(self.form, evidence=Evidence(0, (), 0.0))))

    def to_dict(self) -> dict[str, Any]:
        """What a report says of it, as plain JSON values."""
        return {
            "function": self.function,
            "where": self.where,
            "operator": OPERATOR,
            "why": LOOP,
            **self.form.to_dict(),
            "text": f"confirmed on {self.form.evidence.samples} samples in float64, by calling it",
        }
