"""Limits of operators that no lowering calls yet: quantisation, matrix products, routing between devices, layouts.

They are entered now so that the lowerings of quant="a3-int8" and quant="950-mx" can be written against them. Sources as
in `constraint_tables.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from k31compile.targets.ascend.constraint_tables import A3, P950, TABLES, Constraint, Table, between, multiple, one_of

_BF16, _FP16, _FP32, _INT8 = torch.bfloat16, torch.float16, torch.float32, torch.int8
_FP8, _E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
_HALF = (_BF16, _FP16)
_ON_950 = "compile for ascend-950"
_POWERS_TO_128 = (1, 2, 4, 8, 16, 32, 64, 128)
_HIDDEN = (1024, 1536, 2048, 2560, 3072, 4096, 5120, 6144, 7168, 7680, 8192)

_LATER: Mapping[str, Table] = {
    "npu_dynamic_quant": Table(
        "documentation of npu_dynamic_quant",
        (
            one_of("input dtype", _HALF, remedy="cast it to bfloat16"),
            one_of("output dtype", (_INT8,), (A3,), f"fp8 is the 950's: {_ON_950}"),
            one_of("output dtype", (_INT8, _FP8), (P950,), "int8 or fp8"),
        ),
    ),
    "npu_dynamic_block_quant": Table(
        "its meta function in torch_npu 2.13, which says int8 alone for 910B and 910C",
        (
            one_of("rank", (2, 3), remedy="flatten or unsqueeze to two or three dimensions"),
            one_of("output dtype", (_INT8,), (A3,), f"fp8 is the 950's: {_ON_950}"),
            one_of("output dtype", (_INT8, _FP8), (P950,), "int8 or fp8"),
        ),
    ),
    "npu_dynamic_mx_quant": Table(
        "documentation of npu_dynamic_mx_quant",
        (
            Constraint("product", "ascend-950 alone", lambda product: product == P950, remedy=_ON_950),
            multiple("block_size", 32, 32, 1024, (P950,), "blocks of 32"),
            Constraint("block_size of a float32 input", "32", lambda size: size == 32, (P950,), "blocks of 32"),
        ),
    ),
    "npu_quant_matmul": Table(
        "documentation of npu_quant_matmul, and its check in torch_npu 2.13 (before A5 int8 and int32 alone)",
        (
            one_of("input dtype", (_INT8, torch.int32), (A3,), f"fp8 is the 950's: {_ON_950}"),
            one_of("input dtype", (_INT8, torch.int32, _FP8), (P950,), "int8 or fp8"),
            one_of("MX scale dtype", (_E8M0,), (P950,), "scales of MX products are e8m0"),
        ),
    ),
    "npu_grouped_matmul": Table(
        "documentation of npu_grouped_matmul; NZ rules from torchair's checks",
        (
            between("inner axis", 1, 65535, remedy="split the product"),
            one_of("input dtype", (*_HALF, _FP32, _INT8), (A3,), f"MX is the 950's: {_ON_950}"),
            one_of("input dtype", (*_HALF, _FP32, _INT8, _FP8), (P950,), "bfloat16, or MX with e8m0 scales"),
            one_of("split-K with an NZ weight", (False,), remedy="keep that weight in ND"),
            one_of("MX scale dtype of an NZ weight", (_E8M0,), (P950,), "scales of MX products are e8m0"),
        ),
    ),
    "npu_grouped_matmul_swiglu_quant_v2": Table(
        "documentation of npu_grouped_matmul_swiglu_quant_v2; not reached offline with the arguments that were tried",
        (
            one_of("input dtype", (_INT8,), (A3,), f"fp8 is the 950's: {_ON_950}"),
            one_of("input dtype", (_INT8, _FP8), (P950,), "int8 or fp8"),
            one_of("activation", ("swiglu",), remedy="SiTU is another function: use npu_grouped_matmul and a formula"),
        ),
    ),
    "npu_mla_prolog_v3": Table(
        "documentation of npu_mla_prolog_v3",
        (
            one_of("hidden size", _HIDDEN, remedy="the parts are lowered one by one"),
            one_of("query rank", (1536, 2048), remedy="q_lora_rank of 1536 or 2048"),
            one_of("query heads", _POWERS_TO_128, remedy="96 heads are not taken: the parts are lowered one by one"),
            one_of("latent dim", (512,), remedy="kv_lora_rank = 512"),
            one_of("nope dim", (128, 192), remedy="qk_nope_head_dim of 128 or 192"),
            one_of("rope dim", (64,), remedy="qk_rope_head_dim = 64"),
            one_of("weight format", ("FRACTAL_NZ",), remedy="cast the down and up weights with npu_format_cast(29)"),
            one_of("weight_quant_mode", (0, 1, 2), (A3,), f"MXFP8 is the 950's: {_ON_950}"),
            one_of("weight_quant_mode", (0, 1, 2, 3), (P950,), "3 is MXFP8"),
        ),
    ),
    "npu_moe_distribute_dispatch_v2": Table(
        "documentation of npu_moe_distribute_dispatch_v2 and _combine_v2",
        (
            one_of("graph", ("static",), remedy="fix the sizes"),
            between("experts per token", 1, 16, remedy="num_experts_per_token of at most 16; 12 with fullmesh_v2"),
            between("hidden size", 1024, 8192, (A3,), "routed_expert_hidden_size of 1024 to 8192"),
            between("tokens", 1, 512, (A3,), "at most 512 tokens a device; 256 with fullmesh_v2 or hierarchy"),
            one_of("paired with combine", (True,), remedy="call npu_moe_distribute_combine_v2 with its results"),
        ),
    ),
    "npu_moe_distribute_combine_v2": Table(
        "documentation of npu_moe_distribute_dispatch_v2 and _combine_v2",
        (
            one_of("graph", ("static",), remedy="fix the sizes"),
            between("experts per token", 1, 16, remedy="num_experts_per_token of at most 16"),
            between("hidden size", 1024, 8192, (A3,), "routed_expert_hidden_size of 1024 to 8192"),
            one_of("paired with dispatch", (True,), remedy="give it what npu_moe_distribute_dispatch_v2 returned"),
        ),
    ),
    "npu_rms_norm": Table(
        "documentation of npu_rms_norm",
        (
            one_of("input dtype", (*_HALF, _FP32), remedy="cast it"),
            between("rank", 1, 8, remedy="flatten the leading dimensions"),
        ),
    ),
    "npu_rotary_mul": Table(
        "documentation of npu_rotary_mul; torchair makes RotaryPositionEmbedding of it on the 950",
        (
            one_of("input dtype", (*_HALF, _FP32), remedy="cast it"),
            one_of("rank", (4,), remedy="view it as [B, T, N, D]"),
            Constraint("rotary dim", "even", lambda size: size % 2 == 0, remedy="an even number of channels"),
        ),
    ),
    "npu_scatter_pa_kv_cache": Table(
        "documentation of npu_scatter_pa_kv_cache",
        (
            one_of("slot dtype", (torch.int32, torch.int64), remedy="cast the slots to int32"),
            one_of("cache dtype is the rows' dtype", (True,), remedy="cast the rows to the cache's dtype"),
        ),
    ),
    "npu_format_cast": Table(
        "documentation of npu_format_cast; it has no GE converter, so it runs before a graph is traced",
        (
            one_of("format", (2, 29), remedy="2 is ND, 29 is FRACTAL_NZ"),
            one_of("in a graph", (False,), remedy="cast weights once, after loading"),
            Constraint("inner size", "more than 1", lambda size: size > 1, (P950,), "keep that weight in ND"),
        ),
    ),
    "super_kernel": Table(
        "torchair's documentation of scope.super_kernel in GE",
        (
            Constraint("product", "ascend-a3 alone", lambda product: product == A3, remedy="compile for ascend-a3"),
            one_of("graph", ("static",), remedy="fix the sizes"),
        ),
    ),
}  # fmt: skip

ALL_TABLES: Mapping[str, Table] = {**TABLES, **_LATER}
"""Every table, by the operator's name."""
