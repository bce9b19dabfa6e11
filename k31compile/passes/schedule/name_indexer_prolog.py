"""Name what computes the operands of a lightning indexer, in parts that a schedule may put on streams."""

from torch import fx

from k31compile.options import Options
from k31compile.passes.recognise.indexer_prolog import IndexerProlog
from k31compile.passes.recognise.prolog import name_prologs
from k31compile.passes.registry import PassResult, register_pass


@register_pass(
    name="name_indexer_prolog",
    fusion="indexer_prolog",
    needs=("fuse_lightning_indexer",),
    after=("static_top_k", "name_mla_prolog"),
    numerics="exact",
)
def name_indexer_prolog(module: fx.GraphModule, options: Options) -> PassResult:
    """Label the three projections, the key's norm and its cache write in front of an indexer (K3.1 spec 2.10).

    Before:
        query = (hidden @ query_index).view(2, 5, 3, 24)
        rows = keys.index_copy(1, places, torch.nn.functional.layer_norm(hidden @ key_down, [24]))
        dots = torch.einsum("bthd,bsd->bths", query, rows)
        scores = ((hidden @ head_weights).unsqueeze(-1) * dots.relu()).sum(2)
        return scores.topk(4, dim=-1).indices

    After:
        k31.lightning_indexer
        aten.index_copy
        aten.layer_norm

    Refuses when:
        nothing in the graph projects one of query, key and head weights;
        an earlier layer projects one of them, and the input of the others depends on it.
    """
    named = name_prologs(module, IndexerProlog())
    return PassResult(named.new, named.refused)
