"""Every implementation of the two k31::attn_res phases against float64 loops and against the one-phase forms."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from attn_res_cases import EPS, assert_near, draw, draw_update

import k31compile.kernels as kernels
from k31compile.errors import OperatorError
from k31compile.model.attn_res import AttnRes
from k31compile.model.norms import RMSNorm

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def logit_of(row, query):
    return (row @ query).item() / math.sqrt(row.square().mean().item() + EPS)


def define_prepare(bank, queries, valid=None, **_):
    """Query by query, over the blocks that count."""
    bank, queries = bank.double(), queries.double()
    tokens, blocks, width = bank.shape
    counts = range(blocks) if valid is None else [i for i in range(blocks) if valid[i]]
    maximum = torch.full((tokens, len(queries)), -torch.inf, dtype=torch.float64)
    total, mixture = torch.zeros_like(maximum), torch.zeros(tokens, len(queries), width, dtype=torch.float64)
    for m in range(tokens):
        for q, query in enumerate(queries):
            logits = {i: logit_of(bank[m, i], query) for i in counts}
            maximum[m, q] = max(logits.values(), default=-torch.inf)
            for i, logit in logits.items():
                weight = math.exp(logit - maximum[m, q])
                total[m, q] += weight
                mixture[m, q] += weight * bank[m, i]
    return maximum, total, mixture


def define_mixed(rows, query):
    """The one-phase form for one token and one query: rows is a list of sources."""
    logits = torch.tensor([logit_of(row.double(), query.double()) for row in rows], dtype=torch.float64)
    return sum(weight * row.double() for weight, row in zip(logits.softmax(0), rows, strict=True))


SIZES = [  # tokens, blocks, queries, width: no two alike
    (1, 2, 3, 4),
    (2, 1, 4, 5),
    (2, 3, 5, 7),
    (3, 4, 1, 33),
    (2, 5, 7, 129),
    (5, 8, 24, 65),
    (7, 6, 35, 19),
    (2, 9, 3, 1030),
]


@pytest.mark.parametrize("size", SIZES, ids=str)
@DTYPES
def test_prepare_of_odd_sizes(attn_res, size, dtype):
    case = draw(*size, dtype=dtype)
    got = attn_res[0](**case)
    assert_near(got, define_prepare(**case), 1.5e-5)  # sums as large as 30, logits as large as 10
    assert all(tensor.dtype == torch.float32 and tensor.is_contiguous() for tensor in got)


@pytest.mark.parametrize("order", [(1, 0, 2), (2, 1, 0), (0, 2, 1)], ids=str)
@DTYPES
def test_a_bank_of_any_strides(attn_res, order, dtype):
    case = draw(3, 5, 4, 19, dtype=dtype)
    want = attn_res[0](**case)
    inverse = [order.index(i) for i in range(3)]
    case["bank"] = case["bank"].permute(order).contiguous().permute(inverse)
    case["queries"] = case["queries"].T.contiguous().T
    assert_near(attn_res[0](**case), [tensor.double() for tensor in want], 1e-6)


@pytest.mark.parametrize("valid", [[1, 1, 1, 0, 0, 0], [0, 1, 0, 1, 1, 0], [0] * 6, [1] * 6], ids=str)
def test_blocks_that_do_not_count_are_never_read(attn_res, valid):
    mask = torch.tensor(valid, dtype=torch.bool)
    case = draw(2, 6, 5, 9)
    case["bank"][:, ~mask] = torch.nan
    got = attn_res[0](**case, valid=mask)
    assert_near(got, define_prepare(**case, valid=valid))
    if valid == sorted(valid, reverse=True):
        for count in (torch.tensor(sum(valid)), torch.tensor([sum(valid)], dtype=torch.int32)):
            assert all(map(torch.equal, attn_res[0](**case, valid=count), got))


def test_a_count_beyond_the_bank_is_all_of_it(attn_res):
    case = draw()
    want = attn_res[0](**case)
    assert all(map(torch.equal, attn_res[0](**case, valid=torch.tensor(9)), want))
    assert torch.equal(attn_res[0](**case, valid=torch.tensor(-1))[2], torch.zeros_like(want[2]))


def test_logits_of_any_size(attn_res):
    case = draw(2, 5, 3, 40)
    case["queries"] *= 400
    assert_near(attn_res[0](**case), define_prepare(**case), 2e-3)  # of logits in the thousands


def test_a_broken_block_breaks_its_token_only(attn_res):
    case = draw(3, 5, 9, 8)
    want = attn_res[0](**case)
    case["bank"][1, 3, 6] = torch.nan
    maximum, total, mixture = attn_res[0](**case)
    for tensor in (maximum, total, mixture):
        assert tensor[1].isnan().all()
    for got, before in zip((maximum, total, mixture), want, strict=True):
        assert torch.equal(got[[0, 2]], before[[0, 2]])


@pytest.mark.parametrize("size", [(0, 3, 5, 7), (2, 0, 5, 7), (2, 3, 0, 7)], ids=str)
def test_nothing_to_prepare(attn_res, size):
    maximum, total, mixture = attn_res[0](**draw(*size))
    assert maximum.shape == total.shape == (size[0], size[2])
    assert torch.equal(maximum, torch.full_like(maximum, -torch.inf))
    assert torch.equal(mixture, torch.zeros(size[0], size[2], 7))


@pytest.mark.parametrize("size", [(2, 1), (3, 7), (2, 65), (5, 300)], ids=str)
@pytest.mark.parametrize("normed", [False, True])
@DTYPES
def test_update_of_odd_sizes(attn_res, size, normed, dtype):
    case = draw_update(*size, dtype=dtype)
    norm_eps, weight = 0.3, torch.linspace(-2, 3, size[1]) if normed else None
    result, mixed = attn_res[1](**case, norm_weight=weight, norm_eps=norm_eps)
    assert result.dtype == mixed.dtype == dtype
    assert torch.equal(result, case["partial"] + case["delta"])
    for m in range(size[0]):
        p = result[m].double()
        own, shared = logit_of(p, case["query"].double()), case["maximum"][m].item()
        scale = math.exp(own - shared)
        h = (case["mixture"][m].double() + scale * p) / (case["total"][m].double() + scale)
        if normed:
            h = h / math.sqrt(h.square().mean() + norm_eps) * weight.double()
        bound = 5e-6 if dtype == torch.float32 else 2**-7
        torch.testing.assert_close(mixed[m].double(), h, rtol=bound, atol=bound)


@DTYPES
def test_the_norm_reads_what_was_rounded(attn_res, dtype):
    case = draw_update(3, 70)
    case["partial"] *= 50
    norm = RMSNorm(70, 1e-3)
    norm.weight.data.normal_(generator=torch.Generator().manual_seed(2))
    _, mixed = attn_res[1](**case, dtype=dtype)
    _, normed = attn_res[1](**case, dtype=dtype, norm_weight=norm.weight.data, norm_eps=1e-3)
    assert mixed.dtype == normed.dtype == dtype
    want = norm(mixed).detach()
    torch.testing.assert_close(normed, want, rtol=1e-6 if dtype == torch.float32 else 2**-7, atol=0)
    assert (normed != want).float().mean() < (1 if dtype == torch.float32 else 0.01)


def test_roundings_of_the_running_sum(attn_res):
    case = draw_update(2, 33, dtype=torch.bfloat16)
    case["delta"] = case["delta"].float() * 1.001
    result, _ = attn_res[1](**case)
    assert torch.equal(result, case["partial"] + case["delta"].bfloat16())
    case |= {"partial": case["partial"].float(), "delta": case["delta"].bfloat16()}
    result, _ = attn_res[1](**case)
    assert torch.equal(result, case["partial"] + case["delta"].float())
    alone, mixed = attn_res[1](**case | {"delta": None, "partial": result})
    assert torch.equal(alone, result)
    assert alone.data_ptr() != result.data_ptr()
    torch.testing.assert_close(mixed, attn_res[1](**case)[1])


@DTYPES
def test_with_nothing_prepared_the_sum_is_the_mixture(attn_res, dtype):
    prepare, update = attn_res
    case = draw_update(3, 19, dtype=dtype)
    bank = draw(3, 4, 2, 19, dtype=dtype)
    for prepared in (
        prepare(bank["bank"][:, :0], bank["queries"], eps=EPS),
        prepare(**bank, valid=torch.zeros(4, dtype=torch.bool)),
    ):
        case |= {name: x[:, 1] for name, x in zip(("maximum", "total", "mixture"), prepared, strict=True)}
        result, mixed = update(**case)
        assert torch.equal(mixed, result)


@pytest.mark.parametrize("shift", [-300.0, 300.0])
def test_a_logit_far_from_the_maximum(attn_res, shift):
    case = draw_update(2, 9)
    case["maximum"] += shift
    result, mixed = attn_res[1](**case)
    want = result if shift < 0 else case["mixture"] / case["total"][:, None]
    torch.testing.assert_close(mixed, want)


def test_rows_of_any_stride(attn_res):
    case = draw_update(3, 21)
    want = attn_res[1](**case)
    for name in ("partial", "delta", "maximum", "total", "mixture"):
        case[name] = torch.stack((case[name] * torch.nan, case[name]), 1)[:, 1]
    assert all(map(torch.equal, attn_res[1](**case), want))
    for name in ("partial", "delta", "mixture"):
        case[name] = case[name].T.contiguous().T
    assert_near(attn_res[1](**case), [tensor.double() for tensor in want], 1e-6)


# ---- the two phases against the forms in one


def block_of_layers(prepare, update, bank, partial, deltas, queries, **options):
    prepared = prepare(bank, queries, eps=EPS)
    found = []
    for q, delta in enumerate(deltas):
        partial, mixed = update(partial, delta, *(x[:, q] for x in prepared), queries[q], eps=EPS, **options)
        found.append(mixed)
    return found


def draw_block(blocks, width=43, dtype=torch.float32):
    case = draw(6, blocks, 8, width, dtype)
    deltas = torch.randn(8, 6, width, generator=torch.Generator().manual_seed(7)).to(dtype)
    return case["bank"], draw_update(6, width, dtype)["partial"], deltas, case["queries"]


@pytest.mark.parametrize("blocks", [0, 1, 5])
@DTYPES
def test_a_block_of_layers(attn_res, blocks, dtype):
    bank, partial, deltas, queries = draw_block(blocks, dtype=dtype)
    found = block_of_layers(*attn_res, bank, partial, deltas, queries)
    for q, delta in enumerate(deltas):
        partial = partial + delta
        want = torch.stack([define_mixed([*bank[m], partial[m]], queries[q]) for m in range(6)])
        bound = 3e-6 if dtype == torch.float32 else 2**-7
        torch.testing.assert_close(found[q].double(), want, rtol=bound, atol=bound)


@pytest.mark.parametrize("residual", [torch.float32, torch.bfloat16], ids=str)
@DTYPES
def test_as_the_model_writes_it(attn_res, dtype, residual):
    bank, partial, deltas, _ = draw_block(4, dtype=residual)
    modules = [AttnRes(SimpleNamespace(hidden_size=43, rms_norm_eps=EPS)).to(dtype) for _ in deltas]
    queries = torch.stack([module.proj.weight[0].float() * module.norm.weight.float() for module in modules]).detach()
    norm = RMSNorm(43, 1e-5).to(dtype)
    found = block_of_layers(
        *attn_res, bank, partial, deltas, queries, norm_weight=norm.weight.detach(), norm_eps=1e-5, dtype=dtype
    )
    rows = tuple(bank[None, :, i] for i in range(4))
    for module, delta, got in zip(modules, deltas, found, strict=True):
        partial = partial + delta
        with torch.no_grad():
            want = norm(module(partial[None], rows))[0]
        assert got.dtype == want.dtype == dtype
        bound = 3e-6 if dtype == torch.float32 else 2**-7
        torch.testing.assert_close(got, want, rtol=bound, atol=bound)


@pytest.mark.parametrize("form", ["stacked", "masked", "linear"])
def test_as_others_write_it(attn_res, form):
    bank, partial, deltas, queries = draw_block(5)
    got = block_of_layers(*attn_res, bank, partial, deltas[:1], queries)[0]
    partial = partial + deltas[0]
    scale = torch.linspace(0.5, 2, 43)
    weight = queries[0] / scale
    if form == "stacked":  # sources first, an einsum over them
        rows = torch.stack([*bank.unbind(1), partial], 0)
        logits = torch.einsum("nmd,d->nm", F.rms_norm(rows, (43,), eps=EPS), weight * scale)
        want = torch.einsum("nm,nmd->md", logits.softmax(0), rows)
    elif form == "masked":  # a fixed buffer, and how much of it is filled
        rows = torch.cat((bank, torch.zeros(6, 3, 43), partial[:, None]), 1)
        logits = (F.rms_norm(rows, (43,), weight * scale, EPS)).sum(-1)
        hidden = torch.tensor([0] * 5 + [1] * 3 + [0]).bool()
        probabilities = logits.masked_fill(hidden, -torch.inf).softmax(-1)
        want = (probabilities[:, None] @ rows)[:, 0]
    else:  # a norm with a weight and a projection to one number
        rows = torch.cat((bank, partial[:, None]), 1)
        logits = F.linear(F.rms_norm(rows, (43,), scale, EPS), weight[None])
        want = (logits.softmax(1) * rows).sum(1)
    torch.testing.assert_close(got, want, rtol=3e-6, atol=3e-6)


def test_threads_agree(attn_res, two_threads):
    bank, partial, deltas, queries = draw_block(5, 2100, torch.bfloat16)
    bank, partial, deltas = bank.repeat(5, 1, 1), partial.repeat(5, 1), deltas.repeat(1, 5, 1)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        prepared = attn_res[0](bank, queries, eps=EPS)
        results.append([*prepared, *block_of_layers(*attn_res, bank, partial, deltas, queries)])
    for result in results[1:]:
        assert all(map(torch.equal, result, results[0]))


def test_float64_stays_float64():
    case = draw(2, 5, 3, 9, torch.float64)
    prepared = torch.ops.k31.attn_res_prepare(**case)
    assert_near(prepared, define_prepare(**case), 1e-13)
    update = draw_update(2, 9, torch.float64)
    for name, tensor in zip(("maximum", "total", "mixture"), prepared, strict=True):
        update[name] = tensor[:, 2]
    update["query"] = case["queries"][2]
    result, mixed = torch.ops.k31.attn_res_update(**update)
    want = torch.stack([define_mixed([*case["bank"][m], result[m]], update["query"]) for m in range(2)])
    torch.testing.assert_close(mixed, want, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("utility", ["test_schema", "test_faketensor"])
def test_opcheck(utility):
    case = draw()
    for valid in (None, torch.tensor([True, False, True]), torch.tensor(2)):
        for options in ({}, {"more": [], "mix": False}):
            torch.library.opcheck(
                torch.ops.k31.attn_res_prepare.default,
                (case["bank"], case["queries"]),
                {"eps": EPS, "valid": valid, **options},
                test_utils=utility,
            )
    one = {"maximum": torch.ones(2, 5), "total": torch.ones(2, 5), "mixture": torch.ones(2, 5, 7), "slot": 2}
    banks = {"mixture": torch.ones(2, 3), "bank": [case["bank"][:, :1], case["bank"][:, 1:]]}
    for changes in ({}, {"delta": None}, {"norm_weight": torch.ones(7), "dtype": torch.bfloat16}, banks, one):
        update = draw_update() | changes
        names = ("partial", "delta", "maximum", "total", "mixture", "query")
        arguments = tuple(update.pop(name) for name in names)
        torch.library.opcheck(torch.ops.k31.attn_res_update.default, arguments, update, test_utils=utility)


BAD_PREPARE_CALLS = [
    ({"bank": torch.ones(2, 7)}, r"bank must be \[M, N, D\]"),
    ({"bank": torch.ones(2, 3, 7).int()}, "bank must be floating point"),
    ({"queries": torch.ones(7)}, r"queries must be \[Q, D\]"),
    ({"queries": torch.ones(5, 8)}, r"queries must have shape \[5, 7\], not \[5, 8\]"),
    ({"queries": torch.ones(5, 7, device="meta")}, "queries is on meta, bank on cpu"),
    ({"valid": torch.ones(4, dtype=torch.bool)}, r"valid must have shape \[3\]"),
    ({"valid": torch.ones(3).int()}, "valid must be bool"),
    ({"valid": torch.tensor(1.0)}, "valid must be bool"),
    ({"more": [torch.ones(2, 7)]}, r"more\[0\] must be \[M, n, D\], not \[2, 7\]"),
    ({"more": [torch.ones(2, 3, 7), torch.ones(3, 1, 7)]}, r"more\[1\] must have shape \[2, 1, 7\]"),
    ({"more": [torch.ones(2, 3, 7).int()]}, r"more\[0\] must be floating point"),
    ({"more": [torch.ones(2, 1, 7)], "valid": torch.ones(3, dtype=torch.bool)}, r"valid must have shape \[4\]"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_PREPARE_CALLS, ids=[message for _, message in BAD_PREPARE_CALLS])
def test_bad_preparations_are_refused_by_name(attn_res, changes, message):
    with pytest.raises(OperatorError, match=message):
        attn_res[0](**draw() | changes)


BAD_UPDATE_CALLS = [
    ({"partial": torch.ones(7)}, r"partial must be \[M, D\]"),
    ({"partial": torch.ones(2, 7).long()}, "partial must be floating point"),
    ({"delta": torch.ones(1, 7)}, r"delta must have shape \[2, 7\], not \[1, 7\]"),
    ({"maximum": torch.ones(2, 1)}, r"maximum must have shape \[2\]"),
    ({"total": torch.ones(3)}, r"total must have shape \[2\]"),
    ({"mixture": torch.ones(2, 5, 7)}, r"mixture must have shape \[2, 7\]"),
    ({"query": torch.ones(1, 7)}, r"query must have shape \[7\]"),
    ({"norm_weight": torch.ones(2)}, r"norm_weight must have shape \[7\]"),
    ({"mixture": torch.ones(2, 7, device="meta")}, "mixture is on meta, partial on cpu"),
    ({"dtype": torch.int64}, "dtype must be floating point"),
    ({"slot": 0}, r"maximum must be \[M, Q\] with a slot"),
    ({"maximum": torch.ones(2, 3), "slot": 3}, "slot must be 0 to 2, one of the 3 queries, not 3"),
    ({"maximum": torch.ones(2, 3), "slot": -1}, "slot must be 0 to 2"),
    ({"maximum": torch.ones(2, 3), "slot": 1}, r"total must have shape \[2, 3\], not \[2\]"),
    ({"bank": [torch.ones(2, 7)]}, r"bank\[0\] must be \[M, n, D\]"),
    ({"bank": [torch.ones(2, 3, 7)]}, r"mixture must have shape \[2, 3\], not \[2, 7\]"),
    ({"bank": [torch.ones(2, 3, 7), torch.ones(2, 4, 8)]}, r"bank\[1\] must have shape \[2, 4, 7\]"),
    ({"bank": [torch.ones(2, 7, 7, device="meta")]}, r"bank\[0\] is on meta, partial on cpu"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_UPDATE_CALLS, ids=[message for _, message in BAD_UPDATE_CALLS])
def test_bad_updates_are_refused_by_name(attn_res, changes, message):
    with pytest.raises(OperatorError, match=message):
        attn_res[1](**draw_update() | changes)


def test_a_width_of_nothing():
    for operator in ("attn_res_prepare", "attn_res_update"):
        case = draw(2, 3, 5, 0) if operator == "attn_res_prepare" else draw_update(2, 0)
        for provider in kernels.OPERATORS[operator].providers:
            if provider.available()[0]:
                assert provider.run(**case)[-1].numel() == 0
