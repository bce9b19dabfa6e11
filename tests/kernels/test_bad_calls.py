"""What every implementation refuses, and that it says so by the argument's name."""

import pytest
import torch

from k31compile.errors import OperatorError


def draw_indexer(batch, rows, heads, width, positions):
    return torch.ones(batch, rows, heads, width), torch.ones(batch, positions, 1, width), torch.ones(batch, rows, heads)


def draw_attention(batch, rows, heads, width, positions, count):
    query, key = torch.ones(batch, rows, heads, width), torch.ones(batch, positions, 1, width)
    indices = torch.zeros(batch, rows, 1, count, dtype=torch.int64)
    return {"query": query, "key": key, "value": key + 1, "sparse_indices": indices, "scale_value": 0.3}


def _call(**changes):
    query, key, weights = draw_indexer(2, 3, 4, 5, 9)
    return {"query": query, "key": key, "weights": weights, "sparse_count": 3} | changes


BAD_INDEXER_CALLS = [
    ({"query": torch.ones(3, 4, 5)}, r"query must be \[B, T, H, D\]"),
    ({"query": torch.ones(2, 3, 4, 5, dtype=torch.int32)}, "query must be floating point"),
    ({"key": torch.ones(2, 9, 5)}, "key must have 4 dimensions"),
    ({"key": torch.ones(1, 9, 1, 5)}, "key holds 1 requests, the query 2"),
    ({"key": torch.ones(2, 9, 2, 5)}, "key must have one head"),
    ({"key": torch.ones(2, 9, 1, 6)}, "key has 6 features, query 5"),
    ({"weights": torch.ones(2, 3, 5)}, r"weights must have shape \[2, 3, 4\]"),
    ({"sparse_count": -1}, "sparse_count must not be negative"),
    ({"sparse_count": 10, "tail": "lowest"}, "exceeds the 9 positions"),
    ({"sparse_mode": 1}, "sparse_mode must be 0 or 3"),
    ({"order": "random"}, "order must be"),
    ({"tail": "zero"}, "tail must be"),
    ({"layout_query": "TND"}, "layout_query must be 'BSND'"),
    ({"layout_key": "TND"}, "layout_key must be"),
    ({"layout_key": "PA_BSND"}, "needs a block_table"),
    ({"block_table": torch.zeros(2, 1, dtype=torch.int32)}, "block_table belongs to"),
    ({"layout_key": "PA_BSND", "block_table": torch.zeros(2, 1)}, "block_table must hold integers"),
    ({"layout_key": "PA_BSND", "block_table": torch.zeros(3, 1).int()}, "block_table must have shape"),
    ({"actual_seq_lengths_key": torch.ones(2)}, "key lengths must hold integers"),
    ({"actual_seq_lengths_key": torch.ones(3).int()}, "key lengths must have shape"),
    ({"actual_seq_lengths_key": torch.ones(2, 3).int()}, "use sparse_mode=0"),
    ({"actual_seq_lengths_query": torch.ones(2, 3).int()}, "actual_seq_lengths_query must have shape"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_INDEXER_CALLS, ids=[message for _, message in BAD_INDEXER_CALLS])
def test_bad_indexer_calls_are_refused_by_name(indexer, changes, message):
    with pytest.raises(OperatorError, match=message) as caught:
        indexer(**_call(**changes))
    assert caught.value.code == "K31-0301"


ONES = torch.ones
BAD_ATTENTION_CALLS = [
    ({"query": ONES(3, 4, 5)}, r"query must be \[B, T, H, D\]"),
    ({"query": ONES(2, 3, 4, 5).int()}, "query must be floating point"),
    ({"key": ONES(2, 9, 5)}, "key must have 4 dimensions"),
    ({"key": ONES(2, 9, 1, 6)}, "key has 6 features, query 5"),
    ({"key": ONES(2, 9, 3, 5), "value": ONES(2, 9, 3, 5)}, "3 key heads do not divide 4"),
    ({"key": ONES(2, 9, 2, 5), "value": ONES(2, 9, 2, 5)}, "attention_mode 2 has one key head"),
    ({"value": ONES(2, 8, 1, 5)}, "value must have shape"),
    ({"sparse_indices": ONES(2, 3, 1, 4)}, "sparse_indices must hold integers"),
    ({"sparse_indices": ONES(2, 3, 4).int()}, "sparse_indices must have shape"),
    ({"query_rope": ONES(2, 3, 4, 2)}, "come together"),
    ({"query_rope": ONES(2, 3, 2, 2), "key_rope": ONES(2, 9, 1, 2)}, "query_rope must have shape"),
    ({"query_rope": ONES(2, 3, 4, 2), "key_rope": ONES(2, 9, 1, 3)}, "key_rope must have shape"),
    ({"sparse_block_size": 2}, "sparse_block_size must be 1"),
    ({"attention_mode": 1}, "attention_mode must be 0 or 2"),
    ({"layout_query": "TND"}, "layout_query must be"),
    ({"layout_kv": "TND"}, "layout_kv must be"),
    ({"layout_kv": "PA_BSND"}, "needs a block_table"),
    ({"block_table": torch.zeros(2, 1).int()}, "block_table belongs to"),
    ({"sparse_mode": 2}, "sparse_mode must be 0 or 3"),
    ({"actual_seq_lengths_kv": ONES(5).int()}, "key lengths must have shape"),
    ({"actual_seq_lengths_query": ONES(2)}, "actual_seq_lengths_query must hold integers"),
]


@pytest.mark.parametrize(
    ("changes", "message"), BAD_ATTENTION_CALLS, ids=[message for _, message in BAD_ATTENTION_CALLS]
)
def test_bad_attention_calls_are_refused_by_name(attention, changes, message):
    with pytest.raises(OperatorError, match=message):
        attention(**draw_attention(2, 3, 4, 5, 9, 4) | changes)


def test_an_index_beyond_the_cache_is_an_error(attention):
    for rows in (1, 40):
        case = draw_attention(1, rows, 3, 4, 19, 8)
        case["sparse_indices"][0, -1, 0, 5] = 19
        with pytest.raises(OperatorError, match="sparse_indices holds 19, but the cache has 19 positions"):
            attention(**case)


def test_a_block_that_does_not_exist_is_an_error(attention):
    case = draw_attention(1, 2, 3, 4, 8, 6)
    pages = {name: case[name].view(2, 4, 1, -1) for name in ("key", "value")}
    case |= {**pages, "layout_kv": "PA_BSND", "block_table": torch.tensor([[0, 2]])}
    case["sparse_indices"][:] = 3
    attention(**case, sparse_mode=0)
    case["sparse_indices"][0, 1, 0, 0] = 4
    with pytest.raises(OperatorError, match="block that does not exist"):
        attention(**case, sparse_mode=0)
