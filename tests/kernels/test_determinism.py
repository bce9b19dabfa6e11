"""The same bits in every repetition, with any number of threads, and beside other callers."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch


def draw_indexer(batch, rows, heads, width, positions, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(batch, rows, heads, width, generator=generator)
    key = torch.randn(batch, positions, 1, width, generator=generator)
    weights = torch.randn(batch, rows, heads, generator=generator)
    return query.to(dtype), key.to(dtype), weights.to(dtype)


def draw_attention(size, dtype=torch.float32, seed=0, top=None):
    batch, rows, heads, groups, width, value_width, rope, positions, count = size
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    case = {
        "query": normal(batch, rows, heads, width),
        "key": normal(batch, positions, groups, width),
        "value": normal(batch, positions, groups, value_width),
        "sparse_indices": torch.randint(-2, top or positions, (batch, rows, 1, count), generator=generator),
        "scale_value": 0.3,
        "attention_mode": 2 if groups == 1 else 0,
    }
    if rope:
        case["query_rope"] = normal(batch, rows, heads, rope)
        case["key_rope"] = normal(batch, positions, groups, rope)
    return case


@pytest.mark.parametrize("rows", [1, 40])
def test_indexer_threads_and_repetitions_agree(indexer, two_threads, rows):
    query, key, weights = draw_indexer(1, rows, 16, 32, 6000 if rows == 1 else 900, dtype=torch.bfloat16)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results += [indexer(query, key, weights, sparse_count=200) for _ in range(4)]
    assert all(torch.equal(result, results[0]) for result in results)


def test_several_indexer_callers_at_once(indexer):
    cases = [draw_indexer(1, 3, 16, 64, 900 + 300 * i, seed=i) for i in range(8)]
    alone = [indexer(*case, sparse_count=50) for case in cases]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda case: indexer(*case, sparse_count=50), cases * 6))
    assert all(torch.equal(a, b) for a, b in zip(alone * 6, together, strict=True))


@pytest.mark.parametrize("rows", [1, 9])
def test_attention_threads_and_repetitions_agree(attention, two_threads, rows):
    case = draw_attention((1, rows, 16, 1, 64, 64, 0, 3000, 2000), torch.bfloat16)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results += [attention(**case) for _ in range(4)]
    assert all(torch.equal(result, results[0]) for result in results)


def test_several_attention_callers_at_once(attention):
    cases = [draw_attention((1, 3, 8, 1, 64, 64, 0, 400, 200 + 90 * i), seed=i) for i in range(8)]
    alone = [attention(**case) for case in cases]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda case: attention(**case), cases * 6))
    assert all(torch.equal(a, b) for a, b in zip(alone * 6, together, strict=True))
