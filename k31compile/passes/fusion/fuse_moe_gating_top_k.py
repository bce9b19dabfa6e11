"""Fuse a router's scores, choice of experts and weights into one operator."""

from torch import fx

from k31compile.options import Options
from k31compile.passes.recognise.engine import recognise
from k31compile.passes.recognise.moe_gating import MoeGatingRecogniser
from k31compile.passes.registry import PassResult, register_pass


@register_pass(
    name="fuse_moe_gating_top_k",
    fusion="moe_gating_top_k",
    after=("fuse_lightning_indexer",),
    numerics="reassociated",
)
def fuse_moe_gating_top_k(module: fx.GraphModule, options: Options) -> PassResult:
    """Choose the experts of each token and weigh them (K3.1 spec 2.18).

    Before:
        scores = logits.sigmoid()
        experts = (scores + bias).topk(3, dim=-1).indices
        weights = scores.gather(-1, experts)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * 2.5
        return torch.zeros_like(scores).scatter(-1, experts, weights)

    After:
        k31.moe_gating_top_k

    Refuses when:
        the scores are neither a sigmoid nor a softmax;
        the bias is part of the weights, or of the choice of groups but not of experts;
        an unfinished weight is read by anyone else.
    """
    findings = recognise(module, MoeGatingRecogniser())
    return PassResult(findings.fused, findings.refused, findings.confirmations)
