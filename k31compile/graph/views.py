"""Nodes that only move, select or copy elements of another."""

import torch
from torch import fx

from k31compile.graph.sizes import is_float, is_tensor, numel_of, value_of

ATEN = torch.ops.aten

_VIEWS = {
    ATEN.view.default,
    ATEN.reshape.default,
    ATEN._unsafe_view.default,
    ATEN.unsqueeze.default,
    ATEN.squeeze.dim,
    ATEN.squeeze.dims,
    ATEN.squeeze.default,
    ATEN.transpose.int,
    ATEN.permute.default,
    ATEN.t.default,
    ATEN.expand.default,
    ATEN.select.int,
    ATEN.slice.Tensor,
    ATEN.alias.default,
    ATEN.detach.default,
    ATEN.clone.default,
    ATEN.contiguous.default,
    ATEN.unflatten.int,
    ATEN.flatten.using_ints,
    ATEN.mT.default,
    ATEN.numpy_T.default,
    ATEN.movedim.int,
    ATEN.chunk.default,
    ATEN.split.Tensor,
    ATEN.split_with_sizes.default,
    ATEN.unbind.int,
}

CASTS = {ATEN._to_copy.default, ATEN.to.dtype}

# Views by name that give new memory.
COPIES = {ATEN.clone.default, ATEN.contiguous.default}
_MAY_ALIAS = {ATEN.to.dtype, ATEN.to.device, ATEN.to.dtype_layout, ATEN._to_copy.default, ATEN.expand_as.default}


def is_view(node: fx.Node) -> bool:
    """Whether the node only moves, selects or copies elements of its first argument."""
    return node.target in _VIEWS or getattr(node.target, "__name__", "") == "getitem"


def is_narrowing(node: fx.Node) -> bool:
    """Whether the node is a cast that may lose bits of a floating-point value."""
    source = node.args[0] if node.target in CASTS else None
    if not isinstance(source, fx.Node) or not is_float(node) or not is_float(source):
        return False
    before, after = value_of(source).dtype, value_of(node).dtype
    return bool(before != after and before.itemsize >= after.itemsize)


def behind_views_and_casts(node: fx.Node) -> fx.Node:
    """The node that a chain of views and casts started from, whatever part of it they took."""
    while (is_view(node) or node.target in CASTS) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def same_size_base(node: fx.Node) -> fx.Node:
    """The node that a chain of same-size views started from."""
    while is_view(node) and is_tensor(node):
        source = node.args[0]
        if not isinstance(source, fx.Node) or not is_tensor(source) or numel_of(source) != numel_of(node):
            break
        node = source
    return node


def share_equal_views(graph: fx.Graph) -> None:
    """Let the readers of a view read its first equal, where nothing was written in between.

    An author who writes `cache[:, :end]` twice means one value, and a region has one leaf for it. Views that leave the
    graph stay: who receives two tensors may do with each what he likes.
    """
    known: dict[str, fx.Node] = {}
    for node in graph.nodes:
        if _writes(node):
            known.clear()
        if node.target not in _VIEWS - COPIES or any(user.op == "output" for user in node.users):
            continue
        first = known.setdefault(f"{node.target} {node.args} {node.kwargs}", node)
        if first is not node:
            node.replace_all_uses_with(first)


def _writes(node: fx.Node) -> bool:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return bool(target._schema.is_mutable)
    return node.op in ("call_module", "call_method")


def may_alias(node: fx.Node) -> bool:
    """Whether the node's value may share memory with its first argument."""
    if node.target in COPIES:
        return False
    if is_view(node) or node.target in _MAY_ALIAS:
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    returned = node.target._schema.returns
    return bool(returned) and returned[0].alias_info is not None and not returned[0].alias_info.is_write
