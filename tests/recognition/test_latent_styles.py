"""Latent and rope part in one cache, and two projections of the latent: fused as engines and tutorials write them."""

import pytest
import torch
from attention_styles import INF
from latent_lies import LIES
from latent_styles import STYLES, operands
from mutation import judge, mutants, traced
from running import compiled, relative_error, run
from stable_topk import stable_eager
from torch.testing import assert_close

import k31compile
from k31compile.passes.recognise.engine import recognise
from k31compile.passes.recognise.lightning_indexer import LightningIndexerRecogniser
from k31compile.passes.recognise.sparse_flash_attention import SparseFlashAttentionRecogniser

BOTH = {"lightning_indexer": 1, "sparse_flash_attention": 1}
# A buffer for causality has a row for each token from the first on: with one token there is nothing to choose.
DECODED = [name for name, program in STYLES.items() if "tril" not in program.arguments]
MUTATED = ("tokens_of_a_table", "pages_split", "two_projections_tril", "tokens_of_one_cache")

SOFTMAX_IN_FLOAT32 = (
    "tokens_by_request_and_block",
)  # its author rounds even in a float64 model, the operator does not


def check(name, rows, dtype, bound):
    program = STYLES[name]
    result = run(program.fn, *operands(program.arguments, rows, dtype, seed=1))
    assert {key: result.fused.get(key) for key in BOTH} == BOTH, result.reasons
    assert not [refusal for refusal in result.refused if refusal.name in BOTH]
    assert result.got.shape == result.want.shape
    assert relative_error(result.got, result.want) < bound


@pytest.mark.parametrize("name", STYLES)
def test_style_is_fused_and_gives_the_same(name):
    check(name, 7, torch.float32, 1e-5)


@pytest.mark.parametrize("name", DECODED)
def test_style_of_one_token_a_request(name):
    check(name, 1, torch.float32, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", STYLES)
def test_style_in_float64(name):
    check(name, 5, torch.float64, 1e-6 if name in SOFTMAX_IN_FLOAT32 else 1e-10)


@pytest.mark.parametrize("name", ["tokens_of_a_table", "tokens_of_one_cache"])
def test_one_graph_for_any_number_of_tokens(name):
    """An engine's batch changes with every step: the list of tokens has a size of its own."""
    program = STYLES[name]
    known = len(k31compile.reports())
    torch._dynamo.reset()
    fused = compiled(program.fn)
    for rows in (7, 9, 4):
        arguments = operands(program.arguments, rows, seed=1)
        for argument, of in zip(arguments, program.arguments, strict=True):
            if of in ("qi", "wi", "req") or of.startswith("n_"):
                torch._dynamo.mark_dynamic(argument, 0)
        with torch.no_grad():
            assert relative_error(fused(*arguments), stable_eager(program.fn, *arguments)) < 1e-5
    assert [report.fused for report in k31compile.reports()[known:]] == [BOTH]


def test_block_tables_of_short_integers():
    program = STYLES["tokens_of_a_table"]
    short = [x if x.is_floating_point() else x.to(torch.int32) for x in operands(program.arguments, seed=1)]
    result = run(lambda *given: program.fn(*given[:7], given[7].long(), *given[8:]), *short)
    assert result.fused == BOTH, result.reasons
    assert relative_error(result.got, result.want) < 1e-5


def hold(name, rows):
    program = LIES[name]
    result = run(program.fn, *operands(program.arguments, rows, seed=1))
    reasons = [refusal.reason for refusal in result.refused if refusal.name == "sparse_flash_attention"]
    if program.words:
        assert "sparse_flash_attention" not in result.fused
        assert all(any(word in reason for reason in reasons) for word in program.words), reasons
    # A row without a key is no number in eager, and zeros where it is fused.
    assert_close(result.got, result.want, rtol=0, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("name", LIES)
def test_lie_is_refused_or_right(name):
    hold(name, 7)


def graph_of(name):
    program = STYLES[name]
    module, order = traced(program.fn, operands(program.arguments, 7, torch.float64))
    assert recognise(module, LightningIndexerRecogniser()).fused == 1
    drawn = [operands(program.arguments, 7, torch.float64, seed) for seed in range(20, 24)]
    return module, [[args[i] for i in order] for args in drawn]


def no_mutant_is_false(name, every):
    module, fresh = graph_of(name)
    chosen = list(mutants(module, {node.name for node in module.graph.nodes}))[::every]
    verdicts = [judge(mutant, SparseFlashAttentionRecogniser(), fresh) for mutant in chosen]
    assert verdicts[0].fate == "equivalent", verdicts[0].detail
    false = [verdict for verdict in verdicts if verdict.fate == "FALSE"]
    assert not false, "\n".join(f"{verdict.name}: {verdict.detail}" for verdict in false)
    assert sum(verdict.fate == "killed" for verdict in verdicts) >= 0.3 * len(verdicts)


@pytest.mark.parametrize("name", MUTATED)
def test_sampled_mutants(name):
    no_mutant_is_false(name, every=17)


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATED)
def test_all_mutants(name):
    no_mutant_is_false(name, every=1)


def joined(table_of):
    def attend(q, chosen, pages, table, req):
        safe = chosen.clamp(min=0)
        rows = table_of(pages, table, req, safe)
        logits = torch.einsum("nhd,nkd->nhk", q, rows) * 0.1
        weights = logits.masked_fill((chosen < 0).unsqueeze(1), -INF).softmax(-1)
        return torch.einsum("nhk,nkd->nhd", weights, rows[..., :64])

    return attend


LONG = {
    "pages": joined(lambda pages, table, req, safe: pages[table[req[:, None], safe // 16], safe % 16]),
    "one cache": joined(lambda pages, table, req, safe: pages[req[:, None], safe]),
}


@pytest.mark.parametrize("pool", [97, 40], ids=["a pool for all", "a pool for less than the table has room for"])
@pytest.mark.parametrize("name", LONG)
def test_many_tokens_are_confirmed_at_smaller_sizes(name, pool):
    """A batch of single tokens is a list of rows: what is run for it must not be as long as the list."""
    generator = torch.Generator().manual_seed(3)
    pages = torch.randn((4, 384, 72) if name == "one cache" else (pool, 16, 72), generator=generator)
    table = torch.randint(0, pool, (4, 24), generator=generator)
    chosen = torch.rand(130, 384, generator=generator).argsort(-1)[:, :50].contiguous()
    chosen[3, 20:] = -1
    req = torch.randint(0, 4, (130,), generator=generator)
    result = run(LONG[name], torch.randn(130, 3, 72, generator=generator), chosen, pages, table, req)
    assert result.fused == {"sparse_flash_attention": 1}, result.reasons
    (confirmation,) = result.reports[0].confirmations
    assert confirmation["sizes"]["B"] < 130
    assert relative_error(result.got, result.want) < 1e-5
