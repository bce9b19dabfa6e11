"""The model as Dynamo sees it: one graph, no break, and one graph for every step."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from k31compile.model import Caches, K31ForCausalLM, generate


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("mode", "length", "padded"),
    [
        (torch.no_grad, 1, False),
        (torch.no_grad, 33, True),
        (torch.inference_mode, 1, False),
        (torch.inference_mode, 3, True),
        (torch.inference_mode, 33, False),
    ],
)
def test_traces_in_one_piece(odd, tokens, mode, length, padded):
    model = K31ForCausalLM(odd).double()
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=False)
    lengths = torch.tensor([length, length - 1]) if padded else None
    outputs = []
    for call in (model, compiled):
        caches = Caches.allocate(odd, 2, 50, dtype=torch.float64)
        with mode():
            logits = call(tokens(2, length), caches, torch.zeros(2, dtype=torch.int64), lengths)
        outputs.append([logits, *(t for cache in caches.layers for t in cache)])
    for eager, traced in zip(*outputs, strict=True):
        assert torch.equal(eager, traced)


@pytest.mark.parametrize(
    "changes",
    [
        {"mla_form": "native", "index_rope_dim": 6, "indexer_types": ("full", "shared")},
        {"index_hadamard": True, "num_expert_group": 4, "topk_group": 2, "gate_lower_bound": None},
        {"index_rope_dim": 16, "index_rope_interleave": True, "moe_form": "gather", "attn_res_dtype": "stream"},
    ],
)
def test_the_other_switches_trace_too(odd, tokens, changes):
    model = K31ForCausalLM(odd.replace(**changes))
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=False)
    start = torch.zeros(2, dtype=torch.int64)
    eager, traced = (f(tokens(2, 9), Caches.allocate(model.config, 2, 50), start) for f in (model, compiled))
    assert torch.equal(eager, traced)


def test_two_graphs_serve_every_prompt_and_every_step(odd):
    model, counter = K31ForCausalLM(odd).double(), CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=False)
    caches = Caches.allocate(odd, 2, 70, dtype=torch.float64)
    for prompts in ([[1, 2], [3] * 40], [[4] * 17, [5]]):
        assert generate(compiled, prompts, 5, chunk=16, caches=caches) == generate(model, prompts, 5, chunk=16)
    assert counter.frame_count == 2


def test_exports_with_the_caches_as_arguments(odd, tokens):
    model, start = K31ForCausalLM(odd), torch.zeros(2, dtype=torch.int64)

    def new():
        return Caches.allocate(odd, 2, 50)

    exported = torch.export.export(model, (tokens(2, 3), new(), start), strict=False).module()
    eager, kept = new(), new()
    assert torch.equal(exported(tokens(2, 3, seed=7), kept, start), model(tokens(2, 3, seed=7), eager, start))
    for theirs, ours in zip(kept.layers, eager.layers, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(theirs, ours, strict=True))
