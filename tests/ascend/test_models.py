"""K3.1 lowered whole, several steps in a row, on every number of streams: logits and caches are what eager gives.

In float32, with the limits on dtypes left out, so that torch_npu's operators are called as a bfloat16 model calls them
and a difference of one in a hundred thousand shows; in bfloat16 the model's choices flip by themselves.
"""

import copy
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from emulated import Emulated

from k31compile.backend import captured_graph
from k31compile.cli.entries import shipped_entries
from k31compile.entry import Entry
from k31compile.model import Caches, K31Config, K31ForCausalLM
from k31compile.targets.ascend import constraints
from k31compile.targets.ascend.lowerings import registry
from k31compile.targets.ascend.offline.session import open_session
from k31compile.targets.ascend.prepare import prepare
from k31compile.targets.ascend.profiles import profile_of

BOUND = 5e-5
WIDTHS = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}
# Heads of attention and of the indexer, and requests: powers of two; what A3 takes in parts; odd ones, filled up.
HEADS = {"even": (16, 8, 2), "parts": (96, 64, 2), "odd": (33, 17, 1), "few": (7, 20, 3)}
GRID = [(streams, is_merged) for streams in (1, 2, 3, 4) for is_merged in (True, False)]
CASES = [
    ("even", "decode", "ascend-a3", False), ("even", "prefill", "ascend-a3", False),
    ("even", "decode", "ascend-950", True), ("parts", "decode", "ascend-a3", False),
    ("odd", "prefill", "ascend-a3", False), ("odd", "decode", "ascend-950", True),
    ("few", "decode", "ascend-950", False),
]  # fmt: skip


def entry_of(heads, part):
    attention, index, requests = HEADS[heads]
    config = K31Config.tiny().replace(num_attention_heads=attention, index_n_heads=index, **WIDTHS)
    model = K31ForCausalLM(config, seed=0).eval()
    caches, generator = Caches.allocate(config, requests, 64), torch.Generator().manual_seed(2)
    for cache in caches.layers:
        for tensor in cache:
            if tensor is not None:
                # Rows of zeros would be chosen among by nobody's rule.
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
    length = 1 if part == "decode" else 7
    tokens = torch.randint(0, config.vocab_size, (requests, length), generator=generator)
    lengths = () if part == "decode" else (torch.tensor([7, 5, 7])[:requests],)
    return Entry(f"{heads}:{part}", model, (tokens, caches, torch.tensor([20, 7, 3])[:requests], *lengths))


@pytest.fixture
def any_dtype(monkeypatch):
    """torch_npu's operators take float32 too; the indexer's weights and the recurrence keep their limits."""
    limits = constraints.violations

    def widened(operator, profile, values):
        kept = {what: value for what, value in values.items() if not what.endswith("dtype") or what == "weights dtype"}
        return limits(operator, profile, values if "recurrent" in operator else kept)

    monkeypatch.setattr(constraints, "violations", widened)
    experts = [
        replace(one, objections=lambda *_, **__: []) if one.provider == registry.TORCH_NPU else one
        for one in registry.LOWERINGS["grouped_experts"]
    ]
    monkeypatch.setitem(registry.LOWERINGS, "grouped_experts", experts)


def next_step(entry, step):
    """The next tokens of an entry, in place: a graph is called again with the same tensors."""
    tokens, start = entry.args[0], entry.args[2]
    if step:
        tokens.copy_((tokens * 7 + 13 * step) % entry.model.config.vocab_size)
        start.add_(tokens.shape[1])


def caches_of(entry):
    return [tensor for cache in entry.args[1].layers for tensor in cache if tensor is not None]


def differ(got, expected):
    return float((got.double() - expected.double()).abs().max() / expected.double().abs().max())


def judge(entry, profile, grid, steps):
    """The graphs of every number of streams, step by step, against eager; returns the providers of its operators."""
    from k31compile.targets.ascend.streams import write_streams

    theirs, wanted = copy.deepcopy(entry), []
    open_session(profile)
    graph, tensors = captured_graph(entry.model, entry.args, entry.kwargs, profile.name)
    before = [tensor.clone() for tensor in tensors]
    for step in range(steps):
        next_step(theirs, step)
        logits = theirs.model(*theirs.args, **theirs.kwargs)
        wanted.append((logits, [tensor.clone() for tensor in caches_of(theirs)]))
    providers = Counter()
    for streams, is_merged in grid:
        prepared = prepare(copy.deepcopy(graph), profile, tensors, streams, is_merged)
        providers = Counter((one.operator, one.provider) for one in prepared.lowered.decisions)
        write_streams(prepared.lowered.module, prepared.schedule)
        assert len(prepared.schedule.streams) <= streams
        for tensor, kept in zip(tensors, before, strict=True):
            tensor.copy_(kept)
        run = Emulated(prepared.lowered.module)
        for step, (logits, caches) in enumerate(wanted):
            next_step(entry, step)
            (got,) = run.run(*tensors)
            worst = max(differ(one, other) for one, other in zip(
                (got, *caches_of(entry)), (logits, *caches), strict=True))  # fmt: skip
            assert worst < BOUND, f"{streams} streams, merged {is_merged}, step {step}: {worst:.1e}"
    return providers


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "part", "target", "may_round"), CASES)
@torch.no_grad()
def test_torch_npus_operators_in_a_whole_model(heads, part, target, may_round, any_dtype):
    profile = replace(profile_of(target), may_round=may_round)
    grid = GRID if part == "decode" and heads == "even" else [(1, False), (4, True)]
    providers = judge(entry_of(heads, part), profile, grid, 3)
    assert providers["sparse_flash_attention", "torch_npu"] == 2
    assert providers["grouped_experts", "torch_npu"] == 4


@pytest.mark.slow
@pytest.mark.parametrize("target", ["ascend-a3", "ascend-950"])
@pytest.mark.parametrize(("name", "part", "steps"), [
    ("tiny", "decode", 3), ("tiny", "prefill", 1), ("pico", "decode", 3), ("pico", "prefill", 1),
])  # fmt: skip
@torch.no_grad()
def test_formulas_in_a_whole_model(name, part, steps, target):
    (entry,) = shipped_entries(name, part)
    judge(entry, profile_of(target), [(1, False), (4, True)], steps)


@torch.no_grad()
def test_a_write_that_is_lost_is_noticed(monkeypatch):
    """The judge sees a graph that computes something else: one of its caches is not written."""
    (entry,) = shipped_entries("tiny", "decode", layers=2)
    lost = []

    class Losing(Emulated):
        def call_function(self, target, args, kwargs):
            if "npu_scatter_nd_update_" in str(target) and not lost:
                lost.append(target)
                return args[0]
            return super().call_function(target, args, kwargs)

    monkeypatch.setitem(globals(), "Emulated", Losing)
    with pytest.raises(AssertionError, match="1 streams, merged False, step 0"):
        judge(entry, profile_of("ascend-a3"), [(1, False)], 1)
    assert lost
