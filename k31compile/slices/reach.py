"""Places of a slice as Dynamo's variables: what stands there, and guards on all that was read of it."""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import AttrSource, DictGetItemSource, GetItemSource, GlobalSource
from torch._dynamo.variables import ConstantVariable, VariableTracker

from k31compile.leaves.bytecode import Unfit
from k31compile.leaves.guarding import guard_reads, install_guards
from k31compile.slices.call import SliceCall
from k31compile.slices.held import LISTS, Place, text_of

_MOVES = frozenset(["to", "long", "int", "type", "type_as", "contiguous", "view", "reshape", "detach", "clone"])
_SELECTIONS = (torch.topk, "topk", torch.sort, "sort")
_ARGSORTS = (torch.argsort, "argsort")


def value_of(variable: Any, name: str) -> Any:
    """What a variable of Dynamo holds: a fake tensor, a module, a constant, a size, or a list of such.

    Raises:
        Unfit: it is something else.
    """
    variable = variable.realize()
    if variable.is_tensor():
        return variable.as_proxy().node.meta["example_value"]
    if variable.is_python_constant():
        return variable.as_python_constant()
    kind = type(variable).__name__.removesuffix("Variable")
    if kind == "SymNode":
        return variable.as_proxy().node.meta["example_value"]
    if kind in ("List", "Tuple", "Size"):
        parts = [value_of(part, name) for part in variable.items]
        return parts if kind == "List" else tuple(parts)
    module = getattr(variable, "value", None)
    if isinstance(module, nn.Module):
        return module
    raise Unfit(f"{name} is a {kind}, neither tensor, module, list nor constant")


class Reach:
    """The variables at the places of one call."""

    def __init__(self, tx: Any, arguments: Mapping[str, Any]) -> None:
        self.tx = tx
        self.known: dict[Place, Any] = {(name,): variable for name, variable in arguments.items()}

    def at(self, place: Place) -> Any:
        """The variable at a place; Dynamo guards what it reads on the way."""
        if place not in self.known:
            around, step = self.at(place[:-1]), place[-1]
            if isinstance(step, int) and isinstance(getattr(around, "items", None), list | tuple):
                found = around.items[step]
            else:
                name = ConstantVariable.create(str(step))
                found = VariableTracker.build(self.tx, getattr).call_function(self.tx, [around, name], {})
            self.known[place] = found.realize()
        return self.known[place]

    def guard(self, call: SliceCall) -> None:
        """Guard the classes, methods and attributes that a slice reads: Dynamo did not look into it.

        Raises:
            Unfit: something has no source that a guard could name.
        """
        for place, module in call.held.modules.items():
            install_guard(self._source(place).make_guard(GuardBuilder.TYPE_MATCH))
            for name in ("forward", *sorted(call.held.inherited.get(type(module), ()))):
                if name not in vars(module):
                    absent = functools.partial(GuardBuilder.NOT_PRESENT_IN_GENERIC_DICT, attr=name)
                    install_guard(self._source(place).make_guard(absent))
            if isinstance(module, LISTS):
                members = AttrSource(self._source(place), "_modules")
                install_guard(members.make_guard(GuardBuilder.SEQUENCE_LENGTH))
        for place in filter(call.is_in_module, call.held.lists):
            install_guard(self._source(place).make_guard(GuardBuilder.SEQUENCE_LENGTH))
        for place in filter(call.is_in_module, call.held.constants):
            around, step = self._source(place[:-1]), place[-1]
            is_member = isinstance(step, int) and place[:-1] not in call.held.modules
            source = GetItemSource(around, step) if is_member else AttrSource(around, str(step))
            install_guard(source.make_guard(_kind(call, place)))
        for function, place in call.held.functions.items():
            method = AttrSource(self._source(place[:-1]), str(place[-1]))
            plain = method if function in call.held.static else AttrSource(method, "__func__")
            install_guards(plain, call.sources[function])
        guard_reads(self.global_named, call.sources[call.slice.function])

    def _source(self, place: Place) -> Any:
        source = self.at(place).source
        if source is None:
            raise Unfit(f"{text_of(place)} was made while tracing, and cannot be guarded")
        return source

    def global_named(self, name: str) -> Any:
        """The source of a global that the slice reads: of the frame, or of the function that is traced into."""
        function = getattr(self.tx, "funcvar", None)
        if function is None:
            return GlobalSource(name)
        source = function.get_source() if hasattr(function, "get_source") else function.source
        if source is None:
            raise Unfit("the function around it was made while tracing, and cannot be guarded")
        return DictGetItemSource(AttrSource(source, "__globals__"), name)


def _kind(call: SliceCall, place: Place) -> Any:
    value = call.held.constants[place]
    is_function = isinstance(value, types.FunctionType | types.BuiltinFunctionType)
    return GuardBuilder.ID_MATCH if is_function else GuardBuilder.CONSTANT_MATCH


def are_distinct(node: fx.Node) -> bool:
    """Whether no row of these integers can hold one twice: places that a top-k gave, kept in their rows."""
    slots = _last_size(node)
    while node.op == "call_method" and node.target in _MOVES and isinstance(node.args[0], fx.Node):
        node = node.args[0]
        if _last_size(node) != slots:
            return False
    if getattr(node.target, "__name__", "") == "getitem":
        selection, place = node.args
        if place != 1 or not isinstance(selection, fx.Node) or selection.target not in _SELECTIONS:
            return False
        return _is_along_last(selection)
    return node.target in _ARGSORTS and _is_along_last(node)


def _is_along_last(choice: fx.Node) -> bool:
    source = choice.args[0]
    rank = source.meta["example_value"].dim() if isinstance(source, fx.Node) else 0
    position = 2 if choice.target in _SELECTIONS[:2] else 1
    dim = choice.kwargs.get("dim", choice.args[position] if len(choice.args) > position else -1)
    return bool(dim == -1 or dim == rank - 1)


def _last_size(node: fx.Node) -> Any:
    example = node.meta.get("example_value")
    return example.shape[-1] if isinstance(example, torch.Tensor) and example.dim() else None
