"""The functions that a frame about to be compiled may call: what its code, its module and its globals refer to."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from k31compile.leaves.bytecode import all_codes

_MOST = 20_000
_SKIPPED = frozenset({"torch", *sys.stdlib_module_names})


def reachable(
    code: types.CodeType, globals: Mapping[str, Any], locals: Mapping[str, Any], closure: Sequence[Any]
) -> Iterator[types.FunctionType]:
    """Functions of the user that a frame refers to, directly or through others; each once."""
    modules = [value for value in locals.values() if isinstance(value, nn.Module)]
    walk = _Walk(modules)
    walk.add_named(code, globals)
    walk.add(locals.values())
    walk.add(_contents(closure))
    yield from walk


class _Walk:
    """Functions still to be looked at; methods count when their name is mentioned."""

    def __init__(self, roots: Sequence[nn.Module]) -> None:
        self.todo: list[types.FunctionType] = []
        self.seen: set[int] = set()
        self.methods: dict[str, list[types.FunctionType]] = {}
        for module in {id(m): m for root in roots for m in root.modules()}.values():
            self._add_module(module)

    def _add_module(self, module: nn.Module) -> None:
        self.add(value for value in vars(module).values() if isinstance(value, types.FunctionType))
        if id(type(module)) in self.seen:
            return
        self.seen.add(id(type(module)))
        for kind in type(module).__mro__:
            if _is_foreign(kind.__module__):
                continue
            for name, value in vars(kind).items():
                plain = value.__func__ if isinstance(value, staticmethod | classmethod) else value
                if isinstance(plain, types.FunctionType):
                    self.methods.setdefault(name, []).append(plain)
        self.add(self.methods.pop("forward", []))

    def add(self, values: Iterable[Any]) -> None:
        """Take the functions among some values, methods and wrapped ones too."""
        for value in values:
            function = getattr(value, "__func__", value)
            if isinstance(function, types.FunctionType) and hasattr(function, "__wrapped__"):
                self.add([function.__wrapped__])
            if not isinstance(function, types.FunctionType) or id(function) in self.seen:
                continue
            if _is_foreign(function.__globals__.get("__name__") or "") or len(self.seen) > _MOST:
                continue
            self.seen.add(id(function))
            self.todo.append(function)

    def add_named(self, code: types.CodeType, globals: Mapping[str, Any]) -> None:
        """Take what code mentions by name: globals, functions of modules and classes among them, and methods."""
        names = {name for inner in all_codes(code) for name in inner.co_names}
        for name in names & globals.keys():
            value = globals[name]
            if isinstance(value, types.ModuleType | type) and not _is_foreign(
                getattr(value, "__module__", None) or value.__name__
            ):
                self.add(vars(value).get(other) for other in names)
            self.add([value, getattr(value, "__wrapped__", None)] if callable(value) else [])
        for name in names & self.methods.keys():
            self.add(self.methods.pop(name))

    def __iter__(self) -> Iterator[types.FunctionType]:
        while self.todo:
            function = self.todo.pop()
            yield function
            self.add_named(function.__code__, function.__globals__)
            self.add(_contents(function.__closure__ or ()))


def _contents(cells: Sequence[Any]) -> Iterator[Any]:
    for cell in cells:
        try:
            yield cell.cell_contents
        except ValueError:  # a variable that nothing was assigned to yet
            continue


def _is_foreign(module: str) -> bool:
    first, *rest = module.split(".")
    return first in _SKIPPED or (first == "k31compile" and rest[:1] != ["model"])
