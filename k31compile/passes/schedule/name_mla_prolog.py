"""Name what computes the queries and the latent of a sparse attention, in parts that a schedule may move."""

from torch import fx

from k31compile.options import Options
from k31compile.passes.recognise.mla_prolog import MlaProlog
from k31compile.passes.recognise.prolog import name_prologs
from k31compile.passes.registry import PassResult, register_pass


@register_pass(
    name="name_mla_prolog",
    fusion="mla_prolog",
    needs=("fuse_sparse_flash_attention",),
    after=("static_top_k",),
    numerics="exact",
)
def name_mla_prolog(module: fx.GraphModule, options: Options) -> PassResult:
    """Label the projections, norms, rotations and cache writes in front of a latent attention (K3.1 spec 2.7).

    Before:
        query = (hidden @ query_down @ query_up).view(2, 5, 3, 24)
        rows = latents.index_copy(1, places, torch.nn.functional.rms_norm(hidden @ latent_down, [24]))
        picked = torch.gather(rows.unsqueeze(1).expand(-1, 5, -1, -1), 2, i[..., None].expand(-1, -1, -1, 24))
        p = torch.softmax(torch.einsum("bthd,btkd->bthk", query, picked), dim=-1)
        return torch.einsum("bthk,btkd->bthd", p, picked)

    After:
        k31.sparse_flash_attention
        aten.index_copy
        aten.rms_norm

    Refuses when:
        nothing in the graph projects the attention's query or its latent;
        an earlier layer projects the attention's query;
        more than three products follow on each other in front of the query.
    """
    named = name_prologs(module, MlaProlog())
    return PassResult(named.new, named.refused)
