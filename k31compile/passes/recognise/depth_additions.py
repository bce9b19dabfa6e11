"""The residual add in front of an update goes into it: the operator gives the sum back, rounded as the add rounded it.

Nothing is confirmed here: the operator's definition begins with this very add.
"""

import operator

import torch
from torch import fx

import k31compile.kernels  # noqa: F401
from k31compile.graph.dataflow import ATEN, Dataflow, dataflow_of
from k31compile.graph.rewrite import same_strides, sort_topologically
from k31compile.graph.sizes import value_of
from k31compile.passes.recognise.shared_depth import call

UPDATE = torch.ops.k31.attn_res_update.default


def take_in_additions(module: fx.GraphModule) -> int:
    """Give each update its running sum as two terms where an add made it, in place; how many were."""
    taken, flow = 0, dataflow_of(module.graph)
    for update in module.graph.find_nodes(op="call_function", target=UPDATE):
        added = _addition(update)
        if added is not None and _may_wait(flow, added, update):
            _take_in(module.graph, added, update)
            taken += 1
    if taken:
        sort_topologically(module.graph)
        module.graph.eliminate_dead_code()
    return taken


def _addition(update: fx.Node) -> fx.Node | None:
    """The add of two tensors alike whose plain view the running sum is."""
    rows, delta = update.args[:2]
    added = rows.args[0] if isinstance(rows, fx.Node) and rows.target is ATEN.view.default else None
    if delta is not None or not isinstance(added, fx.Node) or added.target is not ATEN.add.Tensor or added.kwargs:
        return None
    whole = value_of(added)
    terms = [value_of(term) for term in added.args if isinstance(term, fx.Node)]
    sizes = list(whole.shape)
    if len(terms) != 2 or not all(type(size) is int for size in sizes):
        return None
    alike = all(list(term.shape) == sizes and term.dtype == whole.dtype for term in terms)
    return added if alike and all(same_strides(term, whole) for term in terms) and whole.is_contiguous() else None


def _may_wait(flow: Dataflow, added: fx.Node, update: fx.Node) -> bool:
    """Whether nothing else that the update reads was made from the sum."""
    others = [node for node in update.args[2:] if isinstance(node, fx.Node)]
    return added not in flow.ancestors(others)


def _take_in(graph: fx.Graph, added: fx.Node, update: fx.Node) -> None:
    rows = update.args[0]
    assert isinstance(rows, fx.Node)
    with graph.inserting_before(update):
        terms = [call(graph, added, ATEN.view.default, (term, rows.args[1])) for term in added.args]
    update.args = (*terms, *update.args[2:])
    with graph.inserting_after(update):
        total = call(graph, added, operator.getitem, (update, 0))
    with graph.inserting_after(total):
        whole = call(graph, added, ATEN.view.default, (total, list(value_of(added).shape)))
    added.replace_all_uses_with(whole)
