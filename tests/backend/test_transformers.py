"""transformers' deepseek_v32, unmodified: indexers and sparse attentions fused, logits as eager's."""

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="extra hf is not installed")

OPS = {"codegen": "ops"}
BOTH = {
    "grouped_experts": 1,
    "indexer_prolog": 2,
    "lightning_indexer": 2,
    "mla_prolog": 2,
    "moe_gating_top_k": 1,
    "sparse_flash_attention": 2,
    "static_top_k": 2,
}
TOPK, LENGTH = 16, 65


def tiny(attention: str, dtype: torch.dtype = torch.float32) -> Any:
    """Two layers with no two sizes alike and a top-k of a quarter of the sequence."""
    config = transformers.DeepseekV32Config(
        hidden_size=128,
        intermediate_size=160,
        moe_intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=56,
        kv_lora_rank=36,
        qk_nope_head_dim=24,
        qk_rope_head_dim=16,
        v_head_dim=20,
        index_n_heads=6,
        index_head_dim=40,
        index_topk=TOPK,
        vocab_size=199,
        n_routed_experts=4,
        num_local_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        mlp_layer_types=["dense", "sparse"],
        attn_implementation=attention,
    )
    torch.manual_seed(0)
    return transformers.DeepseekV32ForCausalLM(config).eval().to(dtype)


def prompt(length: int = LENGTH) -> torch.Tensor:
    return torch.randint(0, 199, (2, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_prefill_equals_eager(attention: str, eager: Any, fused: Any) -> None:
    model, ids = tiny(attention), prompt()
    with torch.no_grad():
        with eager():
            expected = model(ids, use_cache=False).logits
        got = torch.compile(model, backend="k31", options=OPS)(ids, use_cache=False).logits
    assert fused() == [BOTH]
    assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_sparse_is_not_dense_here() -> None:
    model, ids = tiny("eager"), prompt()
    with torch.no_grad():
        sparse = model(ids, use_cache=False).logits
        for layer in model.model.layers:
            layer.self_attn.indexer.index_topk = LENGTH
        dense = model(ids, use_cache=False).logits
    assert (sparse - dense).abs().max() > 1e-2 * dense.abs().max()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_bf16_is_no_further_from_float32_than_eager_bf16(attention: str, eager: Any, fused: Any) -> None:
    ids = prompt()
    with torch.no_grad():
        exact = tiny(attention)(ids, use_cache=False).logits
        model = tiny(attention, torch.bfloat16)
        with eager():
            theirs = model(ids, use_cache=False).logits
        ours = torch.compile(model, backend="k31", options=OPS)(ids, use_cache=False).logits
    assert fused() == [BOTH]
    assert (ours - exact).abs().mean() <= 1.25 * (theirs - exact).abs().mean()
    assert (ours - exact).abs().mean() <= 3e-2 * exact.abs().mean()


@pytest.mark.parametrize(
    ("attention", "cache"), [pytest.param("eager", "static", marks=pytest.mark.slow), ("sdpa", "dynamic")]
)
def test_prefill_and_decode_with_a_cache(attention: str, cache: str, eager: Any, fused: Any) -> None:
    model, ids = tiny(attention), prompt(70)

    def run(forward: Any) -> torch.Tensor:
        kind = transformers.StaticCache if cache == "static" else transformers.DynamicCache
        size = {"max_cache_len": 96} if cache == "static" else {}
        past = kind(config=model.config, **size)
        logits = [forward(ids[:, :60], past_key_values=past, use_cache=True).logits]
        step = lambda i: forward(ids[:, i : i + 1], past_key_values=past, use_cache=True).logits  # noqa: E731
        logits += [step(i) for i in range(60, 70)]
        return torch.cat(logits, 1)

    with torch.no_grad():
        with eager():
            expected = run(model)
        got = run(torch.compile(model, backend="k31", options=OPS))
    # One graph for the prompt, one or (the length turns symbolic) two for all steps of decode.
    assert fused() == [BOTH] * (2 if cache == "static" else 3)
    assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_inductor_around_the_operators(attention: str, eager: Any, fused: Any) -> None:
    model, ids = tiny(attention), prompt()
    with torch.no_grad():
        with eager():
            expected = model(ids, use_cache=False).logits
        got = torch.compile(model, backend="k31")(ids, use_cache=False).logits
    assert fused() == [BOTH]
    assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()
