"""Fuse the indexer's score and top-k into one operator that never holds a [T, heads, S] tensor."""

from torch import fx

from k31compile.options import Options
from k31compile.passes.recognise.engine import recognise
from k31compile.passes.recognise.lightning_indexer import LightningIndexerRecogniser
from k31compile.passes.registry import PassResult, register_pass


@register_pass(name="fuse_lightning_indexer", fusion="lightning_indexer", numerics="reassociated")
def fuse_lightning_indexer(module: fx.GraphModule, options: Options) -> PassResult:
    """Score every visible key and keep the best (K3.1 spec 2.8).

    Before:
        dots = torch.einsum("bthd,bsd->bths", q, k)
        scores = (w.unsqueeze(-1) * dots.relu()).sum(2)
        return scores.topk(4, dim=-1).indices

    After:
        k31.lightning_indexer

    Refuses when:
        the scores or the top-k values are read by anyone else;
        anything but relu stands between the dots and the weights;
        other keys are hidden than those after a row's position.
    """
    findings = recognise(module, LightningIndexerRecogniser())
    return PassResult(findings.fused, findings.refused, findings.confirmations)
