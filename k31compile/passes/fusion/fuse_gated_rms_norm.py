"""Fuse an RMS norm and its gate, written out, into one operator that reads each row once."""

from torch import fx

from k31compile.options import Options
from k31compile.passes.recognise.engine import recognise
from k31compile.passes.recognise.gated_rms_norm import GatedRMSNormRecogniser
from k31compile.passes.registry import PassResult, register_pass


@register_pass(name="fuse_gated_rms_norm", fusion="gated_rms_norm", numerics="reassociated")
def fuse_gated_rms_norm(module: fx.GraphModule, options: Options) -> PassResult:
    """Norm over the last axis, weight, gate (K3.1 spec 2.3).

    Before:
        normed = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + 1e-5) * weight
        return normed * torch.sigmoid(opening)

    After:
        k31.gated_rms_norm

    Refuses when:
        the gate is neither a sigmoid nor SiLU;
        the author rounds in another place than the operator's variants do;
        eps is not added to the mean of the squares.
    """
    findings = recognise(module, GatedRMSNormRecogniser())
    return PassResult(findings.fused, findings.refused, findings.confirmations)
