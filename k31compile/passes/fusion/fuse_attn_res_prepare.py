"""Read the frozen sums of a block of layers once, for the queries of all its sub-layers."""

from torch import fx

from k31compile.options import Options
from k31compile.passes.recognise.attention_residuals import AttentionResidualsRecogniser
from k31compile.passes.recognise.engine import recognise
from k31compile.passes.recognise.shared_depth import share_prepares
from k31compile.passes.registry import PassResult, register_pass


@register_pass(
    name="fuse_attn_res_prepare", fusion="attn_res_prepare", numerics="reassociated", after=("fuse_attn_res_update",)
)
def fuse_attn_res_prepare(module: fx.GraphModule, options: Options) -> PassResult:
    """A softmax over frozen block sums alone; and one reading of a bank for many queries (K3.1 spec 2.2).

    Before:
        keys = torch.nn.functional.rms_norm(frozen, frozen.shape[-1:], eps=1e-5)
        weights = torch.einsum("nbtd,d->nbt", keys, depth_query).softmax(0)
        return torch.einsum("nbt,nbtd->btd", weights, frozen)

    After:
        k31.attn_res_prepare

    Refuses when:
        the rows that are mixed are not those whose logits were taken, normed ones for example;
        the weights over depth are also read by something else (no sentence is said then).
    """
    findings = recognise(module, AttentionResidualsRecogniser("attn_res_prepare"))
    joined = share_prepares(module)
    return PassResult(findings.fused + joined, findings.refused, findings.confirmations)
