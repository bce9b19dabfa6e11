"""Fuse the core of a KDA layer in decode: convolution, unit vectors, gates, step and gated norm."""

from torch import fx

from k31compile.options import Options
from k31compile.passes.recognise.engine import recognise
from k31compile.passes.recognise.mega_kda import MegaKdaRecogniser
from k31compile.passes.registry import PassResult, register_pass


@register_pass(
    name="fuse_mega_kda",
    fusion="mega_kda",
    needs=("fuse_short_conv", "fuse_kda_recurrent", "fuse_gated_rms_norm"),
    numerics="reassociated",
)
def fuse_mega_kda(module: fx.GraphModule, options: Options) -> PassResult:
    """Three fused operators and what stands between them become one (K3.1 spec 2.3 to 2.6).

    Before:
        window = torch.cat([packed_before, packed], 1)
        y = torch.nn.functional.silu(sum(window[:, i : i + 5] * packed_taps[:, i] for i in range(4)))
        mine, keys, values = (x.unflatten(-1, (3, -1)) for x in y.split([18, 18, 21], -1))
        mine, keys = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (mine, keys))
        decay = (-5.0 * torch.sigmoid(rate.exp()[:, None] * (gate + shift))).exp()
        write, out = torch.sigmoid(beta), []
        for t in range(5):
            state = decay[:, t, :, :, None] * state
            update = write[:, t, :, None] * (values[:, t] - torch.einsum("bhkv,bhk->bhv", state, keys[:, t]))
            state = state + keys[:, t, :, :, None] * update[:, :, None]
            out.append(torch.einsum("bhkv,bhk->bhv", state, mine[:, t]))
        core = torch.stack(out, 1)
        normed = core * torch.rsqrt(core.square().mean(-1, keepdim=True) + 1e-5) * weight
        return normed * torch.sigmoid(opening)

    After:
        k31.mega_kda

    Refuses when:
        a part was not fused, or its convolution has a bias, no SiLU or padded tokens;
        what stands between the parts computes something else, or rounds elsewhere;
        anyone else reads a value inside.
    """
    findings = recognise(module, MegaKdaRecogniser())
    return PassResult(findings.fused, findings.refused, findings.confirmations)
