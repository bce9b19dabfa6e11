"""Masks of both cache operators, in every implementation, against a brute-force definition in float64."""

import pytest
import torch

from k31compile.errors import OperatorError

LOWEST = float(torch.finfo(torch.float32).min)


def random_mask(shape, kind, seed=0):
    """Half of the positions hidden; a float mask adds something to half of the others; one row sees nothing."""
    generator = torch.Generator().manual_seed(seed)
    seen = torch.rand(shape, generator=generator) < 0.5
    seen[0, 0] = False
    seen[-1, -1] = True
    if kind == "bool":
        return seen
    bias = torch.randn(shape, generator=generator) * (torch.rand(shape, generator=generator) < 0.5) * 3
    low = torch.where(torch.rand(shape, generator=generator) < 0.5, LOWEST, -torch.inf)
    return torch.where(seen, bias, low).to(torch.bfloat16 if kind == "bfloat16" else torch.float32)


def split(mask, sizes):
    """Which positions are seen, and what is added, both [B, T, S]."""
    full = mask.expand(sizes)
    if full.dtype == torch.bool:
        return full, torch.zeros(sizes, dtype=torch.float64)
    return full > -1e30, full.double().clamp_min(-1e30)


def selected(query, key, weights, count, seen, bias, order, tail):
    """Row by row in Python; `key` is [B, S, 1, D]."""
    batch, rows, positions = seen.shape
    result = torch.empty(batch, rows, 1, count, dtype=torch.int32)
    for b in range(batch):
        for t in range(rows):
            dots = (query[b, t].double() @ key[b, :, 0].double().T).relu()
            scores = (weights[b, t].double()[:, None] * dots).sum(0) + bias[b, t]
            visible = [s for s in range(positions) if seen[b, t, s]]
            chosen = sorted(visible, key=lambda s, scores=scores: (-float(scores[s]), s))[:count]
            chosen = chosen if order == "score" else sorted(chosen)
            rest = [s for s in range(positions) if s not in chosen]
            empty = count - len(chosen)
            result[b, t, 0] = torch.tensor([*chosen, *(rest[:empty] if tail == "lowest" else [-1] * empty)])
    return result


def draw(batch, rows, heads, width, positions, seed=0):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(batch, rows, heads, width, generator=generator)
    key = torch.randn(batch, positions, 1, width, generator=generator)
    return query, key, torch.randn(batch, rows, heads, generator=generator)


KINDS = ("bool", "float32", "bfloat16")
SHAPES = {"full": (2, 3, 29), "one request": (1, 3, 29), "keys alone": (2, 1, 29), "rows alone": (2, 3, 1)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("order", "tail"), [("position", "minus_one"), ("score", "lowest")])
def test_the_indexer_chooses_among_what_a_mask_shows(indexer, kind, shape, order, tail):
    query, key, weights = draw(2, 3, 5, 7, 29)
    mask = random_mask(SHAPES[shape], kind)
    seen, bias = split(mask, (2, 3, 29))
    for count in (6, 20):
        got = indexer(query, key, weights, sparse_mode=0, sparse_count=count, order=order, tail=tail, mask=mask)
        assert torch.equal(got, selected(query, key, weights, count, seen, bias, order, tail))


def test_a_mask_and_lengths_hide_together(indexer):
    query, key, weights = draw(2, 4, 3, 5, 23)
    mask = random_mask((2, 1, 23), "bool", 3)
    lengths = torch.tensor([23, 9])
    rows = torch.arange(4)
    causal = torch.arange(23) < (lengths[:, None] - 4 + 1 + rows)[..., None]
    got = indexer(query, key, weights, actual_seq_lengths_key=lengths, sparse_count=8, tail="lowest", mask=mask)
    want = selected(query, key, weights, 8, causal & mask, torch.zeros(2, 4, 23), "position", "lowest")
    assert torch.equal(got, want)


