"""Which tensors of a file are stored in blocks, decided by name, shape and dtype where no graph says who reads them."""

import fnmatch
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from k31compile.errors import WeightFileError
from k31compile.passes.layout.fractal_nz import BLOCK_ROWS
from k31compile.weights.blocks import ITEM_SIZES
from k31compile.weights.record import TensorRecord

_EMBEDDINGS = re.compile(r"(^|[._])(\w*embed\w*|wte|wpe|rope|rotary\w*|\w*positions?)([._]|$)", re.IGNORECASE)
_NORMS = re.compile(r"(^|[._])(\w*norm\w*|ln\d*|ln_\w+)([._]|$)", re.IGNORECASE)
_CAST_BY_DEFAULT = ("BF16", "F16", "F8_E4M3", "F8_E5M2")
_BLOCK_BYTES = 32


@dataclass(frozen=True)
class Choice:
    """Whether a tensor is stored in blocks, else why not, and what would change that."""

    is_nz: bool
    reason: str = ""
    remedy: str = ""


Choose = Callable[[str, TensorRecord], Choice]
"""Decides on a tensor of this name, with the shape and dtype that a model has."""


def impossible(record: TensorRecord) -> str:
    """Why a tensor cannot be stored in blocks at all; empty where it can."""
    if len(record.shape) < 2:
        return "it has less than two dimensions, and blocks store matrices"
    if record.dtype not in ITEM_SIZES:
        return f"its dtype is {record.dtype}: blocks are made of {', '.join(ITEM_SIZES)}"
    if 0 in record.shape:
        return f"it is empty: {list(record.shape)}"
    if 1 in record.shape[-2:]:
        return f"a side of {list(record.shape)} is 1, which products in blocks do not take"
    return ""


def by_name(name: str, record: TensorRecord) -> Choice:
    """The rule without a graph: 16-bit and fp8 matrices and stacks of full blocks, embeddings and norms left out."""
    if reason := impossible(record):
        return Choice(False, reason)
    force = f"--include '{name}' stores it in blocks all the same"
    if record.dtype not in _CAST_BY_DEFAULT:
        return Choice(False, f"its dtype is {record.dtype}, not one of {', '.join(_CAST_BY_DEFAULT)}", force)
    if len(record.shape) > 3:
        return Choice(False, f"it has {len(record.shape)} dimensions: more than a stack of matrices", force)
    for kind, pattern in (("an embedding", _EMBEDDINGS), ("a norm", _NORMS)):
        if pattern.search(name):
            return Choice(False, f"by its name it is {kind}, which no product reads", force)
    return _aligned(record, force)


def _aligned(record: TensorRecord, remedy: str) -> Choice:
    rows, columns = record.shape[-2:]
    width = max(BLOCK_ROWS, _BLOCK_BYTES // ITEM_SIZES[record.dtype])
    if rows % width or columns % width:
        return Choice(False, f"its sides {rows} and {columns} are no multiples of {width}", f"{remedy}, padded")
    return Choice(True)


def with_patterns(choose: Choose, include: Sequence[str], exclude: Sequence[str], names: Iterable[str]) -> Choose:
    """A rule that glob patterns overrule: excluded ones stay as they are, included ones become blocks if they can.

    Raises:
        WeightFileError: a pattern fits none of `names`.
    """
    known = list(names)
    for option, patterns in (("--include", include), ("--exclude", exclude)):
        for pattern in patterns:
            if not fnmatch.filter(known, pattern):
                near = ", ".join(known[:3])
                raise WeightFileError(f"{option} {pattern!r} fits no tensor", hint=f"tensors are called {near}, ...")

    def decide(name: str, record: TensorRecord) -> Choice:
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in exclude):
            return Choice(False, "--exclude leaves it out")
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in include):
            reason = impossible(record)
            return Choice(not reason, reason)
        return choose(name, record)

    return decide
