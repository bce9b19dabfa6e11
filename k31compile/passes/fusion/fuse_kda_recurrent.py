"""Fuse steps of the KDA delta rule, one token or a few, into one operator that reads the state once."""

from torch import fx

from k31compile.options import Options
from k31compile.passes.recognise.delta_rule import DeltaRuleRecogniser
from k31compile.passes.recognise.engine import recognise
from k31compile.passes.registry import PassResult, register_pass


@register_pass(
    name="fuse_kda_recurrent", fusion="kda_recurrent", after=("gather_token_gates",), numerics="reassociated"
)
def fuse_kda_recurrent(module: fx.GraphModule, options: Options) -> PassResult:
    """Decay, predict, write, read, token by token (K3.1 spec 2.4).

    Before:
        out = []
        for t in range(5):
            state = gate[:, t, :, :, None].exp() * state
            update = beta[:, t, :, None] * (value[:, t] - torch.einsum("bhkv,bhk->bhv", state, key[:, t]))
            state = state + key[:, t, :, :, None] * update[:, :, None]
            out.append(torch.einsum("bhkv,bhk->bhv", state, query[:, t]))
        return torch.stack(out, 1)

    After:
        k31.kda_recurrent

    Refuses when:
        the state is read before it is updated, or between two tokens by anyone else;
        the prediction is taken from the state before it decays;
        the memory that a confirmation would take exceeds its bound.
    """
    findings = recognise(module, DeltaRuleRecogniser("kda_recurrent"))
    return PassResult(findings.fused, findings.refused, findings.confirmations)
