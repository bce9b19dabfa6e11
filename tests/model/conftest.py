"""Shared configurations and runners of the model's tests."""

from collections.abc import Callable

import pytest
import torch

from k31compile.model import Caches, K31Config, K31ForCausalLM


@pytest.fixture(autouse=True)
def _few_threads_and_no_grad():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
    torch.set_num_threads(before)


@pytest.fixture
def odd() -> K31Config:
    """No two sizes alike, so that a transposed axis cannot fit by accident."""
    return K31Config(
        num_hidden_layers=5, hidden_size=52, vocab_size=101, kda_num_heads=3, kda_key_dim=10, kda_value_dim=14,
        kda_gate_rank=6, num_attention_heads=5, q_lora_rank=22, kv_lora_rank=26, qk_nope_head_dim=12,
        qk_rope_head_dim=8, v_head_dim=18, intermediate_size=44, routed_expert_hidden_size=20,
        moe_intermediate_size=24, index_n_heads=7, index_head_dim=16, index_topk=11, page_size=9,
    )  # fmt: skip


@pytest.fixture
def run() -> Callable[..., torch.Tensor]:
    """run(model, tokens, pieces=None, capacity=160): all logits, fed in pieces of the given sizes."""

    def run(model: K31ForCausalLM, tokens: torch.Tensor, pieces=None, capacity=160, caches=None) -> torch.Tensor:
        weight = model.lm_head.weight
        if caches is None:
            caches = Caches.allocate(model.config, len(tokens), capacity, dtype=weight.dtype)
        outputs, start = [], 0
        for size in pieces or [tokens.shape[1]]:
            begin = torch.full((len(tokens),), start)
            outputs.append(model(tokens[:, start : start + size], caches, begin))
            start += size
        assert start == tokens.shape[1]
        return torch.cat(outputs, dim=1)

    return run


@pytest.fixture
def tokens() -> Callable[..., torch.Tensor]:
    """tokens(batch, length, vocab=101, seed=1)."""

    def make(batch: int, length: int, vocab: int = 101, seed: int = 1) -> torch.Tensor:
        return torch.randint(0, vocab, (batch, length), generator=torch.Generator().manual_seed(seed))

    return make
