"""Which inputs of a graph it writes to."""

from __future__ import annotations

import torch
from torch import fx

from k31compile.graph.views import is_view


def written_inputs(module: fx.GraphModule) -> set[int]:
    """The numbers of the inputs that an operator of the graph changes in place, itself or through a view."""
    places = {node: place for place, node in enumerate(module.graph.find_nodes(op="placeholder"))}
    found: set[int] = set()
    for node in module.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        for number, argument in enumerate(node.target._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = node.args[number] if number < len(node.args) else node.kwargs.get(argument.name)
            for one in value if isinstance(value, list | tuple) else (value,):
                base = _base(one)
                if base in places:
                    found.add(places[base])
    return found


def _base(value: object) -> fx.Node | None:
    if not isinstance(value, fx.Node):
        return None
    while value.op == "call_function" and is_view(value) and isinstance(value.args[0], fx.Node):
        value = value.args[0]
    return value
