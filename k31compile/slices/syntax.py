"""What statements read, write and ask of the data, as their syntax shows it."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeGuard

_ASKING = frozenset(
    ["any", "argwhere", "bincount", "item", "nonzero", "numpy", "tolist", "unique", "unique_consecutive"]
)
_LOOPS = (ast.For, ast.While, ast.ListComp, ast.GeneratorExp)
_DEFERRED = (ast.Lambda, ast.FunctionDef, ast.GeneratorExp)
_FORBIDDEN = (
    *(ast.Yield, ast.YieldFrom, ast.Await, ast.Nonlocal, ast.Global, ast.Delete, ast.Import, ast.ImportFrom),
    *(ast.Try, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.NamedExpr, ast.Match),
)


def names_read(nodes: Iterable[ast.AST]) -> set[str]:
    """Names that are read anywhere in some statements."""
    return {name.id for name in _names(nodes) if isinstance(name.ctx, ast.Load)} | _augmented(nodes)


def names_needed(nodes: Iterable[ast.stmt]) -> set[str]:
    """Names whose value from before some statements may matter to them: read, or deleted, before they are assigned."""
    needed: set[str] = set()
    assigned: set[str] = set()
    for node in nodes:
        needed |= _needed_by(node) - assigned
        # A context manager may swallow an error that came before an assignment.
        if not any(isinstance(part, ast.With) for part in ast.walk(node)):
            assigned |= names_assigned_for_sure([node])
    return needed


def names_captured(node: ast.AST, line: int) -> set[str]:
    """Names that functions and generators made before a line read when they are run, which may be after it."""
    found: set[str] = set()
    for part in ast.walk(node):
        if part is not node and isinstance(part, _DEFERRED) and part.lineno < line:
            own = {inner.arg for inner in ast.walk(part) if isinstance(inner, ast.arg)}
            found |= names_read([part]) - (names_written([part]) if isinstance(part, ast.GeneratorExp) else own)
    return found


def _needed_by(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.If):
        return names_read([node.test]) | names_needed(node.body) | names_needed(node.orelse)
    if isinstance(node, ast.For):
        inside = names_needed(node.body) - names_written([node.target])
        return names_read([node.iter, node.target]) | inside | names_needed(node.orelse)
    deleted = {name.id for name in _names([node]) if isinstance(name.ctx, ast.Del)}
    return names_read([node]) | deleted


def names_written(nodes: Iterable[ast.AST]) -> set[str]:
    """Names that are assigned anywhere in some statements."""
    return {name.id for name in _names(nodes) if isinstance(name.ctx, ast.Store)}


def names_assigned_for_sure(nodes: Iterable[ast.stmt]) -> set[str]:
    """Names that are assigned whatever branch is taken."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Assign):
            found |= names_written(node.targets)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            found |= names_written([node.target])
        elif isinstance(node, ast.With):
            found |= names_assigned_for_sure(node.body)
        elif isinstance(node, ast.If):
            found |= names_assigned_for_sure(node.body) & names_assigned_for_sure(node.orelse)
    return found


def names_changed(nodes: Sequence[ast.stmt]) -> set[str]:
    """Names whose value itself may be written into: `y[i] = ..`, `y += ..`, `y.add_(..)`."""
    found: set[str] = set()
    for node in _all(nodes):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            parts = [part for target in targets for part in ast.walk(target)]
            found |= {part.value.id for part in parts if isinstance(part, ast.Subscript) and _is_name(part.value)}
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _is_name(node.func.value):
            method = node.func.attr
            if (method.endswith("_") and not method.startswith("_")) or method in ("append", "extend", "insert", "pop"):
                found.add(node.func.value.id)
    return found


def asks_the_data(node: ast.AST, masks: frozenset[str] = frozenset()) -> bool:
    """Whether the syntax has something whose shape or branch may depend on the data; `masks` are names of masks."""
    return any(_asks(part, masks) for part in ast.walk(node))


def has_loop(node: ast.AST) -> bool:
    """Whether something in it is done again and again."""
    return any(isinstance(part, _LOOPS) for part in ast.walk(node))


def loop_depth(node: ast.AST) -> int:
    """How many loops stand inside each other."""
    inner = max((loop_depth(part) for part in ast.iter_child_nodes(node)), default=0)
    return inner + isinstance(node, ast.For)


def masks_in(nodes: Iterable[ast.AST]) -> frozenset[str]:
    """Names that are assigned something with a comparison in it."""
    found: set[str] = set()
    for node in _all(nodes):
        if isinstance(node, ast.Assign) and any(_compares(part) for part in ast.walk(node.value)):
            found |= names_written(node.targets)
    return frozenset(found)


def may_move(node: ast.stmt, *, last: bool) -> bool:
    """Whether a statement means the same in a function of its own; only the last of a body may return."""
    parts = list(ast.walk(node))
    if any(isinstance(part, _FORBIDDEN) for part in parts):
        return False
    return last or not any(isinstance(part, ast.Return) for part in parts)


def only_raises(node: ast.stmt) -> bool:
    """Whether a statement does nothing, or raises an error."""
    if isinstance(node, ast.If):
        return all(isinstance(inner, ast.Raise) for inner in [*node.body, *node.orelse])
    return isinstance(node, ast.Assert | ast.Raise)


def has_private_names(node: ast.AST) -> bool:
    """Whether it has names like `__x`, which mean something else outside of their class."""
    named = [getattr(part, key, None) for part in ast.walk(node) for key in ("id", "attr", "arg")]
    return any(isinstance(name, str) and name.startswith("__") and not name.endswith("__") for name in named)


def _asks(part: ast.AST, masks: frozenset[str]) -> bool:
    if isinstance(part, ast.Call):
        name = getattr(part.func, "attr", getattr(part.func, "id", ""))
        return name in _ASKING or (name == "where" and len(part.args) == 1 and not part.keywords)
    if isinstance(part, ast.Subscript):
        index = part.slice.elts if isinstance(part.slice, ast.Tuple) else [part.slice]
        return any(_is_name(one) and one.id in masks for one in index)
    return False


def _compares(part: ast.AST) -> bool:
    if isinstance(part, ast.Compare):
        return not any(isinstance(operator, ast.Is | ast.IsNot | ast.In | ast.NotIn) for operator in part.ops)
    return isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and part.func.attr == "eq"


def _is_name(node: ast.AST) -> TypeGuard[ast.Name]:
    return isinstance(node, ast.Name)


def _all(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    for node in nodes:
        yield from ast.walk(node)


def _names(nodes: Iterable[ast.AST]) -> Iterator[ast.Name]:
    return (part for part in _all(nodes) if isinstance(part, ast.Name))


def _augmented(nodes: Iterable[ast.AST]) -> set[str]:
    targets = [part.target for part in _all(nodes) if isinstance(part, ast.AugAssign)]
    return {target.id for target in targets if isinstance(target, ast.Name)}
