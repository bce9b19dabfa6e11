"""transformers' kimi_linear and deepseek_v32, unmodified, small and with random weights (extra `hf`).

    k31 explain examples/transformers_entries.py:kimi_linear
    k31 explain examples/transformers_entries.py:deepseek_v32

No two sizes are alike; the experts' are such that bf16 grouped products take them, and the indexer has so many heads
that no two scores are equal.
"""

from typing import Any

import torch
import transformers

from k31compile import Entry

PAD = 0


def kimi_linear_model(dtype: torch.dtype = torch.float32, attention: str = "sdpa") -> Any:
    """Two KDA layers and one of full attention between them, two of them with experts."""
    config = transformers.KimiLinearConfig(
        vocab_size=203,
        hidden_size=72,
        intermediate_size=52,
        moe_intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=3,
        num_local_experts=6,
        num_experts_per_tok=2,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        mlp_layer_types=["dense", "sparse", "sparse"],
        linear_head_dim=18,
        linear_num_heads=5,
        kv_lora_rank=34,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=12,
        attn_implementation=attention,
        pad_token_id=PAD,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(4)
    return transformers.KimiLinearForCausalLM(config).eval().to(dtype)


def deepseek_v32_model(dtype: torch.dtype = torch.float32, attention: str = "sdpa") -> Any:
    """Three layers of sparse attention behind an indexer that keeps 13 keys, two of them with experts."""
    config = transformers.DeepseekV32Config(
        vocab_size=211,
        hidden_size=136,
        intermediate_size=168,
        moe_intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=6,
        q_lora_rank=60,
        kv_lora_rank=36,
        qk_nope_head_dim=26,
        qk_rope_head_dim=14,
        v_head_dim=22,
        index_n_heads=18,
        index_head_dim=42,
        index_topk=13,
        n_routed_experts=5,
        num_local_experts=5,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        mlp_layer_types=["dense", "sparse", "sparse"],
        attn_implementation=attention,
        pad_token_id=PAD,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(3)
    return transformers.DeepseekV32ForCausalLM(config).eval().to(dtype)


def prompts(length: int, padding: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [2, length] and their mask; the first `padding` of the first prompt are padding."""
    ids = torch.randint(3, 203, (2, length), generator=torch.Generator().manual_seed(length))
    mask = torch.ones_like(ids)
    ids[0, :padding], mask[0, :padding] = PAD, 0
    return ids, mask


def kimi_linear() -> Entry:
    """One call of kimi_linear without a cache."""
    return Entry("kimi_linear", kimi_linear_model(), prompts(22)[:1], {"use_cache": False})


def deepseek_v32() -> Entry:
    """One call of deepseek_v32 without a cache."""
    return Entry("deepseek_v32", deepseek_v32_model(), prompts(41)[:1], {"use_cache": False})
