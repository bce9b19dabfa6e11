"""The mutation test of the confirmation: a changed region is refused, or gives what the operator gives."""

from collections import Counter

import attention_styles
import indexer_styles
import pytest
import torch
from mutation import judge, mutants, traced

from k31compile.graph.memory import MEMORY
from k31compile.passes.recognise.engine import recognise
from k31compile.passes.recognise.lightning_indexer import LightningIndexerRecogniser
from k31compile.passes.recognise.sparse_flash_attention import SparseFlashAttentionRecogniser

INDEXERS = ("matmul_row", "sequence_first", "paged_gather")
ATTENTIONS = ("full_scatter_native", "zeros_scatter_true", "advanced_indexing", "gather_expand")
PHASES = ("prefill", "decode")


# False positives of today, each with its cause; a mutant that is none of these fails the test.
def fresh_inputs(make, names, phase, order):
    """Other seeds, other magnitudes, short histories, in the order of the graph."""
    return [[args[i] for i in order] for args in _fresh(make, names, phase)]


def _fresh(make, names, phase):
    for seed in range(20, 24):
        yield make(names, phase, torch.float64, seed)
    for factor in (0.05, 30.0):
        yield [x * factor if x.is_floating_point() else x for x in make(names, phase, torch.float64, 31)]
    for start in (0, 1, 7):
        yield [_restarted(x, name, start) for x, name in zip(make(names, phase, torch.float64, 40), names, strict=True)]


def _restarted(value, name, start):
    rows = torch.arange(value.shape[-1])
    return (start + rows).expand_as(value).contiguous() if name == "pos" else value


def indexer_graph(name, phase):
    style = indexer_styles.STYLES[name]
    module, order = traced(style.fn, indexer_styles.operands(style.arguments, phase, torch.float64))
    return module, fresh_inputs(indexer_styles.operands, style.arguments, phase, order)


def attention_graph(name, phase):
    style = attention_styles.STYLES[name]
    module, order = traced(style.fn, attention_styles.operands(style.arguments, phase, torch.float64))
    assert recognise(module, LightningIndexerRecogniser()).fused == 1
    return module, fresh_inputs(attention_styles.operands, style.arguments, phase, order)


def fates(module, fresh, recogniser, every):
    """Every `every`-th mutant of all nodes of the graph."""
    names = {node.name for node in module.graph.nodes}
    chosen = [mutant for i, mutant in enumerate(mutants(module, names)) if i % every == 0]
    return [judge(mutant, recogniser, fresh) for mutant in chosen]


def hold(verdicts, least_killed):
    assert verdicts[0].name == "unchanged"
    assert verdicts[0].fate == "equivalent", verdicts[0].detail
    false = [verdict for verdict in verdicts if verdict.fate == "FALSE"]
    assert not false, "\n".join(f"{verdict.name}: {verdict.detail}" for verdict in false)
    count = Counter(verdict.fate for verdict in verdicts)
    assert count["killed"] >= least_killed * sum(count.values()), count


@pytest.mark.parametrize("name", INDEXERS)
def test_sampled_indexer_mutants(name):
    hold(fates(*indexer_graph(name, "prefill"), LightningIndexerRecogniser(), every=6), 0.3)


@pytest.mark.parametrize("name", ATTENTIONS[1:3])
def test_sampled_attention_mutants(name):
    hold(fates(*attention_graph(name, "prefill"), SparseFlashAttentionRecogniser(), every=11), 0.3)


def test_a_constant_in_empty_slots():
    module, fresh = indexer_graph("sequence_first", "prefill")
    chosen = [mutant for mutant in mutants(module, {"masked_fill_1"}) if "-1 -> 0" in mutant.name]
    assert [judge(mutant, LightningIndexerRecogniser(), fresh).fate for mutant in chosen] == ["killed"]


def test_a_cache_that_is_clamped():
    module, fresh = attention_graph("gather_expand", "prefill")
    chosen = [mutant for mutant in mutants(module, {"gather"}) if "clamp" in mutant.name]
    assert [judge(mutant, SparseFlashAttentionRecogniser(), fresh).fate for mutant in chosen] == ["killed"]


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("name", INDEXERS)
def test_all_indexer_mutants(name, phase):
    hold(fates(*indexer_graph(name, phase), LightningIndexerRecogniser(), every=1), 0.3)


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("name", ATTENTIONS)
def test_all_attention_mutants(name, phase):
    hold(fates(*attention_graph(name, phase), SparseFlashAttentionRecogniser(), every=1), 0.3)


def test_a_mutant_is_not_excused_by_what_was_confirmed_before():
    """The memory of confirmed regions must tell a mutant from its original."""
    module, fresh = indexer_graph("matmul_row", "prefill")
    MEMORY.forget()
    names = {node.name for node in module.graph.nodes}
    chosen = list(mutants(module, names))[::9]
    alone = [judge(mutant, LightningIndexerRecogniser(), fresh).fate for mutant in chosen]
    MEMORY.forget()
    together = [judge(mutant, LightningIndexerRecogniser(), fresh, remember=True).fate for mutant in chosen]
    assert alone == together
