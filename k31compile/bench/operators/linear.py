"""Linear layers of few rows: weights that come from DRAM, read where they lie."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from k31compile.bench.case import Case, Form, Work
from k31compile.bench.compare import tensors_differ
from k31compile.bench.dtypes import short_name
from k31compile.bench.goals import Bound, Goals
from k31compile.targets.skinny_linears import SKINNY_LINEAR

_WIDTH, _LAYERS = 2048, 40  # 335 MB of weights: each comes from DRAM on every pass


def cases() -> list[Case]:
    """One to eight rows through a stack of layers; goals are for up to four in bfloat16."""
    held = Goals({"inductor": Bound(1.5, 1.4), "eager": Bound(None, 1.4)})
    made = []
    for dtype, all_rows in ((torch.bfloat16, (1, 2, 3, 4, 8)), (torch.float32, (1, 4, 8))):
        for rows in all_rows:
            label = short_name(dtype)
            case = f"{label} M={rows}, {_LAYERS} layers of {_WIDTH} x {_WIDTH}"
            goals = held if dtype == torch.bfloat16 and rows <= 4 else Goals()
            quick = (dtype, rows) == (torch.bfloat16, 1)
            make = partial(_make, dtype, rows)
            made.append(Case("skinny_linear", case, make, goals, f"skinny_linear {label}", rows, quick))
    return made


class Stack(nn.Module):
    """Square layers without bias, one after the other."""

    def __init__(self) -> None:
        """Weights that keep the size of what goes through them."""
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(_LAYERS))
        for layer in self.layers:
            nn.init.normal_(layer.weight, std=_WIDTH**-0.5)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        """[M, D] -> [M, D]."""
        for layer in self.layers:
            x = layer(x)
        return x


def _make(dtype: torch.dtype, rows: int) -> Work:
    x, stack = torch.randn(rows, _WIDTH).to(dtype), Stack().to(dtype).eval()
    weights = [layer.weight for layer in stack.layers]

    def ours() -> Tensor:
        y = x
        for weight in weights:
            y = SKINNY_LINEAR(y, weight, None)
        return y

    expected = x.float()
    for weight in weights:
        expected = expected @ weight.detach().float().T  # type: ignore[operator]

    def check(result: Any, tolerance: float) -> str | None:
        return tensors_differ(result, expected, tolerance)

    allowed = 5e-2 if dtype == torch.bfloat16 else 1e-4
    return Work(ours, [Form("", stack, lambda function: lambda: function(x))], check, allowed, allowed)
