"""Every implementation of k31::sparse_flash_attention against a brute-force definition in float64."""

import pytest
import torch


def definition(query, key, value, indices, scale, visible, query_rope=None, key_rope=None):
    """Row by row and head by head: `key`, `value` are [B, S, N, .], `visible` a list [B][T]."""
    if query_rope is not None:
        query, key = torch.cat((query, query_rope), -1), torch.cat((key, key_rope), -1)
    query, key, value = query.double(), key.double(), value.double()
    batch, rows, heads, _ = query.shape
    result = torch.zeros(batch, rows, heads, value.shape[3], dtype=torch.float64)
    for b in range(batch):
        for t in range(rows):
            chosen = [i for i in indices[b, t, 0].tolist() if 0 <= i < visible[b][t]]
            for h in range(heads if chosen else 0):
                group = h * key.shape[2] // heads
                weight = torch.softmax(key[b, chosen, group] @ query[b, t, h] * scale, 0)
                result[b, t, h] = weight @ value[b, chosen, group]
    return result


def draw(size, dtype=torch.float32, seed=0, top=None):
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


def expected(case, visible):
    names = ("query", "key", "value", "sparse_indices", "scale_value")
    ropes = {name: case.get(name) for name in ("query_rope", "key_rope")}
    return definition(*(case[name] for name in names), visible, **ropes)


def causal(lengths, rows, limit):
    return [[min(max(n - rows + 1 + i, 0), limit) for i in range(rows)] for n in lengths]


def assert_near(got, want, dtype):
    bound = 1e-5 if dtype == torch.float32 else 1e-2
    assert got.dtype == dtype
    assert (got.double() - want).norm() <= bound * want.norm()


SIZES = [  # batch, rows, heads, groups, width, value width, rope, positions, count: no two alike
    (1, 1, 1, 1, 1, 1, 0, 2, 3),
    (2, 3, 4, 1, 5, 7, 0, 29, 6),
    (1, 2, 6, 3, 33, 24, 9, 97, 50),
    (3, 4, 5, 5, 17, 19, 3, 23, 13),
    (2, 1, 20, 2, 40, 30, 8, 411, 47),
    (1, 7, 9, 1, 12, 12, 5, 61, 49),
    (1, 2, 17, 1, 203, 66, 64, 300, 700),
    (1, 2, 64, 1, 96, 96, 16, 777, 541),
]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_odd_sizes(attention, size, dtype):
    case = draw(size, dtype)
    visible = causal([size[7]] * size[0], size[1], size[7])
    assert_near(attention(**case), expected(case, visible), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_absorbed_latent_shared_by_key_and_value(attention, dtype):
    case = draw((1, 3, 16, 1, 40, 40, 0, 130, 60), dtype)
    cache = torch.randn(1, 130, 1, 56, generator=torch.Generator().manual_seed(1)).to(dtype)
    case["key"] = case["value"] = cache[..., :40]
    case["key_rope"], case["query_rope"] = cache[..., 40:], torch.randn(1, 3, 16, 16).to(dtype)
    assert_near(attention(**case), expected(case, causal([130], 3, 130)), dtype)


def test_value_that_only_starts_where_the_key_starts(attention):
    case = draw((1, 2, 3, 1, 8, 13, 0, 40, 30))
    case["key"] = case["value"][..., :8]
    assert_near(attention(**case), expected(case, causal([40], 2, 40)), torch.float32)
    case = draw((2, 2, 4, 2, 6, 6, 0, 40, 30))
    for view in (case["key"][:, :1], case["key"][:1], case["key"][:, :, :1]):
        case["value"] = view.expand(2, 40, 2, 6)
        assert_near(attention(**case), expected(case, causal([40] * 2, 2, 40)), torch.float32)


@pytest.mark.parametrize("layout", ["permuted", "expanded", "sliced", "paged"])
def test_layouts_are_read_where_they_lie(attention, layout):
    case = draw((2, 3, 4, 2, 10, 13, 6, 35, 21))
    want = expected(case, causal([35, 35], 3, 35))
    caches = ("key", "value", "key_rope")
    if layout == "permuted":
        for name in (*caches, "query", "query_rope"):
            case[name] = case[name].permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3)
    elif layout == "expanded":
        for name in caches:
            case[name] = case[name][:1].expand(2, -1, -1, -1)
        want = expected(case, causal([35, 35], 3, 35))
    elif layout == "sliced":
        for name in (*caches, "query", "query_rope"):
            case[name] = torch.stack((case[name], case[name]), -1)[..., 1]
        case["sparse_indices"] = torch.cat((case["sparse_indices"], case["sparse_indices"]), -1)[..., :21]
    else:
        table = torch.tensor([[3, 1, 7, 2, 9], [4, 8, 5, 6, 10]], dtype=torch.int32)
        for name in caches:
            pages = torch.full((11, 7, *case[name].shape[2:]), torch.nan)
            for b in range(2):
                for block in range(5):
                    pages[table[b, block]] = case[name][b, block * 7 : block * 7 + 7]
            case[name] = pages
        case |= {"block_table": table, "layout_kv": "PA_BSND"}
    assert_near(attention(**case), want, torch.float32)


