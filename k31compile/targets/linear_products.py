"""Products of a whole weight, as they stand in a graph, read as linear layers."""

import operator
from typing import Any, NamedTuple

import torch
from torch import fx

from k31compile.graph.sizes import shape_of
from k31compile.graph.views import ATEN
from k31compile.passes.layout.weight_readers import swaps_last_two

_SAME = {ATEN.alias.default, ATEN.detach.default}


class LinearProduct(NamedTuple):
    """A linear layer as it is written: its operands, and whether the weight stands as [K, N]."""

    node: fx.Node
    x: fx.Node
    bias: Any
    transposed: bool


def as_linear(node: fx.Node, weight: fx.Node) -> LinearProduct | None:
    """A product of the whole weight, a matrix, as a linear layer; None where it is none."""
    if node.kwargs or len(shape_of(weight)) != 2:
        return None
    arguments: Any = node.args
    if node.target is ATEN.linear.default:
        x, right, bias, transposed = arguments[0], arguments[1], (*arguments, None)[2], False
    elif node.target in (ATEN.mm.default, ATEN.matmul.default):
        x, right, bias, transposed = arguments[0], arguments[1], None, True
    elif node.target is ATEN.addmm.default:
        bias, x, right, transposed = arguments[0], arguments[1], arguments[2], True
        if len(shape_of(bias)) != 1 or shape_of(bias)[0] != shape_of(right)[1]:
            return None
    else:
        return None
    while right is not weight:
        if swaps_last_two(right):
            transposed = not transposed
        elif right.target not in _SAME:
            return None
        right = right.args[0]
    return LinearProduct(node, x, bias, transposed)


def replace_product(product: LinearProduct, target: Any, arguments: tuple[Any, ...]) -> fx.Node:
    """The call of `target` that takes the place of a product; it gives a tensor of the same shape and dtype."""
    node = product.node
    graph = node.graph
    with graph.inserting_before(node):
        made = graph.call_function(target, arguments)
    made.meta.update(node.meta)
    node.replace_all_uses_with(made)
    graph.erase_node(node)
    return made


def drop_unused(module: fx.GraphModule) -> None:
    """Erase operators that nobody reads any more and that do nothing else, in a graph and its nested bodies.

    The graph around nested regions is as Dynamo has it: a method that writes in place looks unused, and stays.
    """
    for child in module.modules():
        if isinstance(child, fx.GraphModule):
            child.graph.eliminate_dead_code(is_impure_node=_may_do_more)
            child.recompile()


def _may_do_more(node: fx.Node) -> bool:
    return node.is_impure() or not (isinstance(node.target, torch._ops.OpOverload) or node.target is operator.getitem)
