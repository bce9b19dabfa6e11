"""transformers' kimi_linear, unmodified, width 1024: two KDA layers and one of full attention, with experts."""

from __future__ import annotations

from typing import Any

import torch

from k31compile.bench.case import Roof
from k31compile.bench.goals import Bound, Goals
from k31compile.bench.models.case import ModelCase
from k31compile.bench.models.products import weight_products
from k31compile.entry import Entry

_NEEDS = ("transformers", "hf")
_PROMPT = 1024
_ROOM = 2048  # of the cache: every decode step that is measured takes a place


def cases() -> list[ModelCase]:
    """A prompt of 1k tokens, and one token behind it."""
    both = {"inductor": Bound(5.0), "eager": Bound(5.0)}
    prefill = Goals(both, extra_bytes=None, memory_ratio=10.0)
    decode = Goals({"inductor": Bound(2.0), "eager": Bound(2.0)}, extra_bytes=None)
    return [
        ModelCase(
            "kimi_linear", f"prefill fp32 T={_PROMPT}", _prompt, _PROMPT, prefill, needs=_NEEDS, roof=_prompt_roof
        ),
        ModelCase("kimi_linear", f"decode fp32 S={_PROMPT}", _step, 1, decode, needs=_NEEDS),
    ]


def _model() -> Any:
    import transformers

    config = transformers.KimiLinearConfig(
        vocab_size=4096, hidden_size=1024, intermediate_size=2048, moe_intermediate_size=256, num_hidden_layers=3,
        num_attention_heads=8, num_key_value_heads=8, num_local_experts=16, num_experts_per_tok=4,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        mlp_layer_types=["dense", "sparse", "sparse"], linear_head_dim=128, linear_num_heads=8, kv_lora_rank=256,
        qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64, max_position_embeddings=_ROOM, pad_token_id=0,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = transformers.KimiLinearForCausalLM(config)
    return model.eval()


def _tokens(count: int) -> torch.Tensor:
    return torch.randint(3, 4096, (1, count), generator=torch.Generator().manual_seed(0))


def _prompt() -> Entry:
    return Entry("prefill", _model(), (_tokens(_PROMPT),), {"use_cache": False})


def _prompt_roof() -> Roof:
    model = _model()
    return Roof("float32", weight_products(model, model.config.num_experts_per_tok) * _PROMPT)


def _step() -> Entry:
    import transformers

    model = _model()
    cache = transformers.StaticCache(config=model.config, max_cache_len=_ROOM)
    with torch.no_grad():
        model(_tokens(_PROMPT), past_key_values=cache, use_cache=True)
    return Entry("decode", model, (_tokens(1),), {"past_key_values": cache, "use_cache": True})