@pytest.mark.parametrize("mode", [0, 3])
def test_ragged_lengths_and_padding_rows(attention, mode):
    case = draw((4, 5, 6, 2, 9, 8, 0, 31, 12))
    lengths, real = [31, 0, 8, 40], [5, 4, 2, 5]
    case |= {
        "actual_seq_lengths_kv": torch.tensor(lengths, dtype=torch.int32),
        "actual_seq_lengths_query": torch.tensor(real),
        "sparse_mode": mode,
    }
    visible = [
        [min(max(n - q + 1 + i if mode else n, 0), 31) if i < q else 0 for i in range(5)]
        for n, q in zip(lengths, real, strict=True)
    ]
    got = attention(**case)
    assert_near(got, expected(case, visible), torch.float32)
    assert not got[1].any()
    assert not got[2, 2:].any()


def test_one_length_per_row(attention):
    case = draw((2, 3, 4, 1, 6, 5, 0, 18, 20))
    visible = [[18, 2, 0], [7, 11, 30]]
    case |= {"actual_seq_lengths_kv": torch.tensor(visible), "sparse_mode": 0}
    assert_near(attention(**case), expected(case, visible), torch.float32)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.int16], ids=str)
def test_index_dtypes(attention, dtype):
    case = draw((1, 2, 3, 1, 4, 5, 0, 19, 8))
    want = expected(case, causal([19], 2, 19))
    case["sparse_indices"] = case["sparse_indices"].to(dtype)
    assert_near(attention(**case), want, torch.float32)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_invisible_rows_are_never_read(attention, bad):
    value = torch.randn(1, 6, 1, 4, generator=torch.Generator().manual_seed(5))
    value[0, 0], value[0, 5] = bad, bad
    indices = torch.tensor([[2, -1, -1], [-1, -1, -1], [2, 5, -1]]).view(1, 3, 1, 3)
    got = attention(
        torch.ones(1, 3, 2, 4),
        value,
        value,
        indices,
        1.0,
        actual_seq_lengths_kv=torch.tensor([5]),
        sparse_mode=0,
    )
    for row in (0, 2):
        assert torch.equal(got[0, row], value[0, 2].expand(2, 4))
    assert torch.equal(got[0, 1], torch.zeros(2, 4))


def test_logits_of_any_size(attention):
    case = draw((1, 2, 3, 1, 8, 8, 0, 200, 150))
    case["query"] *= 300
    assert_near(attention(**case), expected(case, causal([200], 2, 200)), torch.float32)
    lowest = draw((1, 1, 2, 1, 3, 4, 0, 5, 4))
    lowest["key"][:] = -torch.inf
    lowest["query"] = lowest["query"].abs()
    assert not attention(**lowest).any()  # every weight is exp(-inf)


