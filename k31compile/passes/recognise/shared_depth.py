"""The frozen sums of a block are read once for all of its sub-layers: prepares of one bank become one.

Nothing is confirmed here: the operator's rows of queries do not see each other, so this is its own definition.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher

import k31compile.kernels  # noqa: F401
from k31compile.graph.dataflow import ATEN, Dataflow
from k31compile.graph.rewrite import sort_topologically
from k31compile.graph.sizes import shape_of, value_of
from k31compile.graph.views import is_view

PREPARE = torch.ops.k31.attn_res_prepare.default
_JOINS = {ATEN.cat.default, ATEN.stack.default, ATEN._to_copy.default}


def share_prepares(module: fx.GraphModule) -> int:
    """Join the prepares that read one bank, in place; how many are left over from such groups."""
    joined = 0
    while True:
        group = next(iter(_groups(Dataflow(module.graph))), None)
        if group is None:
            return joined
        _join(module.graph, group)
        joined += 1


def _groups(flow: Dataflow) -> list[list[fx.Node]]:
    by_bank: dict[object, list[fx.Node]] = {}
    for node in flow.nodes:
        if node.target is PREPARE and node.kwargs.get("valid") is None:
            by_bank.setdefault((_text(node.args[0]), node.kwargs["eps"]), []).append(node)
    found = []
    for nodes in by_bank.values():
        below = flow.descendants(nodes)
        free = [node for node in nodes if node.args[1] not in below]
        if len(free) > 1:
            found.append(free)
    return found


def _text(value: Any) -> object:
    """What a bank is made of: equal for banks that two sub-layers stacked from the same sums."""
    if isinstance(value, list | tuple):
        return tuple(_text(part) for part in value)
    if not isinstance(value, fx.Node):
        return repr(value)
    if value.target in _JOINS or is_view(value):
        return str(value.target), _text(value.args), _text(sorted(value.kwargs.items()))
    return value.name


def _join(graph: fx.Graph, nodes: Sequence[fx.Node]) -> None:
    """One prepare of all queries; each getitem of an old one becomes its rows of the new one's."""
    first = nodes[0]
    with graph.inserting_before(first):
        queries = call(graph, first, ATEN.cat.default, ([node.args[1] for node in nodes],))
        whole = call(graph, first, PREPARE, (first.args[0], queries), dict(first.kwargs))
        parts = [call(graph, first, operator.getitem, (whole, i)) for i in range(3)]
        start = 0
        for node in nodes:
            count = shape_of(node.args[1])[0]  # type: ignore[arg-type]
            for item in list(node.users):
                source = parts[item.args[1]]  # type: ignore[index]
                item.replace_all_uses_with(call(graph, item, ATEN.narrow.default, (source, 1, start, count)))
            start += count
    sort_topologically(graph)
    graph.eliminate_dead_code()


def call(graph: fx.Graph, origin: fx.Node, target: Callable[..., Any], args: Any, kwargs: Any = None) -> fx.Node:
    """A node with its fake value, from where `origin` comes from."""
    kwargs = kwargs or {}
    node = graph.call_function(target, args, kwargs)
    node.meta.update({key: origin.meta[key] for key in ("stack_trace", "nn_module_stack") if key in origin.meta})
    values = fx.map_arg((args, kwargs), value_of)
    tensors: list[Any] = []
    fx.map_arg((args, kwargs), lambda source: tensors.append(value_of(source)))
    first = tensors[0][0] if isinstance(tensors[0], tuple | list) else tensors[0]
    with first.fake_mode, enable_python_dispatcher(), torch.no_grad():
        node.meta["val"] = target(*values[0], **values[1])
    return node
