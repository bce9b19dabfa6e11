"""The shipped model through the backend: everything fused, results as eager's, two graphs for all of it."""

from typing import Any

import pytest
import torch

from k31compile.graph.source import module_path
from k31compile.model import Caches, K31Config, K31ForCausalLM, generate
from k31compile.report import reports

OPS = {"codegen": "ops"}
# A KDA layer with a dense feed-forward and an MLA layer with experts; four sub-layers and the output read the depth,
# the first of them the embedding alone.
LAYERS = {
    "attn_res_prepare": 1,
    "attn_res_update": 4,
    "grouped_experts": 1,
    "indexer_prolog": 1,
    "lightning_indexer": 1,
    "mla_prolog": 1,
    "moe_gating_top_k": 1,
    "sparse_flash_attention": 1,
    "static_top_k": 1,
}
AROUND = {"gated_rms_norm": 1, "short_conv": 1}
CHUNK = 48


def small(**changes: Any) -> K31Config:
    """tiny with one layer of each kind: what is asked here does not depend on how many there are."""
    return K31Config.tiny().replace(num_hidden_layers=2, full_attention_layers=(2,), **changes)


def tokens_in_pieces(model: Any, config: K31Config, dtype: torch.dtype, length: int = 130) -> tuple[Any, Caches]:
    """Logits of a prompt in padded chunks and three decode steps, and the caches they leave."""
    caches = Caches.allocate(config, 2, 192, dtype=dtype)
    tokens = torch.randint(0, config.vocab_size, (2, length), generator=torch.Generator().manual_seed(3))
    logits = []
    for begin in range(0, length - 3, CHUNK):
        count = min(CHUNK, length - 3 - begin)
        chunk = torch.zeros(2, CHUNK, dtype=torch.int64)
        chunk[:, :count] = tokens[:, begin : begin + count]
        out = model(chunk, caches, torch.full((2,), begin), torch.full((2,), count))
        logits.append(out[:, :count])
    logits += [model(tokens[:, i : i + 1], caches, torch.full((2,), i)) for i in range(length - 3, length)]
    return torch.cat(logits, 1), caches


@pytest.mark.parametrize("form", ["absorbed", "native"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-5), (torch.float64, 1e-10)])
def test_prefill_and_decode_equal_eager(form: str, dtype: torch.dtype, bound: float, eager: Any, fused: Any) -> None:
    config = small(mla_form=form)
    model = K31ForCausalLM(config, seed=1).to(dtype).eval()
    with torch.no_grad():
        with eager():
            expected, left = tokens_in_pieces(model, config, dtype)
        got, ours = tokens_in_pieces(torch.compile(model, backend="k31", options=OPS, dynamic=False), config, dtype)
    assert fused() == [LAYERS | AROUND | {"kda_chunk": 1}, LAYERS | {"mega_kda": 1}]
    assert [report.contains for report in reports()] == [{}, AROUND | {"kda_recurrent": 1}]
    assert (got - expected).abs().max() <= bound * expected.abs().max()
    for layer, other in zip(left.layers, ours.layers, strict=True):
        for cache, same in zip(layer, other, strict=True):
            assert cache is None or (cache - same).abs().max() <= bound * max(1.0, cache.abs().max())


def test_pages_are_read_in_place(rewritten: Any) -> None:
    config = small()
    model = K31ForCausalLM(config).eval()
    with torch.no_grad():
        tokens_in_pieces(torch.compile(model, backend="k31", options=OPS, dynamic=False), config, torch.float32)
    for graph in rewritten:
        calls = [n for n in graph.graph.nodes if str(n.target).startswith(("k31.lightning", "k31.sparse"))]
        assert len(calls) == 2
        assert all(n.kwargs["block_table"] is not None for n in calls)


@pytest.mark.parametrize("form", ["absorbed", "native"])
def test_no_pairwise_and_no_gathered_tensor_is_left(form: str, rewritten: Any) -> None:
    config = small(mla_form=form)
    model = K31ForCausalLM(config).eval()
    with torch.no_grad():
        tokens_in_pieces(torch.compile(model, backend="k31", options=OPS, dynamic=False), config, torch.float32)
    prefill = rewritten[0]
    pairwise = 2 * CHUNK * config.index_n_heads * 192
    gathered = 2 * CHUNK * config.index_topk * config.kv_lora_rank
    ours = [n for n in prefill.graph.nodes if "layers.1" in module_path(n) and isinstance(n.meta["val"], torch.Tensor)]
    assert len(ours) > 10
    new = [n for n in ours if n.target is not torch.ops.aten.copy_.default and "pages" not in n.name]
    widest = max(
        n.meta["val"].numel() for n in new if n.meta["val"].dtype.is_floating_point and n.meta["val"].dim() > 3
    )
    assert widest < min(pairwise, gathered)


def test_600_tokens_make_two_graphs(eager: Any) -> None:
    config = small()
    model = K31ForCausalLM(config, seed=2).eval()
    compiled = torch.compile(model, backend="k31", options=OPS, dynamic=False)
    caches = Caches.allocate(config, 1, 640)
    prompt = [list(b"def add(a, b):\n    return a + b\n")]
    for count in (1, 2, 40, 600):
        assert len(generate(compiled, prompt, count, chunk=CHUNK, caches=caches)[0]) == count
        assert len(reports()) <= 2
    with eager():
        expected = generate(model, prompt, 40, chunk=CHUNK, caches=caches)
    assert generate(compiled, prompt, 40, chunk=CHUNK, caches=caches) == expected


def test_one_prefill_graph_serves_every_length(eager: Any) -> None:
    config = small()
    model = K31ForCausalLM(config, seed=2).eval()
    compiled = torch.compile(model, backend="k31", options=OPS, dynamic=False)
    caches = Caches.allocate(config, 1, 256)
    for length in (1, 2, 3, 7, 15, 16, 17, 31, 33, 47, 48, 63, 64, 65, 66, 100, 127, 128, 129, 200):
        prompt = [[(7 * i + length) % 251 for i in range(length)]]
        with eager():
            expected = generate(model, prompt, 3, chunk=CHUNK, caches=caches)
        assert generate(compiled, prompt, 3, chunk=CHUNK, caches=caches) == expected, length
    assert len(reports()) == 2


def test_garbage_beyond_the_length_is_never_read(eager: Any) -> None:
    config = small()
    model = K31ForCausalLM(config, seed=4).eval()
    compiled = torch.compile(model, backend="k31", options=OPS, dynamic=False)
    prompt = torch.randint(0, 256, (2, CHUNK), generator=torch.Generator().manual_seed(5))
    results = []
    for filling in (0.0, float("nan"), float("inf")):
        caches = Caches.allocate(config, 2, 128)
        for layer in caches.layers:
            if hasattr(layer, "latent"):
                for pages in layer:
                    pages.fill_(filling)
        start, count = torch.zeros(2, dtype=torch.int64), torch.tensor([CHUNK, 37])
        with torch.no_grad():
            compiled(prompt, caches, start, count)
            results.append(compiled(prompt[:, :1], caches, count))
    assert torch.isfinite(results[0]).all()
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
