"""Sizes and values at the edges, each compared with the author's own code in eager mode."""

import attention_styles
import indexer_styles
import pytest
import torch
from indexer_styles import STYLES, operands
from running import assert_same_sets, compiled, copies, overlap, relative_error, run
from stable_topk import stable_eager
from torch._dynamo.utils import counters

import k31compile

INF = float("inf")
K = indexer_styles.K
LENGTHS = (1, K - 1, K, K + 1, 4 * K)


def scores_of(q, k, w):
    return (torch.einsum("bthd,bsd->bths", q, k).relu() * w.unsqueeze(-1)).sum(2)


def causal(q, k, w, pos):
    hide = torch.arange(k.shape[1]) > pos.unsqueeze(-1)
    return scores_of(q, k, w).masked_fill(hide, -INF).topk(min(K, k.shape[1]), dim=-1).indices


def gather_attention(q, c, chosen, keep):
    rows = c[torch.arange(c.shape[0])[:, None, None], chosen.clamp(min=0)]
    rows = rows.masked_fill(~keep.unsqueeze(-1), 0.0)
    logits = torch.einsum("bthd,btkd->bthk", q, rows) * 0.3
    weights = logits.masked_fill(~keep.unsqueeze(2), -INF).softmax(-1).masked_fill(~keep.unsqueeze(2), 0.0)
    return torch.einsum("bthk,btkd->bthd", weights, rows)


def layer(qi, ki, wi, q, c, pos):
    chosen = causal(qi, ki, wi, pos)
    return gather_attention(q, c, chosen, chosen <= pos.unsqueeze(-1))


def layer_operands(t, s, seed=0, batch=2):
    names = ("qi", "ki", "wi", "q_latent", "c", "pos")
    return attention_styles.operands(names, "prefill", seed=seed, sizes=(batch, t, s))


def at(pos, start):
    return (torch.tensor(start)[:, None] + torch.arange(pos.shape[1])).contiguous()


@pytest.mark.parametrize("length", LENGTHS)
def test_history_around_top_k(length):
    """A square prefill of 1, k - 1, k, k + 1 and 4 k tokens."""
    result = run(layer, *layer_operands(length, length))
    assert result.fused.get("lightning_indexer") == 1, result.reasons + str(result.notes)
    assert result.fused.get("sparse_flash_attention") == 1, result.reasons + str(result.notes)
    assert relative_error(result.got, result.want) < 1e-5


@pytest.mark.parametrize("length", LENGTHS)
def test_decode_at_positions_around_top_k(length):
    *rest, pos = layer_operands(1, 4 * K)
    result = run(layer, *rest, at(pos, [length - 1, 4 * K - 1]))
    assert result.fused.get("lightning_indexer") == 1, result.reasons
    assert result.fused.get("sparse_flash_attention") == 1, result.reasons + str(result.notes)
    assert relative_error(result.got, result.want) < 1e-5


def test_all_scores_equal_go_to_the_lowest_positions():
    q, k, w, pos = operands(("q", "k", "w", "pos"), "prefill")
    pos = at(pos, [12, 25])
    result = run(causal, torch.ones_like(q), torch.ones_like(k), torch.ones_like(w), pos)
    assert result.fused == {"lightning_indexer": 1}
    assert torch.equal(result.got, torch.arange(K).expand_as(result.got))
    assert torch.equal(result.got, result.want)


def test_the_tie_rule_of_row_a1():
    """Scores [1, 3, 3, 3, 2, 3] with k = 2 select {1, 2}, ten times out of ten."""

    def two(q, k, w):
        return scores_of(q, k, w).topk(2, dim=-1).indices

    k = torch.tensor([1.0, 3, 3, 3, 2, 3]).view(1, 6, 1).expand(2, 6, 3).contiguous() / 3
    fn = compiled(two)
    with torch.no_grad():
        for _ in range(10):
            got = fn(torch.ones(2, 4, 5, 3), k, torch.ones(2, 4, 5))
            assert torch.equal(got, torch.tensor([1, 2]).expand(2, 4, 2))
    assert k31compile.last_report().fused == {"lightning_indexer": 1}


def test_fully_masked_rows_are_exact_zeros():
    *rest, pos = layer_operands(7, 24)
    result = run(layer, *rest, at(pos, [-3, 9]))
    assert result.fused.get("sparse_flash_attention") == 1, result.reasons
    assert bool((result.got[0, :3] == 0).all())
    assert relative_error(result.got, result.want) < 1e-5


