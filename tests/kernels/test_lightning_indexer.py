"""Every implementation of k31::lightning_indexer against a brute-force definition in float64."""

import math

import pytest
import torch

from k31compile.errors import OperatorError


def definition(query, key, weights, count, visible, order="position", tail="minus_one"):
    """Row by row in Python: `key` is [B, S, D] float64, `visible` a list [B][T]."""
    batch, rows, _, _ = query.shape
    result = torch.empty(batch, rows, 1, count, dtype=torch.int32)
    for b in range(batch):
        for t in range(rows):
            seen = key[b, : visible[b][t]].double()
            dots = (query[b, t].double() @ seen.T).relu()
            scores = (weights[b, t].double()[:, None] * dots).sum(0).tolist()

            def rank(s, scores=scores):
                return (0, 0.0, s) if math.isnan(scores[s]) else (1, -scores[s], s)

            chosen = sorted(range(len(scores)), key=rank)[:count]
            chosen = chosen if order == "score" else sorted(chosen)
            filler = range(len(chosen), count) if tail == "lowest" else [-1] * (count - len(chosen))
            result[b, t, 0] = torch.tensor([*chosen, *filler])
    return result


def causal(lengths, rows, limit, real=None):
    real = real or [rows] * len(lengths)
    return [
        [min(max(n - q + 1 + i, 0), limit) if i < q else 0 for i in range(rows)]
        for n, q in zip(lengths, real, strict=True)
    ]


