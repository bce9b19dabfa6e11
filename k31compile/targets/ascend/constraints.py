"""What torch_npu's operators accept, as tables: their meta functions accept almost anything, a device does not.

Source of each figure: op-plugin's documentation of 2026-08-21 (summarised in K3.1's Ascend notes, section 4). Checked
before lowering; a call that breaks one gets its formula, and the report names the constraint.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from k31compile.kernels.expert_checks import SIGMOID, Gating
from k31compile.targets.ascend.profiles import Profile

_A3, _950 = "ascend-a3", "ascend-950"
_HALF = (torch.bfloat16, torch.float16)
WEIGHT_PARTS = 3
"""A float32 has three times the significant bits of a bfloat16."""
_SPARSE_COUNTS = (*range(1, 2049), *range(3072, 8193, 1024))


@dataclass(frozen=True)
class Constraint:
    """One documented limit of a torch_npu operator.

    Attributes:
        what: the quantity, as a reader of the documentation knows it.
        allowed: the limit in words.
        holds: whether a value is within.
        products: the targets that have the limit.

    """

    what: str
    allowed: str
    holds: Callable[[Any], bool]
    products: tuple[str, ...] = (_A3, _950)


def _one_of(what: str, values: Sequence[Any], products: tuple[str, ...] = (_A3, _950)) -> Constraint:
    named = ", ".join(str(value).removeprefix("torch.") for value in values)
    return Constraint(what, f"one of {named}" if len(values) > 1 else named, lambda value: value in values, products)


_BLOCK = Constraint("block size", "a multiple of 16, 16 to 1024", lambda size: 16 <= size <= 1024 and size % 16 == 0)

CONSTRAINTS: Mapping[str, Sequence[Constraint]] = {
    "npu_lightning_indexer": (
        _one_of("query dtype", _HALF),
        _one_of("key dtype", _HALF),
        _one_of("weights dtype", (*_HALF, torch.float32), (_A3,)),
        _one_of("weights dtype", _HALF, (_950,)),
        _one_of("index head dim", (128,)),
        Constraint("index heads", "1 to 64", lambda heads: 1 <= heads <= 64, (_A3,)),
        _one_of("index heads", (8, 16, 24, 32, 64), (_950,)),
        _one_of("key heads", (1,)),
        Constraint(
            "sparse_count", "1 to 2048, or 3072 to 8192 in steps of 1024", lambda count: count in _SPARSE_COUNTS
        ),
        _BLOCK,
        _one_of("key layout", ("PA_BSND",)),
        _one_of("tail", ("minus_one",)),
        _one_of("mask", (None,)),
    ),
    "npu_sparse_flash_attention": (
        _one_of("query dtype", _HALF),
        _one_of("key dtype", _HALF),
        _one_of("latent dim", (512,)),
        _one_of("rope dim", (64,)),
        _one_of("key heads", (1,)),
        _one_of("query heads", (1, 2, 4, 8, 16, 32, 64, 128), (_A3,)),
        Constraint("query heads", "1 to 128", lambda heads: 1 <= heads <= 128, (_950,)),
        _BLOCK,
        _one_of("key layout", ("PA_BSND",)),
        _one_of("sparse_block_size", (1,)),
        _one_of("mask", (None,)),
    ),
    "npu_moe_gating_top_k": (
        Constraint("experts", "at most 2048", lambda count: count <= 2048),
        _one_of("scores", ("sigmoid",)),
        _one_of("renormalised", (True,)),
        _one_of("groups", ("all, or -inf outside of the best",)),
    ),
}


def violations(operator: str, profile: Profile, values: Mapping[str, Any]) -> list[str]:
    """Each constraint of a torch_npu operator that these values break on a product, as a sentence."""

    def given(one: Constraint) -> str:
        return str(values[one.what]).removeprefix("torch.")

    return [
        f"{operator} on {profile.name} takes {one.what} {one.allowed}, not {given(one)}"
        for one in CONSTRAINTS[operator]
        if profile.name in one.products and one.what in values and not one.holds(values[one.what])
    ]


def takes_indexer_weights(profile: Profile, dtype: torch.dtype) -> bool:
    """Whether the product's indexer takes weights of a dtype as they are."""
    return not violations("npu_lightning_indexer", profile, {"weights dtype": dtype})


