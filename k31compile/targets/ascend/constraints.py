"""Whether a call keeps within what an operator accepts: checked before lowering, against the tables of data.

A call that breaks a limit gets another provider or its formula, and the report names the limit and the remedy.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from k31compile.kernels.expert_checks import SIGMOID, Gating
from k31compile.targets.ascend.constraint_tables import A3, Constraint
from k31compile.targets.ascend.constraint_tables_later import ALL_TABLES
from k31compile.targets.ascend.profiles import Profile

WEIGHT_PARTS = 3
"""A float32 has three times the significant bits of a bfloat16."""


def violations(operator: str, profile: Profile, values: Mapping[str, Any]) -> list[str]:
    """Each constraint of an operator that these values break on a product, as a sentence with its remedy."""
    return [
        describe_violation(operator, profile, one, values[one.what])
        for one in ALL_TABLES[operator].constraints
        if profile.name in one.products and one.what in values and not one.holds(values[one.what])
    ]


def describe_violation(operator: str, profile: Profile, constraint: Constraint, value: Any) -> str:
    """The sentence that names operator, product, limit, value and remedy."""
    given = str(value).removeprefix("torch.")
    remedy = f"; {constraint.remedy}" if constraint.remedy else ""
    return f"{operator} on {profile.name} takes {constraint.what} {constraint.allowed}, not {given}{remedy}"


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
    if profile.name != A3:
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
