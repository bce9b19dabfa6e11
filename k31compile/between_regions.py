"""What stands between nested regions: each stretch of the outer graph is rewritten like a graph of its own.

Dynamo inlines a region that is called once, the first layer of most models, so that a whole layer may stand there.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.passes.utils.fuser_utils import fuse_by_partitions
from torch.utils import _pytree as pytree

from k31compile.nested import FakeRun, is_nested_call

Rewrite = Callable[[fx.GraphModule, Sequence[Any]], fx.GraphModule]

_PREFIX = "between_regions_"
_SHORTEST = 8
"""A stretch of fewer nodes, a norm at most, holds nothing to fuse."""


def rewrite_between(module: fx.GraphModule, run: FakeRun, rewrite: Rewrite) -> None:
    """Rewrite, in place, each stretch between the nested calls of a graph; `run` is a fake one of the whole graph.

    A stretch that hands on a tensor that is written in place, or takes two views of one, stays as it is: made
    functional, it would hand on a copy and take the two for separate.
    """
    stretches = [stretch for stretch in find_stretches(module.graph) if _is_free(stretch, run)]
    sources = {node.name: getattr(node, "_dynamo_source", None) for node in module.graph.find_nodes(op="placeholder")}
    fuse_by_partitions(module, [dict.fromkeys(stretch) for stretch in stretches], _PREFIX, always_return_tuple=True)
    # Fusing makes the nodes anew, by the same names, and AOTAutograd asks inputs where they come from.
    for node in module.graph.find_nodes(op="placeholder"):
        node._dynamo_source = sources[node.name]
    by_name = {node.name: value for node, value in run.values.items()}
    values = {node: by_name[node.name] for node in module.graph.nodes if node.name in by_name}
    for call in [node for node in module.graph.nodes if node.op == "call_module" and _PREFIX in str(node.target)]:
        operands = pytree.tree_map_only(fx.Node, values.__getitem__, list(call.args))
        body = rewrite(getattr(module, str(call.target)), operands)
        values.update(_inline(module, call, body))
    for node in module.graph.nodes:
        node.meta.setdefault("val", values.get(node))
    module.graph.lint()
    module.recompile()


def find_stretches(graph: fx.Graph) -> list[list[fx.Node]]:
    """The nodes between two nested calls, in order; what only takes a call's outputs apart belongs to the call."""
    stretches: list[list[fx.Node]] = [[]]
    for node in graph.nodes:
        if is_nested_call(node):
            stretches.append([])
        elif node.op.startswith("call") and not any(is_nested_call(source) for source in node.all_input_nodes):
            stretches[-1].append(node)
    return [stretch for stretch in stretches if len(stretch) >= _SHORTEST]


def _is_free(stretch: Sequence[fx.Node], run: FakeRun) -> bool:
    """Whether it takes and gives tensors and sizes, and meets what is written in place as one whole input at most."""
    inside = set(stretch)
    outputs = [run.values[node] for node in stretch if any(user not in inside for user in node.users)]
    sources = dict.fromkeys(source for node in stretch for source in node.all_input_nodes if source not in inside)
    inputs = [run.values[source] for source in sources]
    if not outputs or not all(isinstance(value, torch.Tensor) for value in outputs):
        return False
    takes_plain = all(isinstance(value, torch.Tensor | torch.SymInt | int) for value in inputs)
    written = [run.memory(value) for value in inputs if isinstance(value, torch.Tensor) and run.is_written(value)]
    return takes_plain and len(written) == len(set(written)) and not any(run.is_written(value) for value in outputs)


def _inline(module: fx.GraphModule, call: fx.Node, body: fx.GraphModule) -> dict[fx.Node, Any]:
    """Put the nodes of a rewritten stretch in the place of its call; what they hand on, with its values."""
    graph, name = module.graph, str(call.target)
    placed: dict[fx.Node, Any] = dict(zip(body.graph.find_nodes(op="placeholder"), call.args, strict=True))
    with graph.inserting_before(call):
        for node in body.graph.find_nodes(op="get_attr"):
            attribute = f"{name}_{str(node.target).replace('.', '_')}"
            setattr(module, attribute, operator.attrgetter(str(node.target))(body))
            placed[node] = graph.get_attr(attribute)
            placed[node].meta = dict(node.meta)
        outputs = graph.graph_copy(body.graph, placed)
    assert isinstance(outputs, Sequence)
    for taken in list(call.users):
        taken.replace_all_uses_with(outputs[taken.args[1]])  # type: ignore[index, arg-type]
        graph.erase_node(taken)
    graph.erase_node(call)
    delattr(module, name)
    own: Any = body.graph.output_node().args[0]
    made = {node: kept for node, kept in zip(outputs, own, strict=True) if isinstance(node, fx.Node)}
    return {node: kept.meta["val"] for node, kept in made.items() if kept.op != "placeholder"}
