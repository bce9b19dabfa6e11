"""The corpus' definitions against the model's own code, in float64: two accounts of the same mathematics."""

from types import SimpleNamespace

import pytest
import torch
from definitions import DEFINITIONS
from operands import CHOSEN, EPS, EXPERTS, FACTOR, GROUPS, HIDDEN, INNER, KEPT, LATENT, LOWER_BOUND, ROUTED, make
from torch.testing import assert_close

from k31compile.model.attn_res import AttnRes
from k31compile.model.delta_rule import kda_chunk, kda_gate, kda_recurrent
from k31compile.model.moe import Experts, Router
from k31compile.model.norms import GatedRMSNorm
from k31compile.model.short_conv import last_inputs, short_conv


def loaded(module, **weights):
    """The module in float64 with these weights."""
    module.double().load_state_dict(weights)
    return module.requires_grad_(False)


@pytest.mark.parametrize("form", [kda_recurrent, kda_chunk])
@pytest.mark.parametrize("gate", ["given", "bounded", "softplus"])
def test_delta_rule(form, gate):
    made = make("kda_chunk", 37, 4)
    bound = LOWER_BOUND if gate == "bounded" else None
    g = made["g"] if gate == "given" else kda_gate(made["raw_g"], made["a_log"], made["dt_bias"], bound)
    o, state = form(made["q"], made["k"], made["v"], g, made["beta"], made["s0"])
    want = DEFINITIONS["kda_chunk"](made, gate=gate)
    assert_close(o, want["o"], rtol=0, atol=1e-11)
    assert_close(state, want["state"], rtol=0, atol=1e-11)


def test_short_conv():
    made = make("short_conv", 11, 4)
    window = torch.cat([made["conv_state"], made["x"]], dim=1)
    want = DEFINITIONS["short_conv"](made)
    assert_close(short_conv(window, made["conv_weight"].unsqueeze(1)), want["y"], rtol=0, atol=1e-12)
    assert torch.equal(last_inputs(window, 3, None), want["conv_state"])


def test_gated_rms_norm():
    made = make("gated_rms_norm", 7, 4)
    norm = loaded(GatedRMSNorm(made["x"].shape[-1], EPS), weight=made["norm_weight"])
    assert_close(norm(made["x"], made["gate"]), DEFINITIONS["gated_rms_norm"](made)["y"], rtol=0, atol=1e-12)


def test_attn_res():
    made = make("attn_res", 7, 4)
    layer = AttnRes(SimpleNamespace(hidden_size=HIDDEN, rms_norm_eps=EPS))
    loaded(layer, **{"proj.weight": made["query"], "norm.weight": made["res_norm"]})
    got = layer(made["prefix"], tuple(made["bank"]))
    assert_close(got, DEFINITIONS["attn_res"](made)["h"], rtol=0, atol=1e-12)


@pytest.mark.parametrize("grouped", [False, True])
def test_router(grouped):
    made = make("moe_gating_top_k", 7, 4)
    config = SimpleNamespace(
        num_experts=EXPERTS,
        hidden_size=HIDDEN,
        num_experts_per_token=CHOSEN,
        num_expert_group=GROUPS if grouped else 1,
        topk_group=KEPT if grouped else 1,
        moe_renormalize=True,
        routed_scaling_factor=FACTOR,
    )
    router = loaded(Router(config), weight=made["router"], e_score_correction_bias=made["bias"])
    experts, weights = router(made["x"].flatten(0, 1))
    want = DEFINITIONS["moe_gating_top_k"](made, grouped=grouped)
    assert torch.equal(experts, want["experts"])
    assert_close(weights, want["weights"], rtol=0, atol=1e-12)


@pytest.mark.parametrize("linear_beta", [25.0, None])
@pytest.mark.parametrize("form", ["dense", "gather", "grouped"])
def test_experts(form, linear_beta):
    made = make("grouped_experts", 7, 4)
    config = SimpleNamespace(
        num_experts=ROUTED,
        moe_intermediate_size=INNER,
        routed_expert_hidden_size=LATENT,
        situ_beta=4.0,
        situ_linear_beta=linear_beta,
        moe_form=form,
    )
    experts = loaded(Experts(config), gate_up_proj=made["gate_up"], down_proj=made["down"])
    want = DEFINITIONS["grouped_experts"](made, linear_beta=linear_beta)["z"]
    assert_close(experts(made["y"], made["experts"], made["weights"]), want, rtol=1e-12, atol=1e-12)
