"""``k31::gated_rms_norm``: an RMS norm over the last axis and a gate, as people write them (K3.1 spec 2.3, 3.8).

    norm(x) = x * rsqrt(mean(x^2) + eps) * weight;    result = norm(x) * act(gate)  or  norm(x * act(gate))

Its variants differ in the gate's activation and in where they round.
"""

from __future__ import annotations

import torch

from k31compile.kernels.arguments import taking
from k31compile.kernels.checks import accumulation_dtype
from k31compile.kernels.cpu.gated_rms_norm import gated_rms_norm_provider
from k31compile.kernels.gated_rms_norm_arguments import GatedRMSNorm
from k31compile.kernels.library import register_operator

SCHEMA = (
    "gated_rms_norm(Tensor x, Tensor gate, Tensor weight, *, float eps, str activation='sigmoid', "
    "bool norm_before_gate=True, str weight_cast='before', ScalarType? dtype=None) -> Tensor"
)


@taking(GatedRMSNorm, sizes=False)
def gated_rms_norm_fake(call: GatedRMSNorm) -> torch.Tensor:
    """Shape and dtype of the result; sizes may be symbolic and stay so."""
    return call.new_result()


@taking(GatedRMSNorm)
def gated_rms_norm_reference(call: GatedRMSNorm) -> torch.Tensor:
    """Normalise and gate; the definition of the operator (arguments: see `GatedRMSNorm`).

    Everything runs in float32 (float64 for float64 tensors) but for the roundings to the dtype of x that
    `weight_cast` places, bit for bit as their authors have them:

        "before"   weight and gate in float32, one rounding at the end.
                   Sigmoid: kimi_linear, glm5_next, bailing_hybrid, FLA's FusedRMSNormGated; with dtype=gate.dtype
                   K3.1's own. SiLU: FLA and Mamba layernorm_gated and falcon_h1, both orders of norm and gate.
        "after"    the normed value is rounded, then multiplied by the weight (a product of two bfloat16 is rounded
                   once more), then by the gate in float32.
                   SiLU: qwen3_next, qwen3_5, qwen4_exp, olmo_hybrid. SiLU, norm_before_gate=False, and as dtype what
                   weight * x has: mamba2, bamba, zamba2, nemotron_h, granitemoehybrid (weight [G, D] when grouped).
        "between"  the weighted norm is rounded and the gate is rounded, then they are multiplied.
                   Sigmoid: an RMSNorm module times sigmoid(gate.float()).to(dtype), as Ascend's recipes write K3.

    Where FLA and Mamba write 1 / sqrt for rsqrt, torch itself may differ in the last bit of a float32.

    Returns [..., D] in `dtype`. Raises OperatorError on anything outside this contract.
    """
    wide, stored = accumulation_dtype(call.x, call.gate, call.weight), call.x.dtype
    activation = torch.sigmoid if call.activation == "sigmoid" else torch.nn.functional.silu
    gate = activation(call.gate.to(wide))
    x = call.x.to(wide)
    if not call.norm_before_gate:
        x = x * gate
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + call.eps)
    rounds_first = call.weight_cast == "after"
    normed = call.weight * normed.to(stored) if rounds_first else call.weight.to(wide) * normed
    if call.weight_cast == "between":
        normed, gate = normed.to(stored), gate.to(stored)
    if call.norm_before_gate:
        normed = normed * gate
    return call.new_result().copy_(normed)


OPERATOR = register_operator(
    SCHEMA,
    fake=gated_rms_norm_fake,
    reference=gated_rms_norm_reference,
    providers=(gated_rms_norm_provider(),),
)
