"""The two k31::attn_res phases with weights in the place of a mixture, several banks, a slot among all queries."""

import pytest
import torch
from attn_res_cases import EPS, draw, draw_update

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def split(bank, cuts=(2, 3)):
    """The blocks of one bank in three, the second of which lies in memory as a list of its blocks would."""
    parts = list(bank.tensor_split(cuts, dim=1))
    parts[1] = parts[1].transpose(0, 1).contiguous().transpose(0, 1)
    return parts


@pytest.mark.parametrize("size", [(2, 5, 3, 7), (1, 4, 4, 5), (3, 9, 35, 129), (5, 11, 2, 1030)], ids=str)
@pytest.mark.parametrize("valid", [False, True])
@DTYPES
def test_weights_instead_of_the_mixture(attn_res, size, valid, dtype):
    case = draw(*size, dtype=dtype)
    if valid:
        case["valid"] = torch.arange(size[1]) % 3 != 1
    first, *more = split(case["bank"])
    want = attn_res[0](**case)
    maximum, total, weights = attn_res[0](**case | {"bank": first, "more": more}, mix=False)
    assert torch.equal(maximum, want[0])
    assert torch.equal(total, want[1])
    assert weights.shape == (size[0], size[2], size[1])
    assert weights.dtype == torch.float32
    mixed = torch.einsum("mqn,mnd->mqd", weights.double(), case["bank"].double())
    torch.testing.assert_close(mixed, want[2].double(), rtol=2e-6, atol=2e-5)
    together = attn_res[0](**case | {"bank": first, "more": more})
    assert all(map(torch.equal, together, want))
    if valid:
        assert not weights[..., ~case["valid"]].any()


@pytest.mark.parametrize("size", [(1, 1), (2, 7), (3, 64), (5, 300)], ids=str)
@pytest.mark.parametrize("blocks", [1, 5, 19])
@pytest.mark.parametrize("normed", [False, True])
@DTYPES
def test_update_mixes_the_frozen_sums(attn_res, size, blocks, normed, dtype):
    tokens, width = size
    case = draw_update(tokens, width, dtype=dtype)
    bank = draw(tokens, blocks, 1, width, dtype=dtype, seed=5)["bank"]
    weights = torch.rand(tokens, blocks, generator=torch.Generator().manual_seed(6))
    norm = {"norm_weight": torch.linspace(-2, 3, width), "norm_eps": 0.3} if normed else {}
    mixture = torch.einsum("mn,mnd->md", weights.double(), bank.double())
    want = attn_res[1](**case | {"mixture": mixture.float()}, **norm)
    for banks in ([bank], split(bank, (1, min(4, blocks)))):
        banks = [part for part in banks if part.shape[1]]
        result, mixed = attn_res[1](**case | {"mixture": weights}, bank=banks, **norm)
        assert torch.equal(result, want[0])
        assert mixed.dtype == dtype
        bound = 1e-5 if dtype == torch.float32 else 2**-7
        torch.testing.assert_close(mixed, want[1], rtol=bound, atol=bound)


def test_dtypes_of_banks_do_not_matter(attn_res):
    case = draw_update(3, 133, dtype=torch.bfloat16)
    bank = draw(3, 6, 1, 133, dtype=torch.bfloat16)["bank"]
    case["mixture"] = torch.rand(3, 6, generator=torch.Generator().manual_seed(6))
    want = attn_res[1](**case, bank=[bank], dtype=torch.float32)
    parts = [bank[:, :2], bank[:, 2:3].float(), bank[:, 3:]]
    got = attn_res[1](**case, bank=parts, dtype=torch.float32)
    assert torch.equal(got[0], want[0])
    torch.testing.assert_close(got[1], want[1], rtol=1e-6, atol=1e-6)
    first, *more = parts
    queries = draw(3, 6, 4, 133)["queries"]
    prepared = [
        attn_res[0](start, queries, eps=EPS, mix=False, more=rest) for start, rest in ((bank, []), (first, more))
    ]
    assert all(map(torch.equal, *prepared))


def test_a_sum_without_weight_is_not_read(attn_res):
    case, bank = draw_update(2, 70), draw(2, 4, 1, 70)["bank"]
    case["mixture"] = torch.tensor([[0.5, 0.0, 1.0, 0.25], [0.0, 2.0, 0.5, 0.0]])
    want = attn_res[1](**case, bank=[bank])
    bank[case["mixture"] == 0] = torch.nan
    assert all(map(torch.equal, attn_res[1](**case, bank=[bank]), want))
    case["mixture"][0, 1] = 1e-3
    assert attn_res[1](**case, bank=[bank])[1].isnan().all(1).tolist() == [True, False]


@pytest.mark.parametrize("mix", [True, False])
def test_a_slot_among_all_queries(attn_res, mix):
    case, bank = draw_update(3, 33), draw(3, 4, 5, 33)
    names = ("maximum", "total", "mixture")
    prepared = dict(zip(names, attn_res[0](**bank, mix=mix), strict=True))
    more = {} if mix else {"bank": [bank["bank"]]}
    for slot in (0, 3, 4):
        got = attn_res[1](**case | prepared, slot=slot, **more)
        want = attn_res[1](**case | {name: prepared[name][:, slot] for name in names}, **more)
        assert all(map(torch.equal, got, want))


def test_a_bank_of_nothing(attn_res):
    case = draw_update(3, 19)
    case |= {"maximum": torch.full((3,), -torch.inf), "total": torch.zeros(3), "mixture": torch.ones(3, 0)}
    for bank in ([], [torch.ones(3, 0, 19)]):
        result, mixed = attn_res[1](**case, bank=bank)
        assert torch.equal(mixed, result)


@pytest.mark.parametrize("mix", [False, True])
@DTYPES
def test_queries_of_any_dtype(attn_res, mix, dtype):
    case = draw(2, 5, 7, 133)
    narrow = case["queries"].to(dtype)
    got = attn_res[0](**case | {"queries": narrow}, mix=mix)
    want = attn_res[0](**case | {"queries": narrow.float()}, mix=mix)
    assert all(map(torch.equal, got, want))
    update = draw_update(2, 133)
    query = update["query"].to(dtype)
    got, want = (attn_res[1](**update | {"query": given}) for given in (query, query.float()))
    assert all(map(torch.equal, got, want))
