"""Attention over depth: the steps of one block of 12, width 7168, 8 frozen sums, in the dtype of the stream."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from k31compile.bench.case import Case, Form, Work
from k31compile.bench.compare import tensors_differ
from k31compile.bench.goals import Bound, Goals
from k31compile.model.attn_res import AttnRes
from k31compile.model.config import K31Config

_STEPS, _SUMS, _WIDTH = 12, 8, 7168


def cases() -> list[Case]:
    """One token and a block of 256."""
    bounds = {
        1: {"inductor": Bound(8.0)},
        256: {"inductor": Bound(5.0, 4.0)},
    }
    return [
        Case(
            "attn_res",
            f"bf16 {_STEPS} steps D={_WIDTH} T={rows}",
            partial(_make, rows),
            # The running sum that a step leaves to the next is a result, of which the last alone is handed back.
            Goals(held, extra_bytes=(2 << 20) + rows * _WIDTH * 2),
            is_quick=rows == 1,
        )
        for rows, held in bounds.items()
    ]


class Block(nn.Module):
    """The mixtures of a block as the model writes them: each adds a sub-layer's result and looks back."""

    def __init__(self) -> None:
        """Queries of all steps, from the seed of the moment."""
        super().__init__()
        config = K31Config(hidden_size=_WIDTH)
        self.steps = nn.ModuleList(AttnRes(config) for _ in range(_STEPS))

    def forward(self, prefix: Tensor, bank: tuple[Tensor, ...], deltas: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """prefix [B, T, D], frozen sums and what sub-layers gave, of that shape -> the last sum and each mixture."""
        mixed = []
        for step, delta in zip(self.steps, deltas, strict=True):
            prefix = prefix + delta
            mixed.append(step(prefix, bank))
        return prefix, *mixed


def _make(rows: int) -> Work:
    def stream() -> Tensor:
        return torch.randn(1, rows, _WIDTH).bfloat16()

    prefix, bank, deltas = stream(), tuple(stream() for _ in range(_SUMS)), tuple(stream() for _ in range(_STEPS))
    block = Block().bfloat16().eval()
    steps: list[Any] = list(block.steps)
    eps = steps[0].norm.eps
    form = Form("", block, lambda function: lambda: function(prefix, bank, deltas))

    # What the graph of `block` calls, with its queries in float32. Views cost nothing there, so those of arguments are
    # made before.
    prepare, update = torch.ops.k31.attn_res_prepare.default, torch.ops.k31.attn_res_update.default
    queries = torch.stack([step.proj.weight.data.squeeze(0).float() * step.norm.weight.data.float() for step in steps])
    each, added = queries.unbind(), [delta[0] for delta in deltas]
    sums = [one[0].unsqueeze(1) for one in bank]

    def ours() -> tuple[Tensor, ...]:
        read = [torch.cat(sums, 1)] if rows == 1 else sums
        prepared = prepare(read[0], queries, eps=eps, more=read[1:] or None, mix=False)
        last, mixed = prefix[0], []
        for slot, (query, delta) in enumerate(zip(each, added, strict=True)):
            last, one = update(last, delta, *prepared, query, eps=eps, bank=read, slot=slot)
            mixed.append(one)
        return last, *mixed

    with torch.no_grad():
        expected = _exact(block, prefix, bank, deltas)

    def check(result: Any, tolerance: float) -> str | None:
        return tensors_differ(result, expected, tolerance)

    return Work(ours, [form], check, 2e-2, 2e-2)


def _exact(block: Block, prefix: Tensor, bank: tuple[Tensor, ...], deltas: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The same with sums in the stream's dtype, which is part of what is asked, and mixtures in float64."""
    wide, mixed = Block().double(), []
    wide.load_state_dict(block.state_dict())
    frozen = tuple(one.double() for one in bank)
    for step, delta in zip(wide.steps, deltas, strict=True):
        prefix = prefix + delta
        mixed.append(step(prefix.double(), frozen))
    return prefix, *mixed