@pytest.mark.parametrize("poison", [float("nan"), INF, -INF])
def test_what_lies_beyond_the_length_is_not_read(poison):
    qi, ki, wi, q, c, pos = layer_operands(4, 30)
    pos = at(pos, [2, 11])
    clean = stable_eager(layer, qi, ki, wi, q, c, pos)
    beyond = torch.arange(30) > pos[:, -1:]
    ki, c = ki.masked_fill(beyond.unsqueeze(-1), poison), c.masked_fill(beyond.unsqueeze(-1), poison)
    with torch.no_grad():
        got = compiled(layer)(qi, ki, wi, q, c, pos)
    assert k31compile.last_report().fused.get("sparse_flash_attention") == 1
    assert relative_error(got, clean) < 1e-5


def test_indices_of_minus_one_as_an_input():
    """Row A3: -1 reads nothing, even where the last and the first row of the cache are poisoned."""

    def given(q, c, chosen):
        return gather_attention(q, c, chosen, chosen >= 0)

    generator = torch.Generator().manual_seed(2)
    q, c = torch.randn(2, 6, 3, 14, generator=generator), torch.randn(2, 20, 14, generator=generator)
    c[:, 0], c[:, -1] = INF, float("nan")
    chosen = torch.rand(2, 6, 18, generator=generator).argsort(-1)[..., :K] + 1
    chosen[:, 0] = torch.tensor([2, -1, -1, -1, -1])
    chosen[:, 1] = -1
    chosen[0, 2, 3:] = -1
    result = run(given, q, c, chosen)
    assert result.fused == {"sparse_flash_attention": 1}, result.reasons
    assert torch.allclose(result.got[:, 0], c[:, 2].unsqueeze(1).expand(2, 3, 14))
    assert bool((result.got[:, 1] == 0).all())
    assert relative_error(result.got, result.want) < 1e-5


def test_minus_one_that_the_author_lets_read_the_last_row():
    def given(q, c, chosen):
        rows = c[torch.arange(c.shape[0])[:, None, None], chosen]
        return torch.einsum("bthk,btkd->bthd", torch.einsum("bthd,btkd->bthk", q, rows).softmax(-1), rows)

    generator = torch.Generator().manual_seed(2)
    q, c = torch.randn(2, 6, 3, 14, generator=generator), torch.randn(2, 20, 14, generator=generator)
    chosen = torch.rand(2, 6, 19, generator=generator).argsort(-1)[..., :K]
    chosen[..., 3:] = -1
    result = run(given, q, c, chosen)
    assert relative_error(result.got, result.want) < 1e-5


def test_repeated_indices_under_a_mask():
    def given(q, c, chosen):
        keep = torch.zeros(q.shape[0], q.shape[1], c.shape[1], dtype=torch.bool).scatter(-1, chosen, True)
        logits = torch.einsum("bthd,bsd->bths", q, c).masked_fill(~keep.unsqueeze(2), -INF)
        return torch.einsum("bths,bsd->bthd", logits.softmax(-1), c)

    generator = torch.Generator().manual_seed(2)
    q, c = torch.randn(2, 6, 3, 14, generator=generator), torch.randn(2, 20, 14, generator=generator)
    chosen = torch.rand(2, 6, 19, generator=generator).argsort(-1)[..., :K]
    chosen[..., 3:] = 0
    result = run(given, q, c, chosen)
    assert relative_error(result.got, result.want) < 1e-5


def test_ragged_lengths_and_other_shapes_of_the_same_function():
    fn = compiled(layer)
    for t, s, start in ((5, 24, [0, 19]), (8, 40, [30, 2]), (1, 24, [23, 0]), (3, 60, [9, 57])):
        *rest, pos = layer_operands(t, s, seed=t)
        arguments = (*rest, at(pos, start))
        with torch.no_grad():
            got = fn(*copies(arguments))
        assert relative_error(got, stable_eager(layer, *arguments)) < 1e-5
        report = k31compile.last_report()
        assert report.fused.get("lightning_indexer") == 1, (report.refused, report.notes)
        assert report.fused.get("sparse_flash_attention") == 1, (report.refused, report.notes)


def graphs_of(fn, calls, **how):
    """How many graphs a sequence of calls makes, by Dynamo's own count."""
    torch._dynamo.reset()
    counters.clear()
    made = torch.compile(fn, **how)
    with torch.no_grad():
        for arguments in calls:
            made(*copies(arguments))
    return counters["stats"]["unique_graphs"]


