"""transformers' delta rules, unmodified: leaves from the first call of a plain torch.compile."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import k31compile

OPS = {"codegen": "ops", "fuse": ["kda_chunk", "kda_recurrent", "gated_delta_chunk", "gated_delta_recurrent"]}
RULES = {
    "kimi_linear": ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"),
    "qwen3_next": ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"),
}
CASES = [(model, name, length) for model, names in RULES.items() for name, length in zip(names, (70, 1), strict=True)]


@pytest.mark.parametrize(("model", "name", "length"), CASES, ids=lambda x: str(x))
def test_a_rule_is_kept_whole(transformers_model: Any, model: str, name: str, length: int) -> None:
    function = getattr(transformers_model(model), name)
    scalar = model == "qwen3_next"
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, length, heads, d, generator=generator) for heads, d in ((4, 10), (4, 10), (4, 7)))
    if scalar:  # grouped heads
        q, k = q[:, :, :2], k[:, :, :2]
    gate = -torch.rand(2, length, 4, *(() if scalar else (10,)), generator=generator)
    beta, state = torch.rand(2, length, 4, generator=generator), torch.randn(2, 4, 10, 7, generator=generator)

    def layer(q: Any, k: Any, v: Any, gate: Any, beta: Any, state: Any) -> Any:
        out, last = function(
            F.silu(q),
            k,
            v,
            g=gate,
            beta=beta,
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        return out * 2, last

    with torch.no_grad():
        want = layer(q, k, v, gate, beta, state)
        got = torch.compile(layer, backend="k31", options=OPS)(q, k, v, gate, beta, state)
    report = k31compile.last_report()
    operator = f"{'gated_delta' if scalar else 'kda'}_{'chunk' if 'chunk' in name else 'recurrent'}"
    assert report.fused == {operator: 1}
    assert [(leaf["function"], leaf["operator"]) for leaf in report.leaves] == [(name, operator)]
    assert report.nodes_before < 30
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-5)
