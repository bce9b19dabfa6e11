"""Fuse each attention over depth into one reading of the frozen sums and one update by the running one."""

from torch import fx

from k31compile.options import Options
from k31compile.passes.recognise.attention_residuals import AttentionResidualsRecogniser
from k31compile.passes.recognise.depth_additions import take_in_additions
from k31compile.passes.recognise.depth_norm import DepthNormRecogniser
from k31compile.passes.recognise.engine import recognise
from k31compile.passes.registry import PassResult, register_pass


@register_pass(name="fuse_attn_res_update", fusion="attn_res_update", numerics="reassociated")
def fuse_attn_res_update(module: fx.GraphModule, options: Options) -> PassResult:
    """A softmax over the block sums of each token and the running one (K3.1 spec 2.2).

    Before:
        rows = torch.stack([*frozen.unbind(0), running], dim=-2)
        logits = (rows * depth_query).sum(-1) * torch.rsqrt(rows.square().mean(-1) + 1e-5)
        return (logits.softmax(-1).unsqueeze(-1) * rows).sum(-2)

    After:
        k31.attn_res_prepare
        k31.attn_res_update

    Refuses when:
        the rows that are mixed are not those whose logits were taken, normed ones for example;
        the weights over depth are also read by something else (no sentence is said then);
        the logits hold more than the product with one learned vector over the root mean square.
    """
    findings = recognise(module, AttentionResidualsRecogniser("attn_res_update"))
    take_in_additions(module)
    norms = recognise(module, DepthNormRecogniser())
    return PassResult(findings.fused, findings.refused, [*findings.confirmations, *norms.confirmations])