def draw(batch, rows, heads, width, positions, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(batch, rows, heads, width, generator=generator)
    key = torch.randn(batch, positions, 1, width, generator=generator)
    weights = torch.randn(batch, rows, heads, generator=generator)
    return query.to(dtype), key.to(dtype), weights.to(dtype)


SIZES = [  # batch, rows, heads, width, positions, count: no two alike, tiles and vectors never full
    (1, 1, 1, 1, 2, 3),
    (2, 3, 4, 5, 29, 6),
    (1, 2, 3, 33, 97, 10),
    (3, 5, 7, 17, 23, 4),
    (1, 7, 9, 12, 25, 24),
    (2, 1, 20, 40, 411, 37),
    (1, 19, 37, 8, 61, 11),
    (1, 4, 64, 128, 773, 96),
    (2, 2, 8, 24, 131, 19),  # so few heads that lanes take turns in depth: 8, 4, 2 of 16, 8, 4 lanes
    (1, 3, 4, 20, 53, 9),
    (2, 1, 2, 12, 30, 5),
    (1, 3, 2, 6, 31, 4),  # an odd number of pairs
    (2, 2, 7, 128, 75, 11),
    (1, 11, 8, 24, 131, 19),  # rows side by side: two by two, or four by four, and what is left
    (2, 7, 4, 20, 53, 9),
    (1, 6, 13, 10, 47, 8),
    (1, 3, 2, 2, 140001, 5),  # too many ranks to keep for several rows
]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("order", ["position", "score"])
def test_odd_sizes(indexer, size, dtype, order):
    *shape, count = size
    query, key, weights = draw(*shape, dtype=dtype)
    got = indexer(query, key, weights, sparse_count=count, order=order)
    visible = causal([shape[4]] * shape[0], shape[1], shape[4])
    assert torch.equal(got, definition(query, key[:, :, 0], weights, count, visible, order))


@pytest.mark.parametrize("layout", ["contiguous", "permuted", "expanded", "sliced", "paged"])
def test_layouts_are_read_where_they_lie(indexer, layout):
    query, key, weights = draw(2, 3, 5, 13, 44)
    count, table, pages = 7, None, key
    if layout == "permuted":
        query = query.transpose(1, 2).contiguous().transpose(1, 2)
        pages = key.transpose(0, 1).contiguous().transpose(0, 1)
        weights = weights.transpose(1, 2).contiguous().transpose(1, 2)
    elif layout == "expanded":
        key = pages = key[:1].expand(2, -1, -1, -1)
    elif layout == "sliced":
        pages = torch.cat((key, key), -1)[..., 13:]
        query = torch.stack((query, query), -1)[..., 0]  # last dimension not contiguous
    elif layout == "paged":
        table = torch.tensor([[3, 1, 7, 2], [4, 8, 5, 6]])
        pages = torch.full((9, 11, 1, 13), torch.nan)
        for b in range(2):
            for block in range(4):
                pages[table[b, block]] = key[b, block * 11 : block * 11 + 11]
    got = indexer(
        query,
        pages,
        weights,
        block_table=table,
        sparse_count=count,
        layout_key="PA_BSND" if table is not None else "BSND",
    )
    assert torch.equal(got, definition(query, key[:, :, 0], weights, count, causal([44, 44], 3, 44)))


@pytest.mark.parametrize("rows", [1, 5, 6, 7, 24])
def test_history_around_the_count(indexer, rows):
    query, key, weights = draw(1, rows, 3, 10, rows)
    got = indexer(query, key, weights, sparse_count=6)
    assert torch.equal(got, definition(query, key[:, :, 0], weights, 6, causal([rows], rows, rows)))


@pytest.mark.parametrize("mode", [0, 3])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_ragged_lengths(indexer, mode, dtype):
    query, key, weights = draw(4, 5, 6, 9, 31)
    lengths, real = [31, 0, 8, 40], [5, 4, 2, 5]
    got = indexer(
        query,
        key,
        weights,
        actual_seq_lengths_key=torch.tensor(lengths, dtype=dtype),
        actual_seq_lengths_query=torch.tensor(real, dtype=dtype),
        sparse_count=4,
        sparse_mode=mode,
    )
    if mode == 3:
        visible = causal(lengths, 5, 31, real)
    else:
        visible = [[min(n, 31) if i < q else 0 for i in range(5)] for n, q in zip(lengths, real, strict=True)]
    assert torch.equal(got, definition(query, key[:, :, 0], weights, 4, visible))


def test_one_length_per_row(indexer):
    query, key, weights = draw(2, 3, 4, 6, 18)
    visible = [[18, 2, 0], [7, 11, 30]]
    got = indexer(query, key, weights, actual_seq_lengths_key=torch.tensor(visible), sparse_count=5, sparse_mode=0)
    clamped = [[min(n, 18) for n in row] for row in visible]
    assert torch.equal(got, definition(query, key[:, :, 0], weights, 5, clamped))


def test_equal_scores_go_to_the_lower_position(indexer):
    ones = torch.ones(1, 1, 2, 3)
    same = indexer(ones, torch.ones(1, 10, 1, 3), torch.ones(1, 1, 2), sparse_count=4)
    assert same.flatten().tolist() == [0, 1, 2, 3]
    values = torch.tensor([1.0, 3, 3, 3, 2, 3]).view(1, 6, 1, 1)
    edge = indexer(torch.ones(1, 1, 1, 1), values, torch.ones(1, 1, 1), sparse_count=2)
    assert edge.flatten().tolist() == [1, 2]


def test_many_ties_among_many_keys(indexer):
    generator = torch.Generator().manual_seed(3)
    key = torch.randint(-2, 3, (1, 3001, 1, 2), generator=generator).float()
    query, weights = torch.tensor([[[[1.0, 2], [-1, 1]]]]), torch.tensor([[[1.0, -0.5]]])
    for order in ("position", "score"):
        got = indexer(query, key, weights, sparse_count=1000, order=order)
        assert torch.equal(got, definition(query, key[:, :, 0], weights, 1000, [[3001]], order))


def test_scores_far_apart_and_signed_zeros(indexer):
    values = torch.tensor([0.0, -0.0, 1e-30, 1e30, -1e-30, 5.0, 3e-39, 1e30]).view(1, 8, 1, 1)
    for weight in (1.0, -1.0):
        weights = torch.full((1, 1, 1), weight)
        got = indexer(torch.ones(1, 1, 1, 1), values, weights, sparse_count=5, order="score")
        expected = definition(torch.ones(1, 1, 1, 1), values[:, :, 0], weights, 5, [[8]], "score")
        assert torch.equal(got, expected)


def test_nan_is_largest_and_infinities_count(indexer):
    values = torch.tensor([1.0, torch.nan, torch.inf, 2.0, torch.nan, -torch.inf, 3.0]).view(1, 7, 1, 1)
    query, weights = torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1)
    got = indexer(query, values, weights, sparse_count=4, order="score")
    assert got.flatten().tolist() == [1, 4, 2, 6]
    downward = indexer(query, values, -weights, sparse_count=6, order="score")
    assert downward.flatten().tolist() == [1, 4, 5, 0, 3, 6]


