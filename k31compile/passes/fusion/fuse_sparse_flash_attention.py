"""Fuse attention over selected keys into one operator that never holds a [T, K, d] gather nor a [T, S] mask."""

from torch import fx

from k31compile.graph.views import share_equal_views
from k31compile.options import Options
from k31compile.passes.recognise.engine import recognise
from k31compile.passes.recognise.sparse_flash_attention import SparseFlashAttentionRecogniser
from k31compile.passes.registry import PassResult, register_pass


@register_pass(
    name="fuse_sparse_flash_attention",
    fusion="sparse_flash_attention",
    after=("fuse_lightning_indexer",),
    numerics="reassociated",
)
def fuse_sparse_flash_attention(module: fx.GraphModule, options: Options) -> PassResult:
    """Softmax over the selected, visible keys; native heads are absorbed into the latent (K3.1 spec 2.7, 2.9).

    Before:
        picked = torch.gather(c.unsqueeze(1).expand(-1, q.shape[1], -1, -1), 2, i[..., None].expand(-1, -1, -1, 24))
        p = torch.softmax(torch.einsum("bthd,btkd->bthk", q, picked) * 0.2, dim=-1)
        return torch.einsum("bthk,btkd->bthd", p, picked)

    After:
        k31.sparse_flash_attention

    Refuses when:
        keys of the future would be read;
        the attention weights are read by anyone else;
        something else than a softmax weighs the values.
    """
    share_equal_views(module.graph)
    findings = recognise(module, SparseFlashAttentionRecogniser())
    return PassResult(findings.fused, findings.refused, findings.confirmations)
