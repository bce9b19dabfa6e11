"""What a conversion will do with each tensor, before anything is written."""

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from k31compile.errors import WeightFileError
from k31compile.weights.blocks import ITEM_SIZES, stored_bytes, stored_shape
from k31compile.weights.checkpoint import Checkpoint, Shard
from k31compile.weights.record import ND, NZ, VERSION, TensorRecord
from k31compile.weights.rules import Choose
from k31compile.weights.tensor_file import StoredTensor

LAYOUTS = (NZ, ND)
_ALREADY = "it is stored in blocks already, and is not converted twice"


@dataclass(frozen=True)
class Step:
    """One tensor: as it is stored now, as a model has it, and as it will be stored, with the reason for that."""

    shard: Shard
    tensor: StoredTensor
    before: TensorRecord
    layout: str
    reason: str = ""
    remedy: str = ""

    @property
    def is_changed(self) -> bool:
        """Whether its bytes are moved."""
        return self.before.layout != self.layout

    @property
    def stored(self) -> tuple[str, tuple[int, ...], int]:
        """Dtype, shape and bytes in the new file."""
        dtype, shape = self.before.dtype, self.before.shape
        if not self.is_changed:
            return dtype, self.tensor.shape, self.tensor.nbytes
        if self.layout == NZ:
            return dtype, stored_shape(shape, dtype), stored_bytes(shape, dtype)
        return dtype, shape, math.prod(shape) * ITEM_SIZES[dtype]

    def to_dict(self) -> dict[str, Any]:
        """The step as JSON has it."""
        return {
            "name": self.tensor.name, "file": self.shard.name, "dtype": self.before.dtype,
            "shape": list(self.before.shape), "was": self.before.layout, "layout": self.layout,
            "stored_shape": list(self.stored[1]), "bytes": self.stored[2], "reason": self.reason, "remedy": self.remedy,
        }  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """All steps of a conversion, shard by shard."""

    source: Checkpoint
    layout: str
    steps: tuple[Step, ...]

    def of(self, shard: Shard) -> Iterator[Step]:
        """The steps of one shard, in the order of its header."""
        return (step for step in self.steps if step.shard is shard)

    def changed(self) -> int:
        """How many tensors are moved."""
        return sum(step.is_changed for step in self.steps)

    def identity(self) -> str:
        """The same for the same decisions on the same names: what an interrupted conversion is recognised by."""
        facts = [VERSION, self.layout, [[step.shard.name, step.tensor.name, step.layout] for step in self.steps]]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def make_plan(source: Checkpoint, layout: str, choose: Choose) -> Plan:
    """Decide on every tensor of a checkpoint.

    Raises:
        WeightFileError: no tensor would change.
    """
    decide = _to_blocks if layout == NZ else _to_plain
    steps = tuple(decide(shard, tensor, choose) for shard, tensor in source.tensors())
    plan = Plan(source, layout, steps)
    if not plan.changed():
        raise WeightFileError(f"nothing to convert to {layout}: {_why_nothing(plan)}", where=str(source.path))
    return plan


def _to_blocks(shard: Shard, tensor: StoredTensor, choose: Choose) -> Step:
    before = shard.layout_of(tensor)
    if before.layout == NZ:
        return Step(shard, tensor, before, NZ, _ALREADY)
    choice = choose(tensor.name, before)
    return Step(shard, tensor, before, NZ if choice.is_nz else ND, choice.reason, choice.remedy)


def _to_plain(shard: Shard, tensor: StoredTensor, _: Choose) -> Step:
    before = shard.layout_of(tensor)
    return Step(shard, tensor, before, ND, "" if before.layout == NZ else "it is not stored in blocks")


def _why_nothing(plan: Plan) -> str:
    if not plan.steps:
        return "it holds no tensors"
    largest = max(plan.steps, key=lambda step: (step.reason == _ALREADY, step.tensor.nbytes))
    return f"{largest.tensor.name}, the largest: {largest.reason}"
