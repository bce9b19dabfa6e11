"""Whole models: a compile that remembers gives the very graph of the one that ran, and a run looks at nothing else."""

import sys
from pathlib import Path

import pytest
from mutation import judge, mutants
from test_mutation import attention_graph, indexer_graph

from k31compile.cli.target import load_entries
from k31compile.graph import confirm
from k31compile.graph.memory import MEMORY, Session, remembering
from k31compile.graph.region import Region
from k31compile.options import Options
from k31compile.passes.pipeline import run_pipeline
from k31compile.passes.recognise.engine import recognise
from k31compile.passes.recognise.lightning_indexer import LightningIndexerRecogniser
from k31compile.passes.recognise.sparse_flash_attention import SparseFlashAttentionRecogniser

sys.path.append(str(Path(__file__).parents[1] / "graph"))
from captured import capture

ENTRIES = ["tiny:decode", pytest.param("tiny:prefill", marks=pytest.mark.slow)]


def traced(target):
    (entry,) = load_entries(target)
    return capture(lambda *args: entry.model(*args, **entry.kwargs), *entry.args, dynamic=False).module


def text(module):
    return [
        (node.name, node.op, str(node.target), str(node.args), str(node.kwargs), str(node.meta.get("val")))
        for node in module.graph.nodes
    ]


def outcome(stages):
    return [
        (stage.run.name, stage.run.changed, len(stage.result.confirmations), stage.result.refused, stage.undone)
        for stage in stages
    ]


def never(reading):
    raise AssertionError(f"a {reading.name} was run again")


@pytest.mark.parametrize("target", ENTRIES)
def test_what_is_remembered_gives_the_same_graph(target, monkeypatch):
    module = traced(target)
    ran, first = run_pipeline(module, Options(), "cpu")
    assert any(stage.result.confirmations for stage in first)
    assert not any(one.remembered for stage in first for one in stage.result.confirmations)
    MEMORY.forget()
    monkeypatch.setattr(confirm, "_confirm_one", never)
    remembered, second = run_pipeline(module, Options(strict=True), "cpu")
    assert text(remembered) == text(ran)
    assert all(one.remembered for stage in second for one in stage.result.confirmations)
    assert outcome(second) == outcome(first)


class Forbidden(dict):
    """What is known of a node that a run must not look at."""

    def __init__(self, name):
        super().__init__()
        self.name = name

    def __missing__(self, key):
        raise AssertionError(f"{key} of {self.name}, which is outside of the region, was looked at")

    def get(self, key, default=None):
        return self[key]


def regions_of(reading):
    """The region, and those that parts of the reading hold: what computes an indexer's lengths for one."""
    parts = [part for value in vars(reading).values() if hasattr(value, "__dict__") for part in vars(value).values()]
    return [reading.region, *(part for part in parts if isinstance(part, Region))]


@pytest.fixture
def only_the_region(monkeypatch):
    """While a reading is run, nodes outside of its regions, but for those that lend them a shape, tell nothing."""
    plain, judged = confirm._judged, []

    def alone(reading):
        regions = regions_of(reading)
        allowed = {node for region in regions for node in (*region.leaves, *region.nodes, *region.outputs)}
        allowed |= {source for region in regions for node in region.nodes for source in node.all_input_nodes}
        others = [node for node in reading.region.outputs[0].graph.nodes if node not in allowed]
        known = [(node, node.meta) for node in others]
        for node in others:
            node.meta = Forbidden(node.name)
        try:
            judged.append(reading)
            return plain(reading)
        finally:
            for node, meta in known:
                node.meta = meta

    monkeypatch.setattr(confirm, "_judged", alone)
    return judged


@pytest.mark.parametrize("target", ENTRIES)
def test_a_run_looks_at_nothing_outside_of_its_region(target, only_the_region):
    _, stages = run_pipeline(traced(target), Options(strict=True), "cpu")
    assert len({type(reading) for reading in only_the_region}) > 5
    assert any(stage.result.confirmations for stage in stages)


def test_the_fence_around_a_region_stops_a_look(only_the_region, monkeypatch):
    module, _ = indexer_graph("matmul_row", "prefill")
    plain = confirm._confirm_one

    def looks_around(reading):
        return [node.meta.get("val") for node in reading.region.outputs[0].graph.nodes] and plain(reading)

    monkeypatch.setattr(confirm, "_confirm_one", looks_around)
    with pytest.raises(AssertionError, match="outside of the region, was looked at"):
        recognise(module, LightningIndexerRecogniser())


@pytest.mark.parametrize(
    ("make", "recogniser"),
    [(indexer_graph, LightningIndexerRecogniser), (attention_graph, SparseFlashAttentionRecogniser)],
)
def test_a_mutant_is_not_excused_by_what_lies_in_a_file(make, recogniser, monkeypatch):
    """Every node of a region changed, one at a time: each is judged as if nothing were remembered."""
    style = "matmul_row" if make is indexer_graph else "gather_expand"
    module, fresh = make(style, "prefill")
    chosen = list(mutants(module, {node.name for node in module.graph.nodes}))[::11]
    alone = [judge(mutant, recogniser(), fresh).fate for mutant in chosen]

    def judged_from_files(mutant):
        MEMORY.forget()
        with remembering(stored=True):
            return judge(mutant, recogniser(), fresh, remember=True).fate

    asked = []
    plain = Session.find
    monkeypatch.setattr(Session, "find", lambda self, place: asked.append(plain(self, place)) or asked[-1])
    assert [judged_from_files(mutant) for mutant in chosen] == alone
    asked.clear()
    assert [judged_from_files(mutant) for mutant in chosen] == alone
    assert any(verdict is not None for verdict in asked)