@pytest.mark.parametrize("count", [4, 5])
def test_visible_infinities_and_nans_show(attention, count):
    case = draw((1, 1, 2, 1, 4, 4, 0, 5, count), torch.bfloat16)
    case["sparse_indices"] = torch.arange(count).view(1, 1, 1, count)
    case["value"][0, count - 1, 0, 1] = torch.inf
    got = attention(**case, sparse_mode=0)
    assert torch.equal(got[..., 1], torch.full((1, 1, 2), torch.inf, dtype=torch.bfloat16))
    assert got[..., [0, 2, 3]].isfinite().all()
    case["value"] = case["value"].float()
    case["value"].view(torch.int32)[0, 0, 0, 2] = 0x7FFFFFFF  # rounds to -0 when taken for a number
    assert attention(**case, sparse_mode=0)[..., 2].isnan().all()


def test_what_an_earlier_call_left_behind_does_not_matter(attention):
    even = draw((1, 2, 4, 1, 6, 8, 2, 50, 40), torch.bfloat16)
    odd = draw((1, 2, 4, 1, 5, 7, 1, 50, 40), torch.bfloat16)
    want = attention(**odd)
    spoilt = even | {name: even[name] * torch.nan for name in ("key", "value", "key_rope")}
    assert attention(**spoilt).isnan().any()
    assert torch.equal(attention(**odd), want)
    assert_near(want, expected(odd, causal([50], 2, 50)), torch.bfloat16)


def test_duplicates_count_twice(attention):
    case = draw((1, 1, 2, 1, 3, 4, 0, 5, 3))
    case["sparse_indices"] = torch.tensor([1, 1, 4]).view(1, 1, 1, 3)
    assert_near(attention(**case), expected(case, [[5]]), torch.float32)


@pytest.mark.parametrize("rows", [1, 7, 63, 64, 65])
def test_everything_selected_is_dense_attention(attention, rows):
    case = draw((1, rows, 2, 1, 5, 6, 0, rows, 64))
    slots = torch.arange(64).where(torch.arange(64) < rows, -1)
    case["sparse_indices"] = slots.expand(1, rows, 1, 64)
    if rows > 64:
        case["sparse_indices"] = torch.arange(64).expand(1, rows, 1, 64)
    got = attention(**case)
    mask = torch.ones(rows, rows, dtype=torch.bool).tril() & (torch.arange(rows) < 64)
    query, key, value = (case[name].transpose(1, 2).double() for name in ("query", "key", "value"))
    dense = torch.nn.functional.scaled_dot_product_attention(
        query, key.expand(-1, 2, -1, -1), value.expand(-1, 2, -1, -1), mask, scale=0.3
    )
    assert_near(got, dense.transpose(1, 2), torch.float32)


def test_nothing_to_attend_to(attention):
    case = draw((2, 3, 4, 1, 5, 6, 0, 8, 2))
    case["sparse_indices"] = case["sparse_indices"][..., :0]
    assert torch.equal(attention(**case), torch.zeros(2, 3, 4, 6))
    case = draw((2, 3, 4, 1, 5, 6, 0, 8, 2))
    case["sparse_indices"].fill_(-1)
    case["key"], case["value"] = case["key"][:, :0], case["value"][:, :0]
    assert torch.equal(attention(**case), torch.zeros(2, 3, 4, 6))


@pytest.mark.parametrize("names", [("query",), ("key", "value"), ("query_rope",), ("value", "key_rope")], ids=str)
def test_mixed_dtypes(attention, names):
    case = draw((1, 2, 4, 1, 20, 11, 6, 50, 30))
    for name in names:
        case[name] = case[name].bfloat16()
    assert_near(attention(**case), expected(case, causal([50], 2, 50)), case["query"].dtype)
