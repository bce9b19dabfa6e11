"""Calls that no leaf may stand for: under autocast, where gradients are wanted, on devices that are no target yet."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from k31compile.leaves.bytecode import Unfit


def refuse_situation(tensors: Iterable[torch.Tensor]) -> None:
    """Raise Unfit where these tensors, or what is switched on around them, rule a leaf out."""
    if torch.is_autocast_enabled("cpu"):
        raise Unfit("it is called under autocast")
    given = list(tensors)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given):
        raise Unfit("its arguments want gradients; call the model under torch.no_grad()")
    devices = {tensor.device.type for tensor in given} - {"cpu", "meta"}
    if devices:
        raise Unfit(f"its tensors are on {devices.pop()}, which is no target yet")
