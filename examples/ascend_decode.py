"""A small K3.1 with heads of the size that Ascend's sparse attention takes.

    k31 compile examples/ascend_decode.py:decode --target ascend-a3 --offline -o DIR

Widths and depth are those of the test model; index keys are 128, the latent 512 and its rope part 64 wide.
"""

import torch

import k31compile
from k31compile.model import Caches, K31Config, K31ForCausalLM


def decode() -> k31compile.Entry:
    """One token for each of two requests, in bfloat16."""
    config = K31Config.tiny().replace(
        num_attention_heads=16, kv_lora_rank=512, qk_rope_head_dim=64, index_n_heads=8, index_head_dim=128
    )
    model = K31ForCausalLM(config, seed=0).to_serving_dtype(torch.bfloat16).eval()
    caches = Caches.allocate(config, 2, 64, dtype=torch.bfloat16)
    return k31compile.Entry("ascend_decode", model, (torch.tensor([[7], [9]]), caches, torch.tensor([20, 7])))
