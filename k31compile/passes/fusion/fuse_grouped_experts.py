"""Fuse the routed experts of a mixture into one operator that runs each expert on its tokens only."""

from torch import fx

from k31compile.options import Options
from k31compile.passes.recognise.engine import recognise
from k31compile.passes.recognise.grouped_experts import GroupedExpertsRecogniser
from k31compile.passes.registry import PassResult, register_pass


@register_pass(
    name="fuse_grouped_experts",
    fusion="grouped_experts",
    after=("fuse_moe_gating_top_k",),
    numerics="reassociated",
)
def fuse_grouped_experts(module: fx.GraphModule, options: Options) -> PassResult:
    """Run each expert on the tokens that chose it, weigh and sum (K3.1 spec 2.18).

    Before:
        gate, up = torch.einsum("nkil,nl->nki", gate_up[experts], tokens).chunk(2, dim=-1)
        inner = torch.nn.functional.silu(gate) * up
        return torch.einsum("nkli,nki,nk->nl", down[experts], inner, shares)

    After:
        k31.grouped_experts

    Refuses when:
        the experts' activation is neither SiTU nor SwiGLU;
        what single experts give is read by anyone else;
        the weights are spread by a scatter and a row may name an expert twice;
        experts in a Python list differ in more than their matrices, or numbers beyond the last one give something.
    """
    findings = recognise(module, GroupedExpertsRecogniser())
    return PassResult(findings.fused, findings.refused, findings.confirmations)
