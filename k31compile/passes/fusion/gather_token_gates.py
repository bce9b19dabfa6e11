"""Compute of all tokens at once what a loop over tokens computes of each token's gate alone."""

from torch import fx

from k31compile.options import Options
from k31compile.passes.recognise.token_gates import gather_token_functions
from k31compile.passes.registry import PassResult, register_pass


@register_pass(name="gather_token_gates", fusion="kda_recurrent", numerics="reassociated")
def gather_token_gates(module: fx.GraphModule, options: Options) -> PassResult:
    """An elementwise function of every token of a gate becomes one of the gate (K3.1 spec 2.4, 3.3).

    Before:
        out = []
        for t in range(5):
            state = (-5 * torch.sigmoid(gate[:, t])).exp()[..., None] * state
            update = beta[:, t, :, None] * (value[:, t] - torch.einsum("bhkv,bhk->bhv", state, key[:, t]))
            state = state + key[:, t, :, :, None] * update[:, :, None]
            out.append(torch.einsum("bhkv,bhk->bhv", state, query[:, t]))
        return torch.stack(out, 1)

    After:
        k31.kda_recurrent

    Refuses when:
        a token is left out, or another function is taken of it;
        what the function reads besides its token is not the same for all tokens.
    """
    return PassResult(gather_token_functions(module.graph))
