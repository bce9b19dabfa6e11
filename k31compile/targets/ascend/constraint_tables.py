"""What operators for an NPU accept, as data: their meta functions accept almost anything, a device does not.

Sources: "documentation" is op-plugin's of 2026-08-21 and torchair's, summarised in K3.1's Ascend notes, section 4.
Where the wheel's own text says less, the table says so. Quantised operators stand here before any lowering uses them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

A3, P950 = "ascend-a3", "ascend-950"
BOTH = (A3, P950)
_BF16, _FP16, _FP32, _INT8 = torch.bfloat16, torch.float16, torch.float32, torch.int8
_FP8 = torch.float8_e4m3fn
_HALF = (_BF16, _FP16)
_SPARSE_COUNTS = (*range(1, 2049), *range(3072, 8193, 1024))
_POWERS_TO_128 = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True)
class Constraint:
    """One documented limit of an operator.

    Attributes:
        what: the quantity, as a reader of the documentation knows it.
        allowed: the limit in words.
        holds: whether a value is within.
        products: the targets that have the limit.
        remedy: what to change so that it holds.

    """

    what: str
    allowed: str
    holds: Callable[[Any], bool]
    products: tuple[str, ...] = BOTH
    remedy: str = ""


@dataclass(frozen=True)
class Table:
    """The limits of one operator, and where they were read."""

    source: str
    constraints: tuple[Constraint, ...]


def one_of(what: str, values: Sequence[Any], products: tuple[str, ...] = BOTH, remedy: str = "") -> Constraint:
    """A quantity that has one of a few values."""
    named = ", ".join(str(value).removeprefix("torch.") for value in values)
    allowed = f"one of {named}" if len(values) > 1 else named
    return Constraint(what, allowed, lambda value: value in values, products, remedy)


def between(what: str, low: int, high: int, products: tuple[str, ...] = BOTH, remedy: str = "") -> Constraint:
    """A number from `low` to `high`, both included."""
    return Constraint(what, f"{low} to {high}", lambda value: low <= value <= high, products, remedy)


def multiple(what: str, of: int, low: int, high: int, products: tuple[str, ...] = BOTH, remedy: str = "") -> Constraint:
    """A multiple of a number within limits."""
    allowed = f"a multiple of {of}, {low} to {high}"
    return Constraint(what, allowed, lambda value: low <= value <= high and value % of == 0, products, remedy)


_ON_950 = "compile for ascend-950, or choose quant='none'"
_CAST = "cast it before the call"
_PAGE = multiple("block size", 16, 16, 1024, remedy="choose pages of 16 to 1024 positions, a multiple of 16")
_PAGED = one_of("key layout", ("PA_BSND",), remedy="keep the cache in pages with a block table")
_NO_MASK = one_of("mask", (None,), remedy="say what is visible by lengths instead of a mask")
_GROUPS_OF_HEADS = "split the heads into groups that are allowed"
_TO_BF16 = f"cast it to bfloat16, or allow that with --may-round ({_CAST})"

TABLES: Mapping[str, Table] = {
    "npu_lightning_indexer": Table(
        "documentation of npu_lightning_indexer",
        (
            one_of("query dtype", _HALF, remedy=_CAST),
            one_of("key dtype", _HALF, remedy="keep the index keys in bfloat16"),
            one_of("weights dtype", (*_HALF, _FP32), (A3,), _CAST),
            one_of("weights dtype", _HALF, (P950,), "project the head weights in bfloat16, as their weight is; float32 "
                   "ones of up to 21 heads are split in three; --may-round allows rounding"),
            one_of("index head dim", (128,), remedy="index_head_dim = 128"),
            between("index heads", 1, 64, (A3,), "index_n_heads of at most 64"),
            one_of("index heads", (8, 16, 24, 32, 64), (P950,), "fewer heads are filled up with weights of 0"),
            one_of("key heads", (1,), remedy="index keys have one head"),
            Constraint("sparse_count", "1 to 2048, or 3072 to 8192 in steps of 1024",
                       lambda count: count in _SPARSE_COUNTS, remedy="choose index_topk so"),
            _PAGE,
            _PAGED,
            one_of("tail", ("minus_one",), remedy="let the rest of a row be -1"),
            _NO_MASK,
        ),
    ),
    "npu_quant_lightning_indexer": Table(
        "documentation of npu_quant_lightning_indexer; scales for a token and head alone, never MX",
        (
            one_of("query dtype", (_INT8,), (A3,), "quantise to int8 by npu_dynamic_quant"),
            one_of("query dtype", (_INT8, _FP8), (P950,), "quantise to fp8 by npu_dynamic_quant"),
            one_of("weights dtype", (_FP16,), (A3,), "cast weights and scales to float16"),
            one_of("weights dtype", _HALF, (P950,), "bfloat16 with float32 scales, or all float16"),
            one_of("quant mode", (0,), remedy="for MX scales call QuantLightningIndexerV2"),
            one_of("index head dim", (128,), remedy="index_head_dim = 128"),
            between("index heads", 1, 64, (A3,), "index_n_heads of at most 64"),
            one_of("index heads", (8, 16, 24, 32, 64), (P950,), "fill up with heads of weight 0"),
            between("sparse_count", 1, 2048, remedy="choose index_topk so"),
            Constraint("weights times scale", "within float16", lambda value: abs(value) <= 65504,
                       remedy="scale the head weights down; one factor for all changes no choice"),
        ),
    ),
    "QuantLightningIndexerV2": Table(
        "cann ops-transformer, quant_lightning_indexer (not in torch_npu 2.13)",
        (
            one_of("quant mode", (1, 2, 3, 4, 5), (P950,), "1 fp8, 2 int8, 3 MXFP8, 4 hif8, 5 MXFP4"),
            one_of("quant mode", (2,), (A3,), f"MX and fp8 are the 950's: {_ON_950}"),
            one_of("weights dtype", (_FP32,), (P950,), "give float32 weights; with quant mode 2 float16"),
            one_of("weights dtype", (_FP16,), (A3,), "give float16 weights"),
            between("index heads", 1, 64, remedy="index_n_heads of at most 64"),
            between("sparse_count", 1, 8192, remedy="choose index_topk so"),
            one_of("scale group", (32,), (P950,), "npu_dynamic_mx_quant with block_size=32"),
        ),
    ),
    "npu_sparse_flash_attention": Table(
        "documentation of npu_sparse_flash_attention",
        (
            one_of("query dtype", _HALF, remedy=_CAST),
            one_of("key dtype", _HALF, remedy="keep the latent cache in bfloat16"),
            one_of("latent dim", (512,), remedy="kv_lora_rank = 512"),
            one_of("rope dim", (64,), remedy="qk_rope_head_dim = 64"),
            one_of("key heads", (1,), remedy="attend in the latent space, with one head of keys"),
            one_of("query heads", _POWERS_TO_128, (A3,), _GROUPS_OF_HEADS),
            between("query heads", 1, 128, (P950,), _GROUPS_OF_HEADS),
            _PAGE,
            _PAGED,
            one_of("sparse_block_size", (1,), remedy="choose single positions"),
            _NO_MASK,
        ),
    ),
    "npu_kv_quant_sparse_flash_attention": Table(
        "documentation of npu_kv_quant_sparse_flash_attention",
        (
            one_of("query dim", (576,), remedy="join latent and rope part of the query: 512 + 64"),
            one_of("key bytes", (656,), remedy="a row of the cache is 512 quantised + 64 x 2 rope + 4 x 4 scales"),
            one_of("key dtype", (_INT8,), (A3,), f"fp8 caches are the 950's: {_ON_950}"),
            one_of("key dtype", (_INT8, _FP8), (P950,), "quantise the cache to fp8 or int8"),
            one_of("quant mode", (2,), remedy="scales for a tile of the row"),
            one_of("tile", (128,), remedy="four tiles of 128 in a row of 512"),
            one_of("rope dim", (64,), remedy="qk_rope_head_dim = 64"),
            one_of("scale repo mode", (1,), remedy="scales in the row itself"),
            one_of("query heads", _POWERS_TO_128, (A3,), _GROUPS_OF_HEADS),
            one_of("query heads", (*_POWERS_TO_128, 48), (P950,), _GROUPS_OF_HEADS),
            between("sparse_block_size", 1, 16, (A3,), "choose blocks of at most 16"),
            one_of("sparse_block_size", (1,), (P950,), "choose single positions"),
        ),
    ),
    "npu_moe_gating_top_k": Table(
        "documentation of npu_moe_gating_top_k",
        (
            Constraint("experts", "at most 2048", lambda count: count <= 2048, remedy="none: the formula is taken"),
            one_of("rank", (2,), remedy="flatten the tokens"),
            one_of("scores", ("sigmoid",), remedy="only this form is lowered"),
            one_of("renormalised", (True,), remedy="only this form is lowered"),
            one_of("groups", ("all, or -inf outside of the best",), remedy="only this form is lowered"),
        ),
    ),
    "npu_recurrent_gated_delta_rule": Table(
        "documentation of npu_recurrent_gated_delta_rule; the text in torch_npu 2.13 itself says head sizes to 256 and "
        "no gk yet",
        (
            one_of("query dtype", (_BF16,), remedy=_TO_BF16),
            one_of("key dtype", (_BF16,), remedy=_TO_BF16),
            one_of("value dtype", (_BF16,), remedy=_TO_BF16),
            one_of("beta dtype", (_BF16,), remedy=_TO_BF16),
            one_of("state dtype", (_BF16,), remedy="it keeps no float32 state: declare a package that does, or let the "
                   "model keep its state in bfloat16"),
            between("tokens", 1, 8, remedy="call it for at most 8 tokens of a request"),
            between("heads", 1, 256, remedy="divide the heads among devices"),
            between("key dim", 1, 512, remedy="none: the formula is taken"),
            between("value dim", 1, 512, remedy="none: the formula is taken"),
        ),
    ),
    "npu_chunk_gated_delta_rule": Table(
        "documentation of npu_chunk_gated_delta_rule; one gate a head, no GE converter",
        (
            one_of("query dtype", (_BF16,), remedy=_TO_BF16),
            one_of("key dtype", (_BF16,), remedy=_TO_BF16),
            one_of("value dtype", (_BF16,), remedy=_TO_BF16),
            one_of("beta dtype", (_BF16,), remedy=_TO_BF16),
            one_of("state dtype", (_BF16,), (A3,), "a float32 state is the 950's: compile for ascend-950"),
            one_of("state dtype", (_BF16, _FP32), (P950,), "keep the state in float32"),
            between("heads", 1, 64, remedy="divide the heads among devices"),
            between("key dim", 1, 128, remedy="none: the formula is taken"),
            between("value dim", 1, 128, remedy="none: the formula is taken"),
        ),
    ),
    "fla_npu.recurrent_kda": Table(
        "flash-linear-attention-npu, API page of RecurrentKda, section 7",
        (
            one_of("query dtype", (_BF16,), remedy=_TO_BF16),
            one_of("key dtype", (_BF16,), remedy=_TO_BF16),
            one_of("value dtype", (_BF16,), remedy=_TO_BF16),
            one_of("beta dtype", (_BF16, _FP16, _FP32), remedy=_CAST),
            one_of("state dtype", (_FP32, _BF16), remedy="keep the state in float32"),
            between("tokens", 1, 8, remedy="prefill with kda_chunk"),
            one_of("key dim", (128,), remedy="none: the formula is taken"),
            one_of("value dim", (128, 256), remedy="none: the formula is taken"),
        ),
    ),
    "fla_npu.chunk_kda_fwd": Table(
        "flash-linear-attention-npu, API page of ChunkKdaFwd",
        (
            one_of("query dtype", (_BF16,), remedy=_TO_BF16),
            one_of("key dtype", (_BF16,), remedy=_TO_BF16),
            one_of("value dtype", (_BF16,), remedy=_TO_BF16),
            one_of("state dtype", (_FP32,), remedy="keep the state in float32"),
            one_of("key dim", (128,), remedy="none: the formula is taken"),
            one_of("value dim", (128, 256), remedy="none: the formula is taken"),
        ),
    ),
}  # fmt: skip
"""Operators that a lowering asks for, and the indexer's and the attention's quantised forms."""