def test_every_nan_is_the_same_nan(indexer):
    words = torch.tensor([0x3F800000, -0x00400000, 0x7FC00001, 0x7F800000, -1], dtype=torch.int32)
    values = words.view(torch.float32).view(1, 5, 1, 1)
    got = indexer(torch.ones(1, 1, 1, 1), values, torch.ones(1, 1, 1), sparse_count=4, order="score")
    assert got.flatten().tolist() == [1, 2, 4, 3]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_lies_beyond_the_length_does_not_matter(indexer, bad):
    query, key, weights = draw(1, 3, 4, 6, 20)
    lengths = torch.tensor([13])
    clean = indexer(query, key, weights, actual_seq_lengths_key=lengths, sparse_count=5)
    key[:, 13:] = bad
    assert torch.equal(indexer(query, key, weights, actual_seq_lengths_key=lengths, sparse_count=5), clean)


def test_pages_beyond_the_length_need_not_exist(indexer):
    query, key, weights = draw(1, 2, 4, 6, 12)
    pages = torch.full((4, 4, 1, 6), torch.nan)
    pages[1], pages[3] = key[0, :4], key[0, 4:8]
    table = torch.tensor([[1, 3, -1, 99]], dtype=torch.int32)
    got = indexer(
        query,
        pages,
        weights,
        block_table=table,
        actual_seq_lengths_key=torch.tensor([8]),
        layout_key="PA_BSND",
        sparse_count=3,
    )
    assert torch.equal(got, definition(query, key[:, :, 0], weights, 3, causal([8], 2, 16)))
    with pytest.raises(OperatorError, match="block that does not exist"):
        indexer(query, pages, weights, block_table=table, layout_key="PA_BSND", sparse_count=3)


@pytest.mark.parametrize("order", ["position", "score"])
def test_tail_of_lowest_positions(indexer, order):
    query, key, weights = draw(1, 5, 2, 3, 5)
    got = indexer(query, key, weights, sparse_count=4, order=order, tail="lowest")
    expected = definition(query, key[:, :, 0], weights, 4, causal([5], 5, 5), order, "lowest")
    assert torch.equal(got, expected)
    assert all(len(set(row)) == 4 for row in got[0, :, 0].tolist())


def test_count_beyond_the_cache_and_count_zero(indexer):
    query, key, weights = draw(1, 2, 3, 4, 5)
    assert indexer(query, key, weights, sparse_count=64)[0, 1, 0, 4:].tolist() == [4, *[-1] * 59]
    assert indexer(query, key, weights, sparse_count=0).shape == (1, 2, 1, 0)
    empty = indexer(query, key[:, :0], weights, sparse_count=3)
    assert empty.flatten().tolist() == [-1] * 6


@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16, torch.float32),
        (torch.float32, torch.float32, torch.float16),
    ],
    ids=str,
)
def test_mixed_dtypes_lose_nothing(indexer, dtypes):
    query, key, weights = (x.to(t) for x, t in zip(draw(1, 3, 5, 21, 150), dtypes, strict=True))
    got = indexer(query, key, weights, sparse_count=12)
    assert torch.equal(got, definition(query, key[:, :, 0], weights, 12, causal([150], 3, 150)))


def test_bfloat16_overlaps_the_exact_selection(indexer):
    query, key, weights = draw(1, 48, 32, 64, 512, dtype=torch.bfloat16)
    got = indexer(query, key, weights, sparse_count=64)
    exact = definition(query, key[:, :, 0], weights, 64, causal([512], 48, 512))
    pairs = zip(got[0, :, 0].tolist(), exact[0, :, 0].tolist(), strict=True)
    shared = sum(len(set(a) & set(b)) for a, b in pairs)
    assert shared >= 0.99 * 48 * 64
