"""Which values of a graph come from the model's parameters alone, and how many bytes of them lie in memory."""

from collections.abc import Iterable

from torch import fx

from k31compile.graph.sizes import is_tensor, nbytes_of, numel_of, value_of
from k31compile.graph.views import CASTS, is_view


def weights_among(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes that depend on parameters and on nothing else that a caller gives; `nodes` is a graph in its order."""
    weights: set[fx.Node] = set()
    free: set[fx.Node] = set()
    for node in nodes:
        inputs = node.all_input_nodes
        if node.op == "placeholder":
            if node.meta.get("is_parameter", False):
                weights.add(node)
            elif not is_tensor(node):
                free.add(node)
        elif node.op == "get_attr":
            free.add(node)
        elif node.op == "call_function" and all(source in weights or source in free for source in inputs):
            (weights if any(source in weights for source in inputs) else free).add(node)
    return weights


def stored_bytes(weight: fx.Node) -> int:
    """The bytes that reading a weight takes from memory: a part of a parameter counts as that part, before casts."""
    node = weight
    while (is_view(node) or node.target in CASTS) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    if node.op == "placeholder" and is_tensor(weight):
        size: int = value_of(node).element_size()
        return min(numel_of(weight), numel_of(node)) * size
    above, todo = set[fx.Node](), [weight]
    while todo:
        node = todo.pop()
        if node not in above:
            above.add(node)
            todo.extend(node.all_input_nodes)
    return sum(nbytes_of(n) for n in above if n.op == "placeholder" and is_tensor(n))