OURS = {"backend": "k31", "options": {"codegen": "ops"}}


@pytest.mark.parametrize(
    "name",
    [
        "matmul_row",
        pytest.param("einsum_triu", marks=pytest.mark.slow),
        pytest.param("paged_gather", marks=pytest.mark.slow),
        pytest.param("broadcast_sum", marks=pytest.mark.slow),
    ],
)
def test_dynamic_shapes_make_no_more_graphs_than_eager(name):
    style = STYLES[name]
    sizes = [(2, t, s, 3, 10) for t, s in ((6, 24), (9, 36), (12, 48), (7, 200))]
    calls = [operands(style.arguments, "prefill", seed=i, sizes=size) for i, size in enumerate(sizes)]
    assert graphs_of(style.fn, calls, dynamic=True, **OURS) == graphs_of(style.fn, calls, dynamic=True, backend="eager")
    fn = compiled(style.fn, dynamic=True)
    torch._dynamo.reset()
    with torch.no_grad():
        for arguments in calls:
            got = fn(*copies(arguments))
            assert k31compile.last_report().fused == {"lightning_indexer": 1}, k31compile.last_report()
            assert_same_sets(got, stable_eager(style.fn, *arguments))


def test_marked_dynamic_lengths_stay_one_graph():
    def marked(t, s):
        *rest, pos = layer_operands(t, s, seed=s)
        arguments = [*rest, pos]
        for position in (0, 2, 3, 5):
            torch._dynamo.mark_dynamic(arguments[position], 1)
        for position in (1, 4):
            torch._dynamo.mark_dynamic(arguments[position], 1)
        return arguments

    calls = [marked(t, s) for t, s in ((6, 24), (9, 36), (12, 300))]
    fn = compiled(layer)
    counters.clear()
    with torch.no_grad():
        for arguments in calls:
            got = fn(*arguments)
            assert relative_error(got, stable_eager(layer, *arguments)) < 1e-5
    assert counters["stats"]["unique_graphs"] == 1
    report = k31compile.last_report()
    assert report.fused.get("lightning_indexer") == 1, (report.refused, report.notes)
    assert report.fused.get("sparse_flash_attention") == 1, (report.refused, report.notes)


def test_a_cache_that_grows_by_cat_makes_as_many_graphs_as_eager():
    def step(qi, ki, wi, q, c, new_k, new_c):
        keys, latent = torch.cat([ki, new_k], dim=1), torch.cat([c, new_c], dim=1)
        chosen = scores_of(qi, keys, wi).topk(min(K, keys.shape[1]), dim=-1).indices
        return gather_attention(q, latent, chosen, torch.ones_like(chosen, dtype=torch.bool)), keys, latent

    def decode(fn):
        qi, ki, wi, q, c, _ = layer_operands(1, 8)
        outputs = []
        for i in range(20):
            _, new_k, *_, new_c, _ = layer_operands(1, 1, seed=50 + i)
            out, ki, c = fn(qi, ki, wi, q, c, new_k, new_c)
            outputs.append(out)
        return torch.cat(outputs, dim=1)

    counts = {}
    for backend, how in (("eager", {"backend": "eager"}), ("k31", OURS)):
        torch._dynamo.reset()
        counters.clear()
        with torch.no_grad():
            got = decode(torch.compile(step, **how))
        counts[backend] = counters["stats"]["unique_graphs"]
    assert counts["k31"] == counts["eager"]
    assert relative_error(got, stable_eager(decode, step)) < 1e-5
    assert k31compile.last_report().fused.get("sparse_flash_attention") == 1, k31compile.last_report()


def test_two_indexers_of_two_styles_in_one_function():
    def both(q, k, w, pos):
        scaled = torch.matmul(q * 0.1, k.unsqueeze(1).mT).clamp(min=0)
        scaled = torch.matmul(w.unsqueeze(-2), scaled).squeeze(-2)
        hide = torch.arange(k.shape[1]) > pos.unsqueeze(-1)
        second = scaled.masked_fill(hide, torch.finfo(q.dtype).min).topk(3, dim=-1).indices
        return causal(q, k, w, pos), second.int()

    arguments = operands(("q", "k", "w", "pos"), "prefill")
    result = run(both, *arguments)
    assert result.fused == {"lightning_indexer": 2}, result.reasons
    for got, want in zip(result.got, result.want, strict=True):
        assert torch.equal(got, want)


