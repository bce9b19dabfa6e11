"""How an author holds the gate of a delta rule: as logarithms in some unit or as decays, with heads or without."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from k31compile.graph.sizes import shape_of
from k31compile.passes.recognise.operands import Dense, Values


@dataclass(frozen=True)
class GateForm:
    """Logarithms in units of `unit`, or the decays themselves."""

    unit: float = 1.0
    is_decay: bool = False

    def held(self, logarithms: torch.Tensor) -> torch.Tensor:
        """Natural logarithms of decays as the author holds them."""
        return logarithms.exp() if self.is_decay else logarithms / self.unit

    def logarithms(self, held: torch.Tensor) -> torch.Tensor:
        """The inverse of `held`; a decay of zero gives -inf, which the operators take as forgetting all."""
        if self.is_decay:
            return (held if held.dtype is torch.float64 else held.float()).log()
        return held if self.unit == 1.0 else held * self.unit


@dataclass(frozen=True)
class FlatGate(Dense):
    """A gate whose heads are split after its exponential: its layout has the letter w for h and k, in either order."""

    width: int
    heads_last: bool = False

    def place(self, canonical: torch.Tensor) -> dict[fx.Node, torch.Tensor]:
        """The leaf's value for a canonical gate [B, T, H, K]."""
        ordered = canonical.transpose(2, 3) if self.heads_last else canonical
        return super().place(ordered.flatten(2))

    def canonical(self, values: Values) -> torch.Tensor:
        """The gate with its heads split, [B, T, H, K]."""
        flat = super().canonical(values)
        heads = flat.shape[2] // self.width
        if self.heads_last:
            return flat.reshape(*flat.shape[:2], self.width, heads).transpose(2, 3)
        return flat.reshape(*flat.shape[:2], heads, self.width)


def is_flat_gate(node: fx.Node, exponentials: Sequence[fx.Node], product: fx.Node | None) -> bool:
    """Whether exponentials are taken of the node, and its last dimension holds the heads of a state and one side."""
    if product is None or not shape_of(node) or not any(node in one.all_input_nodes for one in exponentials):
        return False
    *batches, first, second = shape_of(product)
    last = shape_of(node)[-1]
    return any(last == heads * side for heads in batches for side in (first, second) if heads > 1 and side > 1)
