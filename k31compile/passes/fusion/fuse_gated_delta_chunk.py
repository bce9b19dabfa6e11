"""Fuse the chunk form of the gated delta rule with one gate for all channels of a head: related to KDA, and not KDA."""

from torch import fx

from k31compile.options import Options
from k31compile.passes.recognise.delta_rule import DeltaRuleRecogniser
from k31compile.passes.recognise.engine import recognise
from k31compile.passes.registry import PassResult, register_pass


@register_pass(name="fuse_gated_delta_chunk", fusion="gated_delta_chunk", numerics="reassociated")
def fuse_gated_delta_chunk(module: fx.GraphModule, options: Options) -> PassResult:
    """The scalar-gate delta rule over chunks (gated DeltaNet).

    Before:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        b, total = beta.transpose(1, 2)[..., None], gate[..., 0].cumsum(1).transpose(1, 2)
        decay = (total[..., :, None] - total[..., None, :]).exp()
        written = torch.linalg.solve_triangular(torch.eye(5) + (b * decay * (k @ k.mT)).tril(-1), b * v, upper=False)
        return ((decay * (q @ k.mT)).tril() @ written).transpose(1, 2)

    After:
        k31.gated_delta_chunk

    Refuses when:
        the state is read before it is updated, or between two tokens by anyone else;
        the prediction is taken from the state before it decays;
        the memory that a confirmation would take exceeds its bound.
    """
    findings = recognise(module, DeltaRuleRecogniser("gated_delta_chunk"))
    return PassResult(findings.fused, findings.refused, findings.confirmations)