@pytest.mark.parametrize("kind", KINDS)
def test_few_rows_and_many_keys_with_a_mask(indexer, kind):
    query, key, weights = draw(2, 1, 8, 16, 4099)
    mask = random_mask((2, 1, 4099), kind)
    mask[1, 0, :2500] = False if kind == "bool" else -torch.inf
    seen, bias = split(mask, (2, 1, 4099))
    got = indexer(query, key, weights, sparse_mode=0, sparse_count=33, mask=mask)
    assert torch.equal(got, selected(query, key, weights, 33, seen, bias, "position", "minus_one"))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_a_mask_hides_does_not_matter(indexer, attention, bad):
    query, key, weights = draw(1, 2, 3, 4, 19)
    mask = random_mask((1, 1, 19), "bool")
    mask[:] = torch.arange(19) % 3 > 0
    clean = indexer(query, key, weights, sparse_mode=0, sparse_count=5, mask=mask)
    spoilt = torch.where(mask[0, 0][None, :, None, None], key, bad)
    assert torch.equal(indexer(query, spoilt, weights, sparse_mode=0, sparse_count=5, mask=mask), clean)
    indices = torch.arange(19).expand(1, 2, 1, 19)
    got, want = (attention(query, k, k, indices, 0.4, sparse_mode=0, mask=mask) for k in (spoilt, key))
    assert torch.equal(got, want)


def attended(query, key, value, indices, scale, seen, bias):
    result = torch.zeros(*query.shape[:3], value.shape[3], dtype=torch.float64)
    for b in range(query.shape[0]):
        for t in range(query.shape[1]):
            chosen = [i for i in indices[b, t, 0].tolist() if i >= 0 and seen[b, t, i]]
            for h in range(query.shape[2] if chosen else 0):
                logits = key[b, chosen, 0].double() @ query[b, t, h].double() * scale + bias[b, t, chosen]
                result[b, t, h] = torch.softmax(logits, 0) @ value[b, chosen, 0].double()
    return result


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_attention_reads_what_a_mask_shows(attention, kind, shape, dtype):
    query, key, _ = (x.to(dtype) for x in draw(2, 3, 6, 9, 29, seed=1))
    value = draw(2, 3, 1, 13, 29, seed=2)[1].to(dtype)
    indices = torch.randint(-2, 29, (2, 3, 1, 17), generator=torch.Generator().manual_seed(3))
    mask = random_mask(SHAPES[shape], kind)
    got = attention(query, key, value, indices, 0.3, sparse_mode=0, attention_mode=0, mask=mask)
    want = attended(query, key, value, indices, 0.3, *split(mask, (2, 3, 29)))
    assert (got.double() - want).norm() <= (1e-5 if dtype == torch.float32 else 1e-2) * want.norm()
    assert not got[0, 0].any()


@pytest.mark.parametrize("kind", KINDS)
def test_long_lists_and_few_rows_with_a_mask(attention, kind):
    query, key, _ = draw(1, 1, 16, 64, 3001, seed=4)
    indices = torch.randperm(3001, generator=torch.Generator().manual_seed(5))[:2003].view(1, 1, 1, -1)
    mask = random_mask((1, 2, 3001), kind)[:, 1:]
    got = attention(query, key, key, indices, 0.1, sparse_mode=0, mask=mask)
    want = attended(query, key, key, indices, 0.1, *split(mask, (1, 1, 3001)))
    assert (got.double() - want).norm() <= 1e-5 * want.norm()


BAD = [
    (torch.ones(2, 3, 8), r"mask must have shape \[2, 3, 9\] or 1 for any of these, not \[2, 3, 8\]"),
    (torch.ones(2, 1, 3, 9), "mask must have shape"),
    (torch.ones(2, 3, 9).int(), "mask must be boolean or floating point, not torch.int32"),
]


@pytest.mark.parametrize(("mask", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_masks_are_refused_by_name(indexer, attention, mask, message):
    query, key, weights = draw(2, 3, 4, 5, 9)
    with pytest.raises(OperatorError, match=message):
        indexer(query, key, weights, sparse_count=3, mask=mask)
    with pytest.raises(OperatorError, match=message):
        attention(query, key, key, torch.zeros(2, 3, 1, 4).int(), 1.0, mask=mask)


def test_masks_of_other_strides_and_dtypes(indexer):
    query, key, weights = draw(2, 3, 5, 7, 29)
    full = random_mask((2, 3, 29), "float32")
    want = indexer(query, key, weights, sparse_mode=0, sparse_count=6, mask=full)
    for mask in (
        full.transpose(0, 2).contiguous().transpose(0, 2),
        full.double(),
        torch.stack((full, full), -1)[..., 0],
    ):
        assert torch.equal(indexer(query, key, weights, sparse_mode=0, sparse_count=6, mask=mask), want)
