"""Fuse a causal convolution per channel, its activation and its state into one operator."""

from torch import fx

from k31compile.options import Options
from k31compile.passes.recognise.engine import recognise
from k31compile.passes.recognise.short_conv import ShortConvRecogniser
from k31compile.passes.registry import PassResult, register_pass


@register_pass(name="fuse_short_conv", fusion="short_conv", numerics="reassociated")
def fuse_short_conv(module: fx.GraphModule, options: Options) -> PassResult:
    """Shift, multiply by the taps, add up, activate (K3.1 spec 2.6).

    Before:
        window = torch.cat([before, inputs], 1).transpose(1, 2)
        return torch.nn.functional.silu(torch.nn.functional.conv1d(window, taps, groups=taps.shape[0])).transpose(1, 2)

    After:
        k31.short_conv

    Refuses when:
        a row sees inputs that come after it;
        the activation is neither SiLU nor none, or stands before the sum;
        the sum before its activation is read by anyone else.
    """
    findings = recognise(module, ShortConvRecogniser())
    return PassResult(findings.fused, findings.refused, findings.confirmations)
