"""transformers' own `generate` on a static cache: everything fused, tokens as eager's, no break and no graph more."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import k31compile

transformers = pytest.importorskip("transformers", reason="extra hf is not installed")
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from transformers_entries import deepseek_v32_model, kimi_linear_model, prompts  # noqa: E402  (after the skip)

OPS = {"codegen": "ops"}
NEW = 4
SPARSE = {
    "grouped_experts": 2,
    "lightning_indexer": 3,
    "moe_gating_top_k": 2,
    "sparse_flash_attention": 3,
    "static_top_k": 3,
}


@dataclass
class Run:
    """What one generation gave, and what Dynamo and the backend did for it."""

    tokens: torch.Tensor
    logits: torch.Tensor
    graphs: int
    breaks: int
    fused: list[dict[str, int]]


def generate(
    model: Any, backend: str | None, length: int, padding: int = 0, chunk: int | None = None, how: str = "forward"
) -> Run:
    """Greedy tokens; compiled in `model.forward`, in `model.compile`, or by generate itself (`config`)."""
    torch._dynamo.reset()
    counters.clear()
    known = len(k31compile.reports())
    options = OPS if backend == "k31" else None
    more: dict[str, Any] = {"disable_compile": how != "config"}
    if backend and how == "config":
        compiling = transformers.generation.CompileConfig(backend=backend, fullgraph=False, mode=None, options=options)
        compiling._compile_all_devices = True
        more["compile_config"] = compiling
    elif backend and how == "module":
        model.compile(backend=backend, options=options)
    elif backend:
        model.forward = torch.compile(model.forward, backend=backend, options=options)
    ids, mask = prompts(length, padding)
    with torch.no_grad():
        made = model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=NEW,
            min_new_tokens=NEW,
            cache_implementation="static",
            prefill_chunk_size=chunk,
            return_dict_in_generate=True,
            output_logits=True,
            **more,
        )
    return Run(
        made.sequences,
        torch.stack(made.logits),
        counters["stats"].get("unique_graphs", 0),
        sum(counters["graph_break"].values()),
        [report.fused for report in k31compile.reports()[known:]],
    )


def hold(make: Any, attention: str, **call: Any) -> Run:
    """The run by k31, with eager's tokens and logits and as many graphs and breaks as with backend "eager"."""
    want = generate(make(attention=attention), None, **call)
    plain = generate(make(attention=attention), "eager", **call)
    got = generate(make(attention=attention), "k31", **call)
    assert torch.equal(got.tokens, want.tokens)
    assert (got.logits - want.logits).abs().max() <= 1e-5 * want.logits.abs().max()
    assert (got.graphs, got.breaks) == (plain.graphs, plain.breaks)
    assert len(got.fused) == got.graphs
    return got


def sparse(run: Run) -> list[dict[str, int]]:
    """The operators of SPARSE in each graph; prologs are named beside them."""
    return [{name: fused.get(name, 0) for name in SPARSE} for fused in run.fused]


def layers_served(fused: dict[str, int]) -> list[int]:
    """For a kimi_linear graph: layers with KDA, convolution, gated norm, router and experts fused."""
    names = (("kda_chunk", "kda_recurrent"), ("short_conv",), ("gated_rms_norm",))
    whole = fused.get("mega_kda", 0)
    parts = [whole + sum(fused.get(name, 0) for name in group) for group in names]
    return [*parts, fused["moe_gating_top_k"], fused["grouped_experts"]]


@pytest.mark.parametrize(("attention", "padding"), [("sdpa", 7), ("eager", 0)])
def test_a_step_of_sparse_attention_that_generate_compiles(attention: str, padding: int) -> None:
    run = hold(deepseek_v32_model, attention, length=31, padding=padding, how="config")
    assert sparse(run) == [SPARSE]


def test_a_step_of_kda_that_generate_compiles() -> None:
    run = hold(kimi_linear_model, "sdpa", length=19, padding=5, how="config")
    assert [layers_served(fused) for fused in run.fused] == [[2] * 5]


