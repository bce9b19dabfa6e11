"""Masks that the caller makes: recognised whatever they hold, and what is almost that is left alone with a reason."""

from collections import Counter

import pytest
import torch
from masked import NEAR_ATTENTIONS, NEAR_INDEXERS, PROGRAMS, S, operands
from mutation import judge, mutants, traced
from running import relative_error, run
from torch.testing import assert_close

from k31compile.graph.dataflow import Dataflow
from k31compile.graph.views import is_view
from k31compile.passes.recognise.engine import recognise
from k31compile.passes.recognise.lightning_indexer import LightningIndexerRecogniser
from k31compile.passes.recognise.sparse_flash_attention import SparseFlashAttentionRecogniser

KINDS = {"boolean": ("random", "left"), "added": ("random", "numbers"), "where_and_gather": ("random",)}
BOTH = {"lightning_indexer": 1, "sparse_flash_attention": 1}


@pytest.mark.parametrize("rows", [7, 1], ids=["rows", "decode"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_both_operators_are_recognised(name, rows):
    fn, names = PROGRAMS[name]
    for kind in KINDS.get(name, ("left",)):
        result = run(fn, *operands(names, kind=kind, rows=rows))
        assert {name: result.fused.get(name) for name in BOTH} == BOTH, result.reasons
        assert relative_error(result.got, result.want) < 1e-5


@pytest.mark.parametrize("name", ["boolean", "added"])
def test_a_compiled_graph_serves_masks_of_any_content(name):
    fn, names = PROGRAMS[name]
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend="k31", options={"codegen": "ops"})
    for seed, kind in ((1, "random"), (2, "left"), (3, "numbers"), (4, "random")):
        args = operands(names, kind=kind, seed=seed)
        with torch.no_grad():
            assert relative_error(compiled(*args), fn(*args)) < 1e-5


def test_a_row_that_sees_no_key_is_zero():
    fn, names = PROGRAMS["boolean"]
    args = operands(names)
    args[-1][1, :, 3] = False
    result = run(fn, *args)
    assert not result.got[1, 3].any()
    live = torch.ones(2, 7, dtype=torch.bool)
    live[1, 3] = False
    assert relative_error(result.got[live], result.want[live]) < 1e-5


def refused(result, name, words):
    assert name not in result.fused
    reasons = [refusal.reason for refusal in result.refused if refusal.name == name]
    assert all(any(word in reason for reason in reasons) for word in words), reasons


@pytest.mark.parametrize("name", NEAR_INDEXERS)
def test_near_indexers(name):
    fn, names, words = NEAR_INDEXERS[name]
    result = run(fn, *operands(names), stable=False)
    refused(result, "lightning_indexer", words)
    assert torch.equal(result.got, result.want)


@pytest.mark.parametrize("name", NEAR_ATTENTIONS)
def test_near_attentions(name):
    fn, names, words = NEAR_ATTENTIONS[name]
    result = run(fn, *operands(names))
    refused(result, "sparse_flash_attention", words)
    assert_close(result.got, result.want, rtol=0, atol=1e-5, equal_nan=True)


def masked_graph(name, attention):
    fn, names = PROGRAMS[name]
    kinds = KINDS.get(name, ("left",))
    module, order = traced(fn, operands(names, torch.float64, kind=kinds[0]))
    if attention:
        assert recognise(module, LightningIndexerRecogniser()).fused == 1
    drawn = [operands(names, torch.float64, seed, kind) for seed in range(20, 24) for kind in kinds]
    return module, [[args[i] for i in order] for args in drawn]


def hold(name, attention, every):
    """No mutant that is accepted computes something else."""
    module, fresh = masked_graph(name, attention)
    recogniser = SparseFlashAttentionRecogniser() if attention else LightningIndexerRecogniser()
    ends = [node for node in module.graph.nodes if attention or node.target is torch.ops.aten.topk.default]
    chosen = list(mutants(module, {node.name for node in Dataflow(module.graph).ancestors(ends)}))[::every]
    verdicts = [judge(mutant, recogniser, fresh) for mutant in chosen]
    assert verdicts[0].fate == "equivalent", verdicts[0].detail
    false = [verdict for verdict in verdicts if verdict.fate == "FALSE"]
    assert not false, "\n".join(f"{verdict.name}: {verdict.detail}" for verdict in false)
    count = Counter(verdict.fate for verdict in verdicts)
    assert count["killed"] >= 0.3 * sum(count.values()), count


@pytest.mark.parametrize("attention", [False, True], ids=["indexer", "attention"])
@pytest.mark.parametrize("name", ["boolean", "added"])
def test_sampled_mutants(name, attention):
    hold(name, attention, every=13 if attention else 4)


@pytest.mark.slow
@pytest.mark.parametrize("attention", [False, True], ids=["indexer", "attention"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_all_mutants(name, attention):
    hold(name, attention, every=1)


def test_the_mask_is_used_as_it_comes_in():
    """No copy of it a layer: what the operators read is a view of the caller's mask."""
    fn, names = PROGRAMS["boolean"]
    module, _ = traced(fn, operands(names))
    assert recognise(module, LightningIndexerRecogniser()).fused == 1
    (indexer,) = (node for node in module.graph.nodes if "lightning_indexer" in str(node.target))
    mask = indexer.kwargs["mask"]
    assert list(mask.meta["val"].shape) == [2, 7, S]
    while mask.op != "placeholder":
        assert is_view(mask)
        mask = mask.args[0]