def indexer_heads(profile: Profile, heads: int, dtype: torch.dtype) -> int | None:
    """How many heads the product's indexer is called with for so many of the model; None where there are too many.

    Heads of weight 0 add nothing, so a number that the product does not take is filled up. Where it takes no float32
    weights, each head stands three times, for a float32 is the sum of three bfloat16.
    """
    parts = 1 if takes_indexer_weights(profile, dtype) or profile.may_round else WEIGHT_PARTS
    least = heads * parts
    return next((count for count in range(least, least + 65) if not violations(
        "npu_lightning_indexer", profile, {"index heads": count})), None)  # fmt: skip


def lightning_indexer_objections(
    profile: Profile,
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    *,
    sparse_count: int = 2048,
    layout_key: str = "BSND",
    tail: str = "minus_one",
    mask: Tensor | None = None,
    **_: Any,
) -> list[str]:
    """What npu_lightning_indexer does not take of a call of `lightning_indexer`."""
    heads, dtype = query.shape[2], weights.dtype
    used = indexer_heads(profile, heads, dtype)
    if used is not None and not takes_indexer_weights(profile, dtype):
        dtype = torch.bfloat16
    values = {
        "query dtype": query.dtype, "key dtype": key.dtype, "weights dtype": dtype,
        "index head dim": query.shape[3], "index heads": used or heads, "key heads": key.shape[2],
        "sparse_count": sparse_count, "block size": key.shape[1], "key layout": layout_key, "tail": tail,
        "mask": None if mask is None else "a mask",
    }  # fmt: skip
    return violations("npu_lightning_indexer", profile, values)


def sparse_flash_attention_objections(
    profile: Profile,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sparse_indices: Tensor,
    scale_value: float,
    *,
    query_rope: Tensor | None = None,
    layout_kv: str = "BSND",
    sparse_block_size: int = 1,
    mask: Tensor | None = None,
    **_: Any,
) -> list[str]:
    """What npu_sparse_flash_attention does not take of a call of `sparse_flash_attention`; heads are split first."""
    values = {
        "query dtype": query.dtype, "key dtype": key.dtype, "latent dim": query.shape[3],
        "rope dim": 0 if query_rope is None else query_rope.shape[3], "key heads": key.shape[2],
        "block size": key.shape[1], "key layout": layout_kv, "sparse_block_size": sparse_block_size,
        "mask": None if mask is None else "a mask",
    }  # fmt: skip
    found = violations("npu_sparse_flash_attention", profile, values)
    for heads in set(split_heads(profile, query.shape[2])):
        found += violations("npu_sparse_flash_attention", profile, {"query heads": heads})
    return found


def split_heads(profile: Profile, heads: int) -> list[int]:
    """Groups of heads that the product's sparse attention takes, largest first: powers of two on A3 (96: 64, 32)."""
    if profile.name != _A3:
        return [heads]
    return [1 << bit for bit in reversed(range(heads.bit_length())) if heads >> bit & 1]


def moe_gating_top_k_objections(profile: Profile, x: Tensor, k: int, **options: Any) -> list[str]:
    """What npu_moe_gating_top_k does not take of a call of `moe_gating_top_k`."""
    gating = Gating(**options)
    other_fill = gating.group_count > 1 and gating.group_fill is not None
    values = {
        "experts": x.shape[1],
        "scores": "sigmoid" if gating.norm_type == SIGMOID else "softmax",
        "renormalised": gating.renorm,
        "groups": f"{gating.group_fill} outside of the best" if other_fill else "all, or -inf outside of the best",
    }
    return violations("npu_moe_gating_top_k", profile, values)
