"""Fuse steps of the gated delta rule with one gate for all channels of a head: related to KDA, and not KDA."""

from torch import fx

from k31compile.options import Options
from k31compile.passes.recognise.delta_rule import DeltaRuleRecogniser
from k31compile.passes.recognise.engine import recognise
from k31compile.passes.registry import PassResult, register_pass


@register_pass(
    name="fuse_gated_delta_recurrent",
    fusion="gated_delta_recurrent",
    after=("gather_token_gates",),
    numerics="reassociated",
)
def fuse_gated_delta_recurrent(module: fx.GraphModule, options: Options) -> PassResult:
    """Decay, predict, write, read, token by token, the decay a number for each head (gated DeltaNet).

    Before:
        out, gate = [], gate[..., 0]
        for t in range(5):
            state = gate[:, t, :, None, None].exp() * state
            update = beta[:, t, :, None] * (value[:, t] - torch.einsum("bhkv,bhk->bhv", state, key[:, t]))
            state = state + key[:, t, :, :, None] * update[:, :, None]
            out.append(torch.einsum("bhkv,bhk->bhv", state, query[:, t]))
        return torch.stack(out, 1)

    After:
        k31.gated_delta_recurrent

    Refuses when:
        the state is read before it is updated, or between two tokens by anyone else;
        the prediction is taken from the state before it decays;
        the memory that a confirmation would take exceeds its bound.
    """
    findings = recognise(module, DeltaRuleRecogniser("gated_delta_recurrent"))
    return PassResult(findings.fused, findings.refused, findings.confirmations)
