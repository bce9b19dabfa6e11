"""Give a fused indexer a fixed width with a -1 tail, where the attention behind it leaves such slots out."""

from typing import Any

import torch
from torch import fx
from torch.utils._sympy.value_ranges import bound_sympy

from k31compile.graph.rewrite import same_sizes
from k31compile.graph.sizes import value_of
from k31compile.options import Options
from k31compile.passes.registry import PassResult, register_pass

_INDEXER = "k31.lightning_indexer.default"
_ATTENTION = "k31.sparse_flash_attention.default"
_WHAT_IS_SEEN = (
    ("actual_seq_lengths_query", "actual_seq_lengths_query"),
    ("actual_seq_lengths_key", "actual_seq_lengths_kv"),
    ("mask", "mask"),
)


@register_pass(
    name="static_top_k",
    fusion="static_top_k",
    needs=("fuse_lightning_indexer",),
    after=("fuse_sparse_flash_attention",),
    numerics="exact",
)
def static_top_k(module: fx.GraphModule, options: Options) -> PassResult:
    """Fix the width of the selection, so that a graph does not depend on how long the history is (K3.1 spec 4.3).

    Before:
        scores = (w.unsqueeze(-1) * torch.einsum("bthd,bsd->bths", q, k).relu()).sum(2)
        i = scores.topk(min(4, k.shape[1]), dim=-1).indices
        picked = torch.gather(c.unsqueeze(1).expand(-1, q.shape[1], -1, -1), 2, i[..., None].expand(-1, -1, -1, 24))
        p = torch.softmax(torch.einsum("bthd,btkd->bthk", q, picked), dim=-1)
        return torch.einsum("bthk,btkd->bthd", p, picked)

    After:
        k31.lightning_indexer
        k31.sparse_flash_attention

    Refuses when:
        anyone but a fused attention with the same visible keys reads the indices.
    """
    changed = 0
    for node in module.graph.nodes:
        if str(node.target) == _INDEXER and not _is_static(node) and _only_attention_reads(node):
            width = _largest(node.kwargs.get("sparse_count", 2048))
            node.kwargs = {**node.kwargs, "order": "position", "tail": "minus_one", "sparse_count": width}
            changed += 1
    module.graph.eliminate_dead_code()
    return PassResult(changed)


def is_static_top_k(node: fx.Node) -> bool:
    """Whether the node is an indexer of fixed width whose empty slots hold -1."""
    return str(node.target) == _INDEXER and _is_static(node)


def _is_static(node: fx.Node) -> bool:
    fixed = isinstance(node.kwargs.get("sparse_count", 2048), int)
    return fixed and node.kwargs.get("tail", "minus_one") == "minus_one" and node.kwargs.get("order") == "position"


def _only_attention_reads(indexer: fx.Node) -> bool:
    return bool(indexer.users) and all(
        str(user.target) == _ATTENTION and user.args[3] is indexer and _sees_the_same(indexer, user)
        for user in indexer.users
    )


def _sees_the_same(indexer: fx.Node, attention: fx.Node) -> bool:
    """Same visible keys: then the slots that turn to -1 are those that the attention leaves out anyway."""
    if indexer.kwargs.get("sparse_mode", 3) != attention.kwargs.get("sparse_mode", 3):
        return False
    return all(_same(indexer.kwargs.get(ours), attention.kwargs.get(theirs)) for ours, theirs in _WHAT_IS_SEEN)


def _same(left: Any, right: Any) -> bool:
    """Whether two arguments are computed alike from the same nodes."""
    if left is right:
        return True
    if isinstance(left, fx.Node) and isinstance(right, fx.Node) and isinstance(value_of(left), torch.SymInt):
        return same_sizes([value_of(left)], [value_of(right)])
    if isinstance(left, fx.Node) and isinstance(right, fx.Node):
        return (
            left.op == right.op == "call_function"
            and left.target == right.target
            and _same(left.args, right.args)
            and _same(sorted(left.kwargs.items()), sorted(right.kwargs.items()))
        )
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(_same, left, right))
    return type(left) is type(right) and not isinstance(left, fx.Node) and bool(left == right)


def _largest(count: Any) -> Any:
    """The constant in `min(top_k, keys)`: what the author asked for where there are enough keys."""
    size = value_of(count) if isinstance(count, fx.Node) else count
    if not isinstance(size, torch.SymInt):
        return size
    upper = bound_sympy(size.node.expr, size.node.shape_env.var_to_range).upper
    return int(upper) if upper.is_finite and upper < 2**31 else count
