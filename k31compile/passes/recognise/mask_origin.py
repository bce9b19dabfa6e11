"""What a mask was made from, so that two spellings of one mask are one: views, negations, comparisons with zero."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from k31compile.graph.dataflow import ATEN
from k31compile.graph.sizes import is_tensor, value_of
from k31compile.graph.views import CASTS, COPIES, is_view

NOTS = {ATEN.logical_not.default, ATEN.bitwise_not.default}
_PERMUTES = {
    ATEN.transpose.int,
    ATEN.permute.default,
    ATEN.t.default,
    ATEN.mT.default,
    ATEN.numpy_T.default,
    ATEN.movedim.int,
}
_MAY_COPY = {*COPIES, ATEN.reshape.default, ATEN.flatten.using_ints}


@dataclass(frozen=True)
class MaskOrigin:
    """The value behind a mask, which part of its memory is read, with which strides along (b, t, s), and how.

    `truth` tells that only zero or not is read of it, `negated` that zero shows a key.
    """

    base: fx.Node
    offset: str
    strides: tuple[str, ...]
    truth: bool
    negated: bool


def mask_origin(mask: fx.Node, dims: Sequence[int | None], negated: bool = False, is_truth: bool = False) -> MaskOrigin:
    """The origin of a mask whose dimensions `dims` are b, t and s; without one it is the same for all of these."""
    wide = [dim for dim, size in enumerate(value_of(mask).shape) if not _is_one(size)]
    truth = is_truth or value_of(mask).dtype == torch.bool
    node = mask
    while True:
        node = _behind_same_elements(node)
        source = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
        if source is None or not is_tensor(source):
            break
        if node.target in NOTS and value_of(source).dtype == torch.bool:
            negated = not negated
        elif node.target in (ATEN.eq.Scalar, ATEN.ne.Scalar) and node.args[1] == 0:
            negated ^= node.target is ATEN.eq.Scalar
        elif node.target not in CASTS or value_of(node).dtype != torch.bool:
            break
        node = source
    return _placed(node, [wide.index(dim) if dim in wide else None for dim in dims], truth, negated)


def _behind_same_elements(node: fx.Node) -> fx.Node:
    """The value before views that only add or drop dimensions of size one, and before copies."""
    while is_view(node) and is_tensor(node):
        source = node.args[0]
        if node.target in _PERMUTES or not isinstance(source, fx.Node) or not is_tensor(source):
            break
        if _wide(source) != _wide(node):
            break
        node = source
    return node


def _wide(node: fx.Node) -> list[str]:
    return [str(size) for size in value_of(node).shape if not _is_one(size)]


def _placed(node: fx.Node, ranks: Sequence[int | None], truth: bool, negated: bool) -> MaskOrigin:
    """The memory that the node reads; `ranks` say which of its dimensions wider than one is which letter."""
    value = value_of(node)
    strides = [stride for size, stride in zip(value.shape, value.stride(), strict=True) if not _is_one(size)]
    base = node
    while is_view(base) and base.target not in _MAY_COPY and isinstance(base.args[0], fx.Node):
        base = base.args[0]
    along = tuple("0" if rank is None else str(strides[rank]) for rank in ranks)
    return MaskOrigin(base, str(value.storage_offset()), along, truth, negated)


def _is_one(size: object) -> bool:
    return isinstance(size, int) and size == 1
