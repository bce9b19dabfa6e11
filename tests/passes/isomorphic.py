"""Whether two graphs compute alike: operators and arguments in lockstep from the results up, names ignored."""

import torch
from torch import fx

from k31compile.graph.region import attribute_of

ATEN = torch.ops.aten
# One cast by two names: as a pass writes it, and as functionalisation leaves it.
_CASTS = {ATEN._to_copy.default: ATEN.to.dtype}


def difference(left, right):
    """Where two graphs differ, in words; the empty string where they do not."""
    return _Comparison(left, right).words()


class _Comparison:
    def __init__(self, left, right):
        self.graphs = (left.graph, right.graph)
        self.inputs = [{n: i for i, n in enumerate(g.find_nodes(op="placeholder"))} for g in self.graphs]
        self.pairs, self.taken = {}, {}

    def words(self):
        ends = [[*_writes(graph), graph.output_node()] for graph in self.graphs]
        if len(ends[0]) != len(ends[1]):
            return f"{len(ends[0]) - 1} writes and {len(ends[1]) - 1}"
        return next((found for pair in zip(*ends, strict=True) if (found := self.nodes(*pair))), "")

    def nodes(self, left, right):
        left, right = _plain(left), _plain(right)
        if left in self.pairs or right in self.taken:
            same = self.pairs.get(left) is right and self.taken.get(right) is left
            return "" if same else f"{left} and {right} are used differently"
        self.pairs[left], self.taken[right] = right, left
        if left.op != right.op:
            return f"{left.op} {left} and {right.op} {right}"
        if left.op == "placeholder":
            same = self.inputs[0][left] == self.inputs[1][right]
            return "" if same else f"inputs {left} and {right}"
        if left.op == "get_attr":
            return "" if torch.equal(attribute_of(left), attribute_of(right)) else f"constants {left} and {right}"
        if left.op == "call_function" and _CASTS.get(left.target, left.target) != _CASTS.get(
            right.target, right.target
        ):
            return f"{left.target} and {right.target}"
        return self.arguments(_arguments(left), _arguments(right), left)

    def arguments(self, left, right, node):
        if isinstance(left, fx.Node) and isinstance(right, fx.Node):
            return self.nodes(left, right)
        if isinstance(left, dict) and isinstance(right, dict):
            if left.keys() != right.keys():
                return f"{node.target} is given {sorted(left)} and {sorted(right)}"
            return next((f for k in left if (f := self.arguments(left[k], right[k], node))), "")
        if isinstance(left, list | tuple) and isinstance(right, list | tuple):
            if len(left) != len(right):
                return f"{node.target}: {left} and {right}"
            return next((f for p in zip(left, right, strict=True) if (f := self.arguments(*p, node))), "")
        same = type(left) is type(right) and not isinstance(left, fx.Node) and left == right
        return "" if same else f"{node.target}: {left!r} and {right!r}"


def _operator(node):
    return _CASTS.get(node.target, node.target)


def _writes(graph):
    return graph.find_nodes(op="call_function", target=ATEN.copy_.default)


def _plain(node):
    """The node behind views and casts that change nothing."""
    while node.op == "call_function":
        source = node.args[0] if node.args else None
        undone = node.target is ATEN.squeeze.dim and source.target is ATEN.unsqueeze.default
        if undone and node.args[1] % _rank(node, 1) == source.args[1] % _rank(node, 1):
            node = source.args[0]
        elif node.target is ATEN.to.dtype and source.meta["val"].dtype == node.args[1]:
            node = source
        else:
            break
    return node


def _rank(node, more):
    return node.meta["val"].dim() + more


def _arguments(node):
    """Arguments by name without those that are at their defaults."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return {"args": node.args, "kwargs": dict(node.kwargs)}
    schema = node.target._schema.arguments
    given = {a.name: value for a, value in zip(schema, node.args, strict=False)} | dict(node.kwargs)
    defaults = {a.name: a.default_value for a in schema if a.has_default_value()}
    return {name: value for name, value in given.items() if name not in defaults or defaults[name] != value}
