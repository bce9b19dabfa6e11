"""The order of sub-layers and residuals, written out as in K3.1 spec 2.1 with a fixed bank."""

import pytest
import torch

from k31compile.model import Caches, K31ForCausalLM, make_step
from k31compile.model.mla import GatedMLA


@pytest.mark.parametrize("block", [1, 2, 3, 12])
@pytest.mark.parametrize("kept", ["float32", "stream"])
def test_layers_follow_the_specification(odd, tokens, run, block, kept):
    model = K31ForCausalLM(odd.replace(attn_res_block_size=block, attn_res_dtype=kept)).double()
    sequence = tokens(2, 20)
    core, caches = model.model, Caches.allocate(odd, 2, 160, dtype=torch.float64)
    step = make_step(caches, 20, torch.zeros(2, dtype=torch.int64), None)
    prefix = core.embed_tokens(sequence)
    bank = [None] * -(-odd.num_hidden_layers // block)
    for number, layer in enumerate(core.layers):
        before = (number + block - 1) // block
        h = layer.attn_res(prefix, tuple(bank[:before])) if before else prefix
        opens = number % block == 0
        if opens:
            bank[number // block] = prefix
        x, attention = layer.input_layernorm(h), layer.self_attn
        cache = caches.layers[number]
        a = attention(x, cache, step, None)[0] if isinstance(attention, GatedMLA) else attention(x, cache, step)
        prefix = a if opens else prefix + a
        h = layer.mlp_res(prefix, tuple(bank[: before + opens]))
        prefix = prefix + layer.mlp(layer.post_attention_layernorm(h))
    expected = model.lm_head(core.norm(core.output_res(prefix, tuple(bank))))
    torch.testing.assert_close(run(model, sequence), expected, rtol=1e-12, atol=1e-12)


def test_bfloat16_streams_keep_float32_sums_unless_told_otherwise(odd, tokens):
    kinds = []
    for kept in ("float32", "stream"):
        model = K31ForCausalLM(odd.replace(attn_res_dtype=kept)).to_serving_dtype(torch.bfloat16)
        seen = []
        model.model.output_res.register_forward_pre_hook(lambda _, args, s=seen: s.extend([args[0], *args[1]]))
        caches = Caches.allocate(odd, 1, 20, dtype=torch.bfloat16)
        model(tokens(1, 9), caches, torch.zeros(1, dtype=torch.int64))
        kinds.append({tensor.dtype for tensor in seen})
        assert len(seen) == 4
    assert kinds == [{torch.float32}, {torch.bfloat16}]
