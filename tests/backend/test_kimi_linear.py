"""transformers' kimi_linear, unmodified: its KDA layers fused in prefill and decode, logits as eager's."""

from typing import Any

import pytest
import torch

import k31compile

transformers = pytest.importorskip("transformers", reason="extra hf is not installed")

OPS = {"codegen": "ops"}
AROUND = {"gated_rms_norm": 1, "short_conv": 1}
"""What stands around the delta rule of a KDA layer; q, k and v go through one convolution."""
STEP = {"mega_kda": 1, "mla_prolog": 1, "sparse_flash_attention": 1}


def tiny(dtype: torch.dtype = torch.float32) -> Any:
    """A KDA layer and an MLA layer, no two sizes alike."""
    config = transformers.KimiLinearConfig(
        vocab_size=199,
        hidden_size=64,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=3,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["linear_attention", "full_attention"],
        linear_head_dim=20,
        linear_num_heads=5,
        kv_lora_rank=36,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=12,
        mlp_layer_types=["dense", "dense"],
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    return transformers.KimiLinearForCausalLM(config).eval().to(dtype)


def prompt(length: int) -> torch.Tensor:
    return torch.randint(3, 199, (2, length), generator=torch.Generator().manual_seed(1))


def test_prefill_is_one_chunked_kda_a_layer(fused: Any) -> None:
    model, ids = tiny(), prompt(22)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        got = torch.compile(model, backend="k31", options=OPS)(ids, use_cache=False).logits
    assert fused() == [{**AROUND, "kda_chunk": 1}]
    assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()
    report = k31compile.last_report()
    assert [(leaf["function"], leaf["why"]) for leaf in report.leaves] == [("chunk_kimi_delta_attention", "shipped")]
    assert report.nodes_before < 300
    assert not report.refused
    assert not report.regions  # its dense attention has no indexer behind it


def test_prompt_and_steps_with_a_cache(fused: Any) -> None:
    model, ids = tiny(), prompt(26)

    def run(forward: Any) -> torch.Tensor:
        past = transformers.StaticCache(config=model.config, max_cache_len=32)
        logits = [forward(ids[:, :22], past_key_values=past, use_cache=True).logits]
        step = lambda i: forward(ids[:, i : i + 1], past_key_values=past, use_cache=True).logits  # noqa: E731
        logits += [step(i) for i in range(22, 26)]
        return torch.cat(logits, 1)

    with torch.no_grad():
        expected = run(model)
        got = run(torch.compile(model, backend="k31", options=OPS))
    assert fused() == [{**AROUND, "kda_chunk": 1}, STEP]
    assert k31compile.last_report().contains == {**AROUND, "kda_recurrent": 1}
    assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_bf16_is_no_further_from_float32_than_eager_bf16(fused: Any) -> None:
    ids = prompt(22)
    with torch.no_grad():
        exact = tiny()(ids, use_cache=False).logits
        model = tiny(torch.bfloat16)
        theirs = model(ids, use_cache=False).logits
        ours = torch.compile(model, backend="k31", options=OPS)(ids, use_cache=False).logits
    assert fused() == [{**AROUND, "kda_chunk": 1}]
    assert (ours - exact).abs().mean() <= 1.25 * (theirs - exact).abs().mean()


def test_steps_in_bf16_round_where_eager_does(fused: Any) -> None:
    """Beta and the rule's output are rounded to bfloat16 by its author, and the rest of a step is float32."""
    model, ids = tiny(torch.bfloat16), prompt(26)

    def steps(forward: Any) -> torch.Tensor:
        past = transformers.StaticCache(config=model.config, max_cache_len=32)
        model(ids[:, :22], past_key_values=past, use_cache=True)
        return torch.cat([forward(ids[:, i : i + 1], past_key_values=past).logits for i in range(22, 26)], 1)

    with torch.no_grad():
        theirs = steps(model)
        ours = steps(torch.compile(model, backend="k31", options=OPS))
    assert fused() == [STEP]
    assert (ours.float() - theirs.float()).abs().mean() <= 2**-8 * theirs.float().abs().mean()
