"""Which operators of a graph torchair cannot convert, asked before it converts: all of them, with their lines.

torchair itself stops at the first. It registers a converter for nearly every operator; about two of three only raise.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from k31compile.errors import TargetError
from k31compile.graph.source import frames_of, source_line

_LISTED = 8


def without_converter(graph: fx.Graph) -> dict[str, list[fx.Node]]:
    """Operators that torchair has no converter for, by name, with their nodes; needs an open torchair."""
    found: dict[str, list[fx.Node]] = {}
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and not has_converter(node.target):
            found.setdefault(str(node.target), []).append(node)
    return found


def refuse_without_converter(graph: fx.Graph) -> None:
    """Check that torchair can convert every operator.

    Raises:
        TargetError: some it cannot; the error names all of them, and where they come from.
    """
    found = without_converter(graph)
    if not found:
        return
    told = [f"{name} ({_places(nodes)})" for name, nodes in list(found.items())[:_LISTED]]
    more = f" and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
    raise TargetError(
        f"GE has no converter for {', '.join(told)}{more}",
        hint="write them by other operators, or compile for npugraph_ex, which runs any operator",
    )


def _places(nodes: list[fx.Node]) -> str:
    lines = list(dict.fromkeys(source_line(node) for node in nodes if frames_of(node))) or [f"{len(nodes)} times"]
    return ", ".join(lines[:3]) + (", ..." if len(lines) > 3 else "")


@functools.cache
def has_converter(operator: torch._ops.OpOverload) -> bool:
    """Whether torchair converts an operator, and does not only say that it does not."""
    from torchair._ge_concrete_graph.fx2ge_converter import _get_converter

    converter = _get_converter(operator)
    return converter is not None and not _only_raises(converter)


def _only_raises(converter: Callable[..., Any]) -> bool:
    """Whether all that a converter does is to raise."""
    written = inspect.unwrap(converter)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(written)))
    except (OSError, TypeError, SyntaxError):
        return False  # made by code, not written: torchair made it for this operator
    body = tree.body[0].body if isinstance(tree.body[0], ast.FunctionDef) else []
    steps = [step for step in body if not (isinstance(step, ast.Expr) and isinstance(step.value, ast.Constant))]
    return bool(steps) and isinstance(steps[0], ast.Raise)
