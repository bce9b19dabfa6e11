"""Tensors to try an entry of an artefact with."""

from __future__ import annotations

import torch
from safetensors.torch import load as load_safetensors

from k31compile.cache.artefact.program import Program
from k31compile.cache.artefact.tensors import TensorPromise

_SEED = 0
_SIZE = 7


def example_tensors(program: Program, kept: bytes | None) -> list[torch.Tensor]:
    """One tensor for each that the entry takes, in their order, with the values that were kept or made-up ones."""
    stored = load_safetensors(kept) if kept is not None else {}
    generator = torch.Generator().manual_seed(_SEED)
    made: list[torch.Tensor] = []
    for number, promise in enumerate(program.promises):
        if promise.same is not None:
            made.append(made[promise.same])
            continue
        value = stored.get(str(number))
        shape = [_size(size, program) for size in promise.shape] if value is None else list(value.shape)
        tensor = torch.empty_strided(shape, promise.strides_of(shape), dtype=getattr(torch, promise.dtype))
        made.append(tensor.copy_(_values(promise, shape, generator) if value is None else value))
    return made


def _size(size: int | str, program: Program) -> int:
    if isinstance(size, int):
        return size
    low, high = program.bounds[size]
    return int(max(low, min(high, _SIZE)))


def _values(promise: TensorPromise, shape: list[int], generator: torch.Generator) -> torch.Tensor:
    """Normal numbers, or zeros for whole ones: those are often positions, and 0 is one that exists."""
    dtype = getattr(torch, promise.dtype)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.zeros(shape, dtype=dtype)
