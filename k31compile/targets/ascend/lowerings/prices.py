"""What a lowering should take on a product, by the figures of the cost model: a prediction, for choosing alone."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from k31compile.passes.schedule.cost_model import CostModel, load_costs
from k31compile.targets.ascend.profiles import Profile

_MATRIX_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")
_READS_WHAT_IT_RETURNS = ("index_select", "gather", "index", "embedding")
_predicted: dict[tuple[Any, Profile, str], float | None] = {}


def predict_operator(operator: str, profile: Profile, *args: Any, **kwargs: Any) -> float:
    """One kernel that reads its operands once: of a paged cache what the block table names, of experts the chosen."""
    costs = load_costs(profile.name)
    return costs.seconds_of(0.0, float(_LEAST_BYTES.get(operator, _all_bytes)(*args, **kwargs)), "vector")


def predict_formula(run: Callable[..., Any], profile: Profile, *args: Any, **kwargs: Any) -> float | None:
    """A formula's operators one after the other, counted on tensors without data; None where it needs data."""
    key = (run, profile, str(pytree.tree_map(_identity, (args, kwargs))))
    if key not in _predicted:
        _predicted[key] = _count(run, profile, args, kwargs)
    return _predicted[key]


def _identity(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (tuple(int(size) for size in value.shape), str(value.dtype))
    return value


def _count(run: Callable[..., Any], profile: Profile, args: Any, kwargs: Any) -> float | None:
    with _disable_current_modes():
        bare = pytree.tree_map(_without_data, (args, kwargs))
        counting = _Counting(load_costs(profile.name))
        with torch.no_grad(), counting:
            try:
                run(profile, *bare[0], **bare[1])
            except (RuntimeError, NotImplementedError, TypeError):
                return None
            return counting.seconds


def _without_data(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    sizes, strides = tuple(int(s) for s in value.shape), tuple(int(s) for s in value.stride())
    return torch.empty_strided(sizes, strides, dtype=value.dtype, device="meta")


class _Counting(TorchDispatchMode):
    """Adds up the predicted seconds of every operator that makes new memory."""

    def __init__(self, costs: CostModel) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.costs = costs
        self.seconds = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(returned.alias_info is None for returned in func._schema.returns):
            name = func._schema.name.split("::")[1]
            made = _bytes_of(result)
            moved = 2 * made if name in _READS_WHAT_IT_RETURNS else made + _bytes_of((args, kwargs))
            is_product = name in _MATRIX_PRODUCTS
            flops = 2.0 * result.numel() * args[-1].shape[-2] if is_product else float(made)
            self.seconds += self.costs.seconds_of(flops, float(moved), "cube" if is_product else "vector")
        return result


def _bytes_of(tree: Any) -> int:
    return sum(
        prod(int(size) for size in leaf.shape) * leaf.element_size()
        for leaf in pytree.tree_leaves(tree)
        if isinstance(leaf, Tensor)
    )


def _all_bytes(*args: Any, **kwargs: Any) -> int:
    return _bytes_of((args, kwargs))


def _indexer_bytes(query: Tensor, key: Tensor, weights: Tensor, *, block_table: Tensor | None = None, **_: Any) -> int:
    return _bytes_of((query, weights)) + _bytes_of_pages(key, block_table)


def _attention_bytes(
    query: Tensor, key: Tensor, value: Tensor, sparse_indices: Tensor, *_: Any,
    query_rope: Tensor | None = None, key_rope: Tensor | None = None, **__: Any,
) -> int:  # fmt: skip
    width = key.shape[-1] + (0 if key_rope is None else key_rope.shape[-1])
    named = sparse_indices.numel() * width * key.element_size()
    return int(named) + _bytes_of((query, query_rope, sparse_indices))


def _bytes_of_pages(cache: Tensor, block_table: Tensor | None) -> int:
    if block_table is None:
        return _bytes_of(cache)
    return int(block_table.numel() * prod(cache.shape[1:]) * cache.element_size())


def _experts_bytes(x: Tensor, expert_idx: Tensor, weights: Tensor, *stacks: Any, **_: Any) -> int:
    matrices = [matrix for stack in stacks for matrix in stack]
    experts = sum(m.shape[0] if m.dim() == 3 else 1 for m in stacks[0])
    return _bytes_of((x, expert_idx, weights)) + _bytes_of(matrices) * min(experts, expert_idx.numel()) // experts


_LEAST_BYTES: dict[str, Callable[..., int]] = {
    "lightning_indexer": _indexer_bytes,
    "sparse_flash_attention": _attention_bytes,
    "grouped_experts": _experts_bytes,
}
