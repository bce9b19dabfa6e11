"""Layers with projections and caches, prefill and decode in one process, each equal to its own eager self."""

import copy

import pytest
import torch
from layers import Attention, Indexer, Stack, seeded
from running import compiled, relative_error
from stable_topk import stable_eager

import k31compile

INDEXER = {"indexer_prolog": 1, "lightning_indexer": 1}
BOTH = INDEXER | {"mla_prolog": 1, "sparse_flash_attention": 1}


def fused():
    found = k31compile.last_report().fused
    return {name: count for name, count in found.items() if name != "static_top_k"}


def inputs(t, seed=1, batch=2, hidden=26):
    return torch.randn(batch, t, hidden, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("interleave", [False, True])
def test_indexer_with_projections_and_both_rotary_styles(interleave):
    eager = seeded(lambda: Indexer(interleave=interleave))
    ours = copy.deepcopy(eager)
    run = compiled(ours)
    latent = torch.randn(2, 13, 18, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        for x, low, start in ((inputs(13), latent, [0, 4]), (inputs(1), latent[:, :1], [13, 17])):
            begin = torch.tensor(start)
            want = stable_eager(eager, x, low, begin)
            got = run(x, low, begin)
            assert fused() == INDEXER, k31compile.last_report()
            assert torch.equal(got, want)
            assert torch.equal(ours.keys, eager.keys)


@pytest.mark.parametrize("interleave", [False, True])
@pytest.mark.parametrize("depth", range(8))
def test_needle_is_found_at_every_depth(interleave, depth):
    """The key that equals a later query, which the true rotary style alone makes large, is selected (row A6)."""
    indexer = seeded(lambda: Indexer(interleave=interleave, count=5, capacity=20))
    with torch.no_grad():
        indexer.ww.weight.zero_()
        indexer.wk.weight.zero_()
    run = compiled(indexer)
    place = 1 + depth * 2
    with torch.no_grad():
        x, low, start = inputs(1), torch.randn(2, 1, 18), torch.tensor([18, 18])
        indexer.ww.weight.normal_().abs_()
        x = x.abs()
        pos = start[:, None] + torch.arange(1)
        query = indexer._turn(indexer.wq(low).view(2, 1, 3, 12), pos)[:, 0, 0]
        indexer.keys.normal_().mul_(0.01)
        indexer.keys[:, place] = query * 5
        got = run(x, low, start)
        assert fused() == INDEXER
        assert bool((got == place).any(-1).all())
        assert torch.equal(got, stable_eager(indexer, x, low, start))


def test_prefill_then_decode_with_caches_in_place():
    eager = seeded(Attention)
    ours = copy.deepcopy(eager)
    run = compiled(ours)
    position = torch.tensor([0, 2])
    with torch.no_grad():
        for step, t in enumerate([13, 1, 1, 4, 1]):
            x = inputs(t, seed=step)
            want, got = stable_eager(eager, x, position), run(x, position)
            assert relative_error(got, want) < 1e-5
            assert relative_error(ours.cache, eager.cache) < 1e-6
            assert relative_error(ours.indexer.keys, eager.indexer.keys) < 1e-6
            if step < 2:
                assert fused() == BOTH, k31compile.last_report()
            position = position + t


def test_two_layers_of_two_styles_and_weights():
    model = seeded(lambda: Stack(Attention(interleave=False), Attention(interleave=True, count=7, heads=4)))
    eager = copy.deepcopy(model)
    x, start = inputs(15), torch.tensor([3, 11])
    with torch.no_grad():
        got = compiled(model)(x, start)
    assert fused() == dict.fromkeys(BOTH, 2), k31compile.last_report()
    assert relative_error(got, stable_eager(eager, x, start)) < 1e-5


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients(context):
    model = seeded(Attention)
    eager = copy.deepcopy(model)
    with context():
        got = compiled(model)(inputs(9), torch.tensor([0, 6]))
    assert fused() == BOTH
    assert relative_error(got, stable_eager(eager, inputs(9), torch.tensor([0, 6]))) < 1e-5


def test_with_gradients_it_is_handed_over_with_a_note():
    model = seeded(Attention).requires_grad_(True)
    eager = copy.deepcopy(model)
    got = compiled(model)(inputs(9), torch.tensor([0, 6]))
    report = k31compile.last_report()
    assert not report.fused
    assert any("gradients" in note for note in report.notes)
    with torch.no_grad():
        want = eager(inputs(9), torch.tensor([0, 6]))
    assert relative_error(got.detach(), want) < 1e-5


def test_under_autocast():
    model = seeded(Attention)
    eager = copy.deepcopy(model)
    x, start = inputs(13), torch.tensor([8, 20])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        got = compiled(model)(x, start)
        want = stable_eager(eager, x, start)
    exact = stable_eager(copy.deepcopy(seeded(Attention)).double(), x.double(), start)
    assert got.dtype == want.dtype
    assert relative_error(got, exact) <= 2 * relative_error(want, exact) + 1e-3
    assert fused() == BOTH, k31compile.last_report()


def test_one_selection_for_two_attentions():
    class Shared(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Attention(), Attention()

        def forward(self, x, start):
            low = torch.nn.functional.rms_norm(self.first.down(x), (18,))
            chosen = self.first.indexer(x, low, start)
            x = x + self.first.attend(x, low, start, chosen)
            return x + self.second.attend(x, self.second.down(x), start, chosen)

    model = seeded(Shared)
    eager = copy.deepcopy(model)
    x, start = inputs(12), torch.tensor([0, 9])
    with torch.no_grad():
        got = compiled(model)(x, start)
    assert fused() == INDEXER | {"mla_prolog": 2, "sparse_flash_attention": 2}, k31compile.last_report()
    assert relative_error(got, stable_eager(eager, x, start)) < 1e-5


def test_a_graph_break_between_indexer_and_attention():
    class Broken(Attention):
        def forward(self, x, start):
            low = torch.nn.functional.rms_norm(self.down(x), (18,))
            chosen = self.indexer(x, low, start)
            torch._dynamo.graph_break()
            return x + self.attend(x, low, start, chosen)

    model = seeded(Broken)
    eager = copy.deepcopy(model)
    x, start = inputs(12), torch.tensor([0, 9])
    with torch.no_grad():
        got = compiled(model)(x, start)
    total = k31compile.Report.merge(k31compile.reports())
    assert total.graphs == 2
    halves = {name: count for name, count in total.fused.items() if name != "static_top_k"}
    assert halves == BOTH, total.refused
    assert relative_error(got, stable_eager(eager, x, start)) < 1e-5
