"""Counts selections whose edge is a tie: there torch.topk may take any of the equal keys, and k31 takes the lower."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class TieCounter(TorchDispatchMode):
    """Watches every top-k of `width`: rows in which the best key left out scores as much as the worst one chosen."""

    def __init__(self, width: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.width, self.rows, self.tied = width, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.topk.default and args[1] == self.width and args[0].shape[-1] > self.width:
            best = args[0].reshape(-1, args[0].shape[-1]).topk(self.width + 1).values
            decided = best[:, -1] > -torch.inf
            self.rows += int(decided.sum())
            self.tied += int((decided & (best[:, -1] == best[:, -2])).sum())
        return func(*args, **(kwargs or {}))
