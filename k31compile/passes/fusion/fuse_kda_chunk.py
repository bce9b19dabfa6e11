"""Fuse the chunk form of KDA, however it inverts and pads, into one operator without pairwise decays in memory."""

from torch import fx

from k31compile.options import Options
from k31compile.passes.recognise.delta_rule import DeltaRuleRecogniser
from k31compile.passes.recognise.engine import recognise
from k31compile.passes.registry import PassResult, register_pass


@register_pass(name="fuse_kda_chunk", fusion="kda_chunk", numerics="reassociated")
def fuse_kda_chunk(module: fx.GraphModule, options: Options) -> PassResult:
    """The delta rule over chunks, in any spelling that gives the same (K3.1 spec 2.5).

    Before:
        q, k, v, total = (x.transpose(1, 2) for x in (query, key, value, gate.cumsum(1)))
        b = beta.transpose(1, 2)[..., None]
        decay = (total[:, :, :, None] - total[:, :, None]).exp()
        overlap = (b * torch.einsum("bhid,bhjd,bhijd->bhij", k, k, decay)).tril(-1)
        written = torch.linalg.solve_triangular(torch.eye(5) + overlap, b * v, upper=False)
        return (torch.einsum("bhid,bhjd,bhijd->bhij", q, k, decay).tril() @ written).transpose(1, 2)

    After:
        k31.kda_chunk

    Refuses when:
        the state is read before it is updated, or between two tokens by anyone else;
        the prediction is taken from the state before it decays;
        the memory that a confirmation would take exceeds its bound.
    """
    findings = recognise(module, DeltaRuleRecogniser("kda_chunk"))
    return PassResult(findings.fused, findings.refused, findings.confirmations)
