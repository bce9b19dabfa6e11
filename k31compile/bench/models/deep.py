"""A decode step of 64 tiny layers: next to no arithmetic, so what shows is the cost of guards, wrappers and calls."""

from __future__ import annotations

import torch

from k31compile.bench.goals import Bound, Goals
from k31compile.bench.models.case import ModelCase
from k31compile.bench.models.mini import step
from k31compile.entry import Entry
from k31compile.model import CONFIGS

_LAYERS = 64


def cases() -> list[ModelCase]:
    """The step with the guards that are kept by default."""
    held = Goals({"inductor": Bound(1.0)}, extra_bytes=None)
    label = f"{_LAYERS} layers, decode fp32, default guards"
    return [ModelCase("tiny", label, _step, 1, held, "tiny layers, decode fp32", _LAYERS, whole=True)]


def _step() -> Entry:
    """As many layers of the width of `tiny`, every fourth one of attention, behind 20 tokens."""
    config = CONFIGS["tiny"]().replace(
        num_hidden_layers=_LAYERS, full_attention_layers=(*range(4, _LAYERS, 4), _LAYERS), attn_res_block_size=12
    )
    return step(config, torch.float32, 1, 20)