def test_a_window_wider_than_the_samples_is_no_prefix():
    """Dynamic lengths are confirmed at small sizes: a window of 64 must still show."""

    def windowed(q, k, w, pos):
        p, place = pos.unsqueeze(-1), torch.arange(k.shape[1])
        return scores_of(q, k, w).masked_fill((place > p) | (place <= p - 64), -INF).topk(K, dim=-1).indices

    fn = compiled(windowed, dynamic=True)
    with torch.no_grad():
        for t, s, start in ((6, 40, [20, 34]), (9, 200, [180, 191])):
            q, k, w, pos = operands(("q", "k", "w", "pos"), "prefill", sizes=(2, t, s, 3, 10))
            arguments = (q, k, w, at(pos, start))
            fused_or_plain = (stable_eager(windowed, *arguments), windowed(*arguments))
            got = fn(*arguments).sort(-1).values
            assert any(torch.equal(got, want.sort(-1).values) for want in fused_or_plain)


def test_what_was_confirmed_for_one_producer_says_nothing_of_another():
    """The same attention behind an indexer that marks hidden keys, and behind one that hides none."""

    def marking(qi, ki, wi, q, c):
        future = torch.full((qi.shape[1], ki.shape[1]), -INF).triu(1)
        values, chosen = (scores_of(qi, ki, wi) + future).topk(K, dim=-1)
        chosen = chosen.masked_fill(values == -INF, -1)
        return gather_attention(q, c, chosen, chosen >= 0)

    def seeing_all(qi, ki, wi, q, c):
        chosen = scores_of(qi, ki, wi).topk(K, dim=-1).indices
        return gather_attention(q, c, chosen, chosen >= 0)

    *arguments, _ = layer_operands(24, 24)
    for fn in (marking, seeing_all, marking):
        result = run(fn, *arguments)
        assert relative_error(result.got, result.want) < 1e-5


def test_constants_that_differ_only_in_their_values():
    """Two masks written out in the code: the second is no causal one."""

    def first(q, k, w):
        mask = torch.tensor([[0.0, -INF, -INF], [0.0, 0.0, -INF], [0.0, 0.0, 0.0]])
        return (scores_of(q, k, w) + mask).topk(2, dim=-1).indices

    def second(q, k, w):
        mask = torch.tensor([[0.0, 0.0, -INF], [-INF, 0.0, 0.0], [0.0, -INF, 0.0]])
        return (scores_of(q, k, w) + mask).topk(2, dim=-1).indices

    generator = torch.Generator().manual_seed(1)
    arguments = [torch.randn(shape, generator=generator) for shape in ((2, 3, 4, 5), (2, 3, 5), (2, 3, 4))]
    assert run(first, *arguments).fused == {"lightning_indexer": 1}
    result = run(second, *arguments, stable=False)
    assert not result.fused
    assert torch.equal(result.got, result.want)


def test_empty_slots_filled_with_zero():
    def zero_filled(q, k, w, pos):
        hide = torch.arange(k.shape[1]) > pos.unsqueeze(-1)
        values, chosen = scores_of(q, k, w).masked_fill(hide, -INF).topk(K, dim=-1)
        return chosen.masked_fill(values == -INF, 0)

    q, k, w, pos = operands(("q", "k", "w", "pos"), "prefill")
    result = run(zero_filled, q, k, w, at(pos, [0, 2]), stable=False)
    assert not result.fused
    assert torch.equal(result.got, result.want)


@pytest.mark.slow
def test_bf16_selects_as_eager_does():
    """Row A8: T = 512, k = 64, random bf16 with fp32 scores; in fp32 the sets are identical."""

    def upcast(q, k, w):
        dots = torch.einsum("bthd,bsd->bths", q.float(), k.float())
        future = torch.full((q.shape[1], k.shape[1]), -INF).triu(1)
        return ((dots.relu() * w.float().unsqueeze(-1)).sum(2) + future).topk(64, dim=-1).indices

    generator = torch.Generator().manual_seed(1)
    shapes = ((1, 512, 8, 64), (1, 512, 64), (1, 512, 8))
    wide = [torch.randn(shape, generator=generator) for shape in shapes]
    narrow = run(upcast, *(x.bfloat16() for x in wide))
    assert narrow.fused == {"lightning_indexer": 1}, narrow.reasons
    assert overlap(narrow.got, narrow.want) >= 0.99
    exact = run(upcast, *wide)
    assert_same_sets(exact.got, exact.want)
