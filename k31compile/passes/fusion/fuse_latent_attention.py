"""Let a step attend to a latent cache as it lies, where its author projects all of it to keys and values first."""

from torch import fx

from k31compile.graph.views import share_equal_views
from k31compile.options import Options
from k31compile.passes.recognise.engine import recognise
from k31compile.passes.recognise.latent_attention import LatentAttentionRecogniser
from k31compile.passes.registry import PassResult, register_pass


@register_pass(
    name="fuse_latent_attention",
    fusion="sparse_flash_attention",
    after=("fuse_sparse_flash_attention",),
    targets=("cpu",),
    numerics="reassociated",
)
def fuse_latent_attention(module: fx.GraphModule, options: Options) -> PassResult:
    """Projections of keys and values are absorbed into the query and the output of a few rows (K3.1 spec 2.7).

    Before:
        k, v = (latents @ key_value_up.T).unflatten(-1, (3, 21)).transpose(1, 2).split((12, 9), -1)
        k = torch.cat((k, ropes.unsqueeze(1).expand(-1, 3, -1, -1)), -1)
        return torch.nn.functional.scaled_dot_product_attention(row_query, k, v, attn_mask=shown)

    After:
        k31.sparse_flash_attention

    Refuses when:
        there are so many rows that projecting the cache is the smaller part;
        the attention weights are read by anyone else.
    """
    share_equal_views(module.graph)
    findings = recognise(module, LatentAttentionRecogniser())
    return PassResult(findings.fused, findings.refused, findings.confirmations)
