"""Sizes as numbers: a hint to look for a region with, a small odd number to confirm it with.

`int()` of a SymInt would add a guard and recompile the user's model at each length, so nobody calls it here.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils._sympy.symbol import SymT, symbol_is_type

# Symbols, and plain sizes to be shrunk, each with the number to use in a confirmation.
Substitution = Mapping[sympy.Symbol | int, int]

_SHAPE = "k31_shape"


def hint(size: Any) -> int:
    """A size as the number that it had when the graph was traced."""
    if isinstance(size, torch.SymInt):
        known = size.node.hint
        return int(known) if known is not None else int(size.node.shape_env.size_hint(size.node.expr))
    return int(size)


def expression_of(size: torch.SymInt) -> sympy.Expr:
    """The expression behind a symbolic size; some hold a plain number."""
    expression: sympy.Expr = sympy.sympify(size.node.expr)
    return expression


def substitute(size: Any, substitution: Substitution) -> int:
    """A size under a substitution; symbols and numbers not named keep their hints and themselves."""
    if not isinstance(size, torch.SymInt):
        return substitution.get(int(size), int(size))
    symbols = {s: sympy.Integer(v) for s, v in substitution.items() if isinstance(s, sympy.Symbol)}
    value = expression_of(size).xreplace(symbols)
    if value.free_symbols:
        env = size.node.shape_env
        value = value.xreplace({s: sympy.Integer(env.backed_var_to_val[s]) for s in value.free_symbols})
    return int(value)


def symbols_of(sizes: Iterable[Any]) -> list[sympy.Symbol]:
    """The free symbols of some sizes, in the order of their first use."""
    found: dict[sympy.Symbol, None] = {}
    for size in sizes:
        if isinstance(size, torch.SymInt):
            found.update(dict.fromkeys(sorted(expression_of(size).free_symbols, key=str)))
    return list(found)


def value_of(node: fx.Node) -> Any:
    """`meta["val"]` of a node: a fake tensor, a SymInt, a tuple of them, or None."""
    return node.meta.get("val")


def input_values(module: fx.GraphModule, example_inputs: Sequence[Any]) -> list[Any]:
    """What the inputs of a graph look like, dynamic sizes as symbols: an example may be a real tensor without any."""
    nodes = module.graph.find_nodes(op="placeholder")
    known = (node.meta.get("val", node.meta.get("example_value")) for node in nodes)
    return [example if value is None else value for value, example in zip(known, example_inputs, strict=True)]


def number_inputs(module: fx.GraphModule) -> list[torch.SymFloat]:
    """The floating-point numbers that a graph of Dynamo's was not traced for alone, each once.

    They come as tensors, their values as what a node reads from one. A trace makes each the number that it is.
    """
    found: dict[sympy.Expr, torch.SymFloat] = {}
    for child in module.modules():
        for node in child.graph.nodes if isinstance(child, fx.GraphModule) else ():
            value = node.meta.get("example_value")
            if isinstance(value, torch.SymFloat):
                expression = sympy.sympify(value.node.expr)
                if any(symbol_is_type(symbol, SymT.FLOAT) for symbol in expression.free_symbols):
                    found.setdefault(expression, value)
    return list(found.values())


def is_tensor(node: fx.Node) -> bool:
    """Whether the node's value is one tensor."""
    return isinstance(value_of(node), torch.Tensor)


def is_float(node: fx.Node) -> bool:
    """Whether the node's value is a floating-point tensor."""
    value = value_of(node)
    return isinstance(value, torch.Tensor) and value.dtype.is_floating_point


def is_integer(node: fx.Node) -> bool:
    """Whether the node's value is an integer tensor (bool is not one)."""
    value = value_of(node)
    return isinstance(value, torch.Tensor) and not value.dtype.is_floating_point and value.dtype != torch.bool


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """The node's shape by hints; the empty tuple for a scalar and for what is no tensor."""
    value = value_of(node)
    if not isinstance(value, torch.Tensor):
        return ()
    # Asked a hundred thousand times a compile, and a fake tensor takes microseconds to tell its shape.
    known: tuple[torch.Tensor, tuple[int, ...]] | None = node.meta.get(_SHAPE)
    if known is None or known[0] is not value:
        known = node.meta[_SHAPE] = (value, tuple(hint(size) for size in value.shape))
    return known[1]


def shape_under(node: fx.Node, substitution: Substitution) -> tuple[int, ...]:
    """The node's shape under a substitution."""
    return tuple(substitute(size, substitution) for size in value_of(node).shape)


def numel_of(node: fx.Node) -> int:
    """The number of elements by hints."""
    count = 1
    for size in shape_of(node):
        count *= size
    return count


def nbytes_of(node: fx.Node) -> int:
    """The bytes of the node's value by hints."""
    value = value_of(node)
    return numel_of(node) * value.element_size() if isinstance(value, torch.Tensor) else 8