@pytest.mark.slow
@pytest.mark.parametrize("padding", [0, 7], ids=["equal prompts", "left-padded"])
@pytest.mark.parametrize("chunk", [None, 17], ids=["whole", "chunks"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_prompts_and_steps_of_sparse_attention(attention: str, chunk: int | None, padding: int) -> None:
    run = hold(deepseek_v32_model, attention, length=34, padding=padding, chunk=chunk)
    assert sparse(run) == [SPARSE] * (2 if chunk is None else 3)


@pytest.mark.slow
@pytest.mark.parametrize("padding", [0, 5], ids=["equal prompts", "left-padded"])
@pytest.mark.parametrize("chunk", [None, 9], ids=["whole", "chunks"])
def test_prompts_and_steps_of_kda(chunk: int | None, padding: int) -> None:
    run = hold(kimi_linear_model, "sdpa", length=18, padding=padding, chunk=chunk)
    assert [layers_served(fused) for fused in run.fused] == [[2] * 5] * (2 if chunk is None else 3)


@pytest.mark.slow
def test_a_compiled_module_generates_with_its_compiled_self() -> None:
    run = hold(deepseek_v32_model, "sdpa", length=29, padding=3, how="module")
    assert sparse(run) == [SPARSE] * 2


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_padding_mask_for_the_history_so_far(attention: str) -> None:
    """Called by hand: the mask has two dimensions, and the graph makes it as long as the cache."""
    model = deepseek_v32_model(attention=attention)
    ids, mask = prompts(37, 7)

    def run(forward: Any) -> torch.Tensor:
        past = transformers.StaticCache(config=model.config, max_cache_len=48)
        parts = (forward(ids[:, :36], attention_mask=mask[:, :36], past_key_values=past).logits[:, -1],)
        return torch.stack((*parts, forward(ids[:, 36:], attention_mask=mask, past_key_values=past).logits[:, -1]))

    with torch.no_grad():
        want = run(model)
        known = len(k31compile.reports())
        got = run(torch.compile(model, backend="k31", options=OPS))
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()
    reports = k31compile.reports()[known:]
    assert [{name: report.fused.get(name, 0) for name in SPARSE} for report in reports] == [SPARSE] * 2


def forced(model: Any, is_compiled: bool) -> torch.Tensor:
    """Logits of a padded prompt in two chunks and of given steps, so that two runs see the same tokens."""
    ids, mask = prompts(38, 6)
    past = transformers.StaticCache(config=model.config, max_cache_len=40)
    forward = torch.compile(model.forward, backend="k31", options=OPS) if is_compiled else model.forward
    logits = []
    with torch.no_grad():
        for start, end in ((0, 18), (18, 36), (36, 37), (37, 38)):
            inputs = model.prepare_inputs_for_generation(
                ids[:, :end],
                next_sequence_length=end - start,
                past_key_values=past,
                attention_mask=mask[:, :end],
                is_first_iteration=start == 0,
                use_cache=True,
            )
            logits.append(forward(**inputs).logits[:, -1].float())
    return torch.stack(logits)


@pytest.mark.slow
@pytest.mark.parametrize("make", [deepseek_v32_model, kimi_linear_model], ids=["deepseek_v32", "kimi_linear"])
def test_bf16_is_no_further_from_float32_than_eager_bf16(make: Any) -> None:
    exact = forced(make(), is_compiled=False)
    theirs = forced(make(torch.bfloat16), is_compiled=False)
    ours = forced(make(torch.bfloat16), is_compiled=True)
    assert len(k31compile.reports()) == 3
    assert (ours - exact).abs().mean() <= 1.25 * (theirs - exact).abs().mean()


def test_what_torch_compile_wraps_generates_uncompiled() -> None:
    """torch hands `generate` of a wrapped module on to the module inside: nothing is compiled, by any backend."""
    wrapped = torch.compile(kimi_linear_model(), backend="k31", options=OPS)
    ids, mask = prompts(11)
    with torch.no_grad():
        wrapped.generate(ids, attention_mask=mask, max_new_tokens=2, cache_implementation="static")
    assert not k31compile.reports()
