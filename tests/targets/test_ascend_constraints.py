"""Every documented limit: one value that holds and one that breaks it, on each product that has it."""

import pytest
import torch

from k31compile.targets.ascend.constraint_tables_later import ALL_TABLES
from k31compile.targets.ascend.constraints import describe_violation, violations
from k31compile.targets.ascend.profiles import PROFILES

BF16, FP16, FP32, INT8, INT32 = torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.int32
FP8, E8M0, FP64 = torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float64

# what -> (holds on both, breaks on both), or (operator, what) where it is another's; a third gives a product's own.
VALUES = {
    "query dtype": (BF16, FP32),
    ("npu_quant_lightning_indexer", "query dtype"): (INT8, BF16),
    "key dtype": (BF16, INT8),
    ("npu_kv_quant_sparse_flash_attention", "key dtype"): (INT8, BF16),
    "value dtype": (BF16, FP32),
    "beta dtype": (BF16, FP64),
    "weights dtype": (BF16, FP64),
    ("npu_quant_lightning_indexer", "weights dtype"): (FP16, FP32),
    ("QuantLightningIndexerV2", "weights dtype", "ascend-a3"): (FP16, FP32),
    ("QuantLightningIndexerV2", "weights dtype", "ascend-950"): (FP32, FP16),
    "state dtype": (BF16, FP16),
    ("fla_npu.chunk_kda_fwd", "state dtype"): (FP32, BF16),
    "input dtype": (BF16, FP64),
    ("npu_quant_matmul", "input dtype"): (INT8, BF16),
    ("npu_grouped_matmul_swiglu_quant_v2", "input dtype"): (INT8, BF16),
    "output dtype": (INT8, BF16),
    "slot dtype": (INT32, FP32),
    "MX scale dtype": (E8M0, FP32),
    "MX scale dtype of an NZ weight": (E8M0, FP32),
    "cache dtype is the rows' dtype": (True, False),
    "index head dim": (128, 64),
    "index heads": (64, 65),
    "key heads": (1, 2),
    "query heads": (64, 96),
    ("npu_sparse_flash_attention", "query heads", "ascend-950"): (96, 129),
    "sparse_count": (2048, 0),
    "block size": (128, 24),
    "block_size": (32, 33),
    "block_size of a float32 input": (32, 64),
    "key layout": ("PA_BSND", "BSND"),
    "tail": ("minus_one", "lowest"),
    "mask": (None, "a mask"),
    "quant mode": (2, 6),
    ("npu_quant_lightning_indexer", "quant mode"): (0, 3),
    "weights times scale": (65504.0, 65505.0),
    "scale group": (32, 128),
    "latent dim": (512, 256),
    "rope dim": (64, 32),
    "nope dim": (128, 64),
    "query dim": (576, 512),
    "key bytes": (656, 576),
    "tile": (128, 64),
    "scale repo mode": (1, 0),
    "sparse_block_size": (1, 17),
    "experts": (2048, 2049),
    "experts per token": (16, 17),
    "rank": (2, 9),
    ("npu_rotary_mul", "rank"): (4, 3),
    "scores": ("sigmoid", "softmax"),
    "renormalised": (True, False),
    "groups": ("all, or -inf outside of the best", "0 outside of the best"),
    "tokens": (8, 513),
    "heads": (64, 257),
    "key dim": (128, 513),
    "value dim": (128, 513),
    ("npu_chunk_gated_delta_rule", "value dim"): (128, 129),
    "inner axis": (65535, 65536),
    "split-K with an NZ weight": (False, True),
    "activation": ("swiglu", "situ"),
    "hidden size": (7168, 512),
    "query rank": (1536, 512),
    "weight format": ("FRACTAL_NZ", "ND"),
    "weight_quant_mode": (0, 4),
    ("npu_mla_prolog_v3", "weight_quant_mode", "ascend-a3"): (0, 3),
    "graph": ("static", "dynamic"),
    "paired with combine": (True, False),
    "paired with dispatch": (True, False),
    "rotary dim": (64, 63),
    "format": (29, 4),
    "in a graph": (False, True),
    "inner size": (2, 1),
    ("npu_dynamic_mx_quant", "product"): ("ascend-950", "ascend-a3"),
    ("super_kernel", "product"): ("ascend-a3", "ascend-950"),
}

CASES = [
    (operator, constraint, product)
    for operator, table in ALL_TABLES.items()
    for constraint in table.constraints
    for product in constraint.products
]


def values_of(operator, constraint, product):
    keys = ((operator, constraint.what, product), (operator, constraint.what), constraint.what)
    return next(VALUES[key] for key in keys if key in VALUES)


@pytest.mark.parametrize(("operator", "constraint", "product"), CASES, ids=lambda x: getattr(x, "what", x))
def test_a_value_holds_and_another_breaks(operator, constraint, product):
    good, bad = values_of(operator, constraint, product)
    profile = PROFILES[product]
    assert violations(operator, profile, {constraint.what: good}) == []
    (told,) = violations(operator, profile, {constraint.what: bad})
    assert told.startswith(f"{operator} on {product} takes {constraint.what} ")
    assert told.endswith(constraint.remedy)
    assert constraint.remedy, "say what to do"


def test_no_value_stands_here_for_nothing():
    used = {key for case in CASES for key in ((case[0], case[1].what, case[2]), (case[0], case[1].what), case[1].what)}
    assert set(VALUES) <= used


def test_every_table_says_where_it_was_read():
    assert all(table.source for table in ALL_TABLES.values())


def test_the_two_products_differ_where_the_documents_do():
    def broken(operator, what, value):
        return [name for name, profile in PROFILES.items() if violations(operator, profile, {what: value})]

    assert broken("npu_lightning_indexer", "weights dtype", FP32) == ["ascend-950"]
    assert broken("npu_lightning_indexer", "index heads", 12) == ["ascend-950"]
    assert broken("npu_sparse_flash_attention", "query heads", 96) == ["ascend-a3"]
    assert broken("npu_quant_lightning_indexer", "query dtype", FP8) == ["ascend-a3"]
    assert broken("npu_kv_quant_sparse_flash_attention", "query heads", 48) == ["ascend-a3"]
    assert broken("npu_kv_quant_sparse_flash_attention", "sparse_block_size", 16) == ["ascend-950"]
    assert broken("npu_chunk_gated_delta_rule", "state dtype", FP32) == ["ascend-a3"]
    assert broken("npu_dynamic_block_quant", "output dtype", FP8) == ["ascend-a3"]


def test_a_sentence_names_the_value_and_the_remedy():
    profile = PROFILES["ascend-a3"]
    (constraint,) = [c for c in ALL_TABLES["npu_sparse_flash_attention"].constraints if c.what == "latent dim"]
    assert describe_violation("npu_sparse_flash_attention", profile, constraint, 256) == (
        "npu_sparse_flash_attention on ascend-a3 takes latent dim 512, not 256; kv_lora_rank = 512"
    )
