"""What a global of a function is: a helper to look into, a library to trust, a constant, or a reason to refuse."""

from __future__ import annotations

import builtins
import importlib.metadata
import inspect
import types
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from k31compile.graph.library_names import LIBRARY_KINDS, name_in_library
from k31compile.leaves.bytecode import Unfit

TRUSTED = ("torch", "math", "einops")
"""Libraries whose functions are taken as they are; their versions are part of a digest."""

# Operators whose code the versions of torch and of this package tell; other namespaces are anybody's.
_OWN_OPERATORS = frozenset(["aten", "k31", "prim", "prims"])

_BUILTINS = frozenset(
    [
        "abs",
        "all",
        "any",
        "bool",
        "complex",
        "divmod",
        "enumerate",
        "filter",
        "float",
        "int",
        "isinstance",
        "len",
        "list",
        "dict",
        "map",
        "max",
        "min",
        "pow",
        "range",
        "reversed",
        "round",
        "set",
        "slice",
        "sorted",
        "str",
        "sum",
        "tuple",
        "zip",
    ]
)
_PLAIN = (int, float, complex, bool, str, bytes, types.NoneType, types.EllipsisType)
_TORCH_PLAIN = (torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclass(frozen=True)
class Found:
    """What a path of names leads to: its value, as many names as lead there, and a text for the digest.

    `is_opaque` where the text does not tell what it does: somebody else's operator, or a function put into a library.
    """

    kind: Literal["helper", "library", "constant"]
    path: tuple[str, ...]
    value: Any
    text: str
    is_opaque: bool = False


def is_constant(value: Any) -> bool:
    """Whether a value can never change: a number, a word, a dtype, or a tuple of such."""
    if isinstance(value, tuple):
        return all(is_constant(part) for part in value)
    return type(value) in _PLAIN or isinstance(value, _TORCH_PLAIN)


def look_up(function: types.FunctionType, path: tuple[str, ...]) -> Found | None:
    """What the function reads by this path of names; None for a harmless builtin.

    Raises:
        Unfit: the value may change, or is of a kind that nobody can look into.
    """
    name, *rest = path
    where = place_of(function)
    if name not in function.__globals__:
        builtin = getattr(builtins, name, None)
        if name in _BUILTINS or (isinstance(builtin, type) and issubclass(builtin, BaseException)):
            return None
        kind = "the builtin" if hasattr(builtins, name) else "the undefined name"
        raise Unfit(f"{where} uses {kind} {name}")
    taken: tuple[str, ...] = (name,)
    value = function.__globals__[name]
    while isinstance(value, types.ModuleType) and not is_trusted(value.__name__):
        if not rest:
            raise Unfit(f"{where} uses the module {name} as a value")
        value, taken = getattr(value, rest[0], None), (*taken, rest.pop(0))
    return _judged(value, taken, rest, where)


def _judged(value: Any, path: tuple[str, ...], rest: list[str], where: str) -> Found:
    text = ".".join(path)
    if isinstance(value, types.ModuleType):
        name = f"{value.__name__}.{'.'.join(rest)} {_version(value.__name__)}"
        return Found("library", path, value, name, _is_opaque(value, rest))
    if known := name_in_library(value, TRUSTED):
        return Found("library", path, value, f"{known} {_version(known)}", _is_opaque(value, rest))
    if isinstance(value, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return Found("library", path, value, str(value), _is_opaque(value, ()))
    if is_constant(value):
        return Found("constant", path, value, f"{type(value).__name__} {value!r}")
    if isinstance(value, types.FunctionType):
        if rest:
            raise Unfit(f"{where} reads {rest[0]}, an attribute of the function {text} that may change")
        return Found("helper", path, value, text)
    kind = "a tensor" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
    raise Unfit(f"{where} reads the global {text}, {kind} that may change")


def _is_opaque(value: Any, rest: Iterable[str]) -> bool:
    """Whether what a library's name leads to is not the library's own, so that its version does not tell of it."""
    for name in rest:
        if isinstance(value, torch._ops._OpNamespace):
            break  # its name tells, and asking it for an operator may import one
        value = getattr(value, name, None)
    if isinstance(value, torch._ops.OpOverload):
        return value.namespace not in _OWN_OPERATORS
    if isinstance(value, torch._ops.OpOverloadPacket):
        return value._qualified_op_name.partition("::")[0] not in _OWN_OPERATORS
    if isinstance(value, torch._ops._OpNamespace):
        return value.name not in _OWN_OPERATORS
    is_anybodys = isinstance(value, LIBRARY_KINDS) and not name_in_library(value, TRUSTED)
    return is_anybodys or isinstance(value, torch._ops._Ops)


def is_added_method(name: str) -> bool:
    """Whether a method or property of this name was put into torch's tensors by somebody else."""
    found = inspect.getattr_static(torch.Tensor, name, None)
    found = found.fget if isinstance(found, property) else found
    return isinstance(found, types.FunctionType) and not is_trusted(str(found.__globals__.get("__name__", "")))


def place_of(function: types.FunctionType) -> str:
    """`name (file.py:line)` of a function, for a reason."""
    return f"{function.__name__} ({line_of(function)})"


def line_of(function: Any) -> str:
    """`folder/file.py:line` of a function, or nothing where there is no code to point at."""
    code = getattr(function, "__code__", None)
    if code is None:
        return ""
    return f"{'/'.join(code.co_filename.replace(chr(92), '/').split('/')[-2:])}:{code.co_firstlineno}"


def is_trusted(module: str) -> bool:
    """Whether a module is part of a library that is taken as it is."""
    return module.split(".")[0] in TRUSTED


def _version(module: str) -> str:
    name = module.split(".")[0]
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
