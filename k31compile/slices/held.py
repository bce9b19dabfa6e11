"""What a slice is given: tensors, and modules and lists that hold more of them; each tensor has a place.

A slice is tried on other tensors than the caller's, so the modules it reads are given to it as twins: the same classes
and attributes, with other parameters. The caller's modules are never touched.
"""

from __future__ import annotations

import math
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from k31compile.graph.sizes import hint
from k31compile.leaves.bytecode import Unfit, all_codes
from k31compile.leaves.globals import is_constant, is_trusted

_ADVICE = "; put a number that the loop reads of it into an attribute of the module: self.n = .. in __init__"
_NO_INDEX = -(1 << 20)
Place = tuple[str | int, ...]
"""The name of an argument, then attributes by name and members of lists by number."""

_INTERNAL = frozenset(vars(nn.Module()))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OVERLOADS = frozenset(
    f"__{name}__" for name in ("bool", "call", "contains", "getattr", "getattribute", "getitem", "iter", "len")
)
LISTS = (nn.ModuleList, nn.Sequential, nn.ParameterList, nn.ModuleDict, nn.ParameterDict)
"""Modules whose members are reached by number; those of a dictionary where their names are numbers."""


def text_of(place: Place) -> str:
    """A place as Python would spell it."""
    first, *rest = place
    return str(first) + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in rest)


@dataclass
class Held:
    """The arguments of a slice by name, and what is reached through them.

    Attributes:
        arguments: the values; tensors are most likely fake ones, whose sizes and types alone are read.
        tensors: each tensor once, at the first place that leads to it.
        modules: each module once.
        constants: what the code may read of them beside tensors and modules, by place.
        functions: the methods that the code may call, `static` those of them that are static.
        aliases: further places of tensors, with their first.
        lists: the lists that modules hold.
        repeated: further places of modules, with their first.
        inherited: by class the names that are read of it, and not of the instance.

    """

    arguments: Mapping[str, Any]
    tensors: dict[Place, torch.Tensor] = field(default_factory=dict)
    modules: dict[Place, nn.Module] = field(default_factory=dict)
    constants: dict[Place, Any] = field(default_factory=dict)
    functions: dict[types.FunctionType, Place] = field(default_factory=dict)
    static: set[Any] = field(default_factory=set)
    aliases: dict[Place, Place] = field(default_factory=dict)
    lists: list[Place] = field(default_factory=list)
    repeated: dict[Place, Place] = field(default_factory=dict)
    inherited: dict[type, set[str]] = field(default_factory=dict)

    @staticmethod
    def of(arguments: Mapping[str, Any], code: types.CodeType) -> Held:
        """Everything that the code, and the methods that it calls, may reach through these arguments.

        Raises:
            Unfit: something of it may change, or is of a kind that nobody can look into.
        """
        held = Held(arguments)
        walk = _Walk(held, mentioned([code]))
        for name, value in arguments.items():
            walk.add((name,), value)
        walk.follow()
        if held.modules and _has_any_global_hook():
            raise Unfit("there are hooks on all modules, which may do anything")
        if "__dict__" in walk.names:
            raise Unfit("it reads __dict__, which nobody can look into")
        return held

    def key(self) -> str:
        """Equal for arguments that differ in the number of tokens, and in values of tensors, alone."""
        given = {name: value for name, value in self.arguments.items() if isinstance(value, torch.Tensor)}
        counts = {_rows(value) for value in given.values() if not value.is_floating_point()}
        texts = []
        for place, tensor in self.tensors.items():
            has_tokens = place[0] in given and _rows(tensor) in counts
            sizes = ["tokens", tensor.dim(), *tensor.shape[-1:]] if has_tokens else list(tensor.shape)
            texts.append(f"{text_of(place)}: {tensor.dtype}{sizes}")
        texts += [f"{text_of(place)}: {type(module).__qualname__}" for place, module in self.modules.items()]
        texts += [f"{text_of(place)}={value!r}" for place, value in self.constants.items()]
        texts += [f"{text_of(place)} is {text_of(other)}" for place, other in self.aliases.items()]
        return "; ".join(texts)

    def filled(self, values: Mapping[Place, torch.Tensor], numbers: Mapping[Place, int]) -> list[Any]:
        """The arguments with these tensors and numbers in place of those that are held; modules as twins.

        A tensor that is not among `values` is poisoned: whatever is made with it is NaN, or no index of anything.
        """
        twins: dict[int, Any] = {}
        known: dict[Place, Any] = {place: values[first] for place, first in self.aliases.items() if first in values}
        known = {**known, **values, **numbers}
        return [_twin(value, (name,), known, twins) for name, value in self.arguments.items()]


class _Walk:
    """Reach what code mentions: members of modules by name, members of lists all, and what called methods mention."""

    def __init__(self, held: Held, names: set[str]) -> None:
        self.held, self.names = held, names
        self.seen: dict[int, Place] = {}
        self.first: dict[type, Place] = {}

    def add(self, place: Place, value: Any) -> None:
        """Take a tensor, a module, a constant, or a list of such."""
        if isinstance(value, torch.Tensor | nn.Module):
            known = self.seen.setdefault(id(value), place)
            if isinstance(value, nn.Module):
                self.held.modules.setdefault(known, value)
                if known != place:
                    self.held.repeated[place] = known
            elif known == place:
                self.held.tensors[place] = value
            else:
                self.held.aliases[place] = known
        elif type(value) in (list, tuple, torch.Size):
            if type(value) is list and len(place) > 1:
                self.held.lists.append(place)
            for i, part in enumerate(value):
                self.add((*place, i), part)
        elif isinstance(value, torch.SymInt) or is_constant(value) or _is_library_function(value):
            self.held.constants[place] = value
        elif len(place) == 1 or type(value) is dict or callable(value) or not hasattr(value, "__dict__"):
            advice = _ADVICE if len(place) > 1 and isinstance(value, Mapping) else ""
            kind = type(value).__name__
            raise Unfit(f"{text_of(place)} is a {kind}, neither tensor, module, list nor constant{advice}")
        else:
            self._add_attributes(place, value)

    def _add_attributes(self, place: Place, value: Any) -> None:
        """Take the constants of an object that only holds them, as a configuration does."""
        for name in sorted((self.names | _OVERLOADS) - vars(value).keys()):
            owner = next((one for one in type(value).__mro__[:-1] if name in vars(one)), None)
            if owner is not None and not is_constant(vars(owner)[name]):
                raise Unfit(f"{text_of(place)} is a {type(value).__name__}, whose {name} may do anything{_ADVICE}")
            if owner is not None:
                self.held.constants[(*place, name)] = vars(owner)[name]
        for name in sorted(self.names & vars(value).keys()):
            if not is_constant(vars(value)[name]):
                raise Unfit(f"{text_of((*place, name))} is a {type(vars(value)[name]).__name__}, which may change")
            self.held.constants[(*place, name)] = vars(value)[name]

    def follow(self) -> None:
        """Look into modules and classes until nothing new is mentioned."""
        known = (-1, -1)
        while known != (len(self.names), len(self.held.modules)):
            known = (len(self.names), len(self.held.modules))
            for place, module in list(self.held.modules.items()):
                self._look_into(place, module)

    def _look_into(self, place: Place, module: nn.Module) -> None:
        if any(getattr(module, name, None) for name in _HOOKS):
            raise Unfit(f"{text_of(place)} has hooks, which may do anything")
        if "forward" in vars(module):
            raise Unfit(f"{text_of(place)} has a forward of its own")
        is_library = is_trusted(type(module).__module__)
        for step, value in _children(module):
            if value is None and is_library:
                self.held.constants[(*place, step)] = None  # a bias that may be given later
            elif value is not None and (is_library or step in self.names):
                self.add((*place, step), value)
        if is_library:
            self._add_settings(place, module)
            return
        for name in sorted(self.names & vars(module).keys()):
            if name == "training" or name not in _INTERNAL:
                self.add((*place, name), vars(module)[name])
        if type(module) not in self.first or self.first[type(module)] == place:
            self.first[type(module)] = place
            self._look_into_class(place, type(module))

    def _add_settings(self, place: Place, module: nn.Module) -> None:
        """Take all that a module of torch may read of itself; a linear layer reads its matrix and bias alone."""
        if type(module) in (nn.Linear, *LISTS):
            return
        for name, value in vars(module).items():
            if name == "training" or name not in _INTERNAL:
                self.add((*place, name), value)

    def _look_into_class(self, place: Place, kind: type) -> None:
        """Take the methods and constants of a class that are mentioned; what is held is called, but for an argument."""
        known = self.held.inherited.setdefault(kind, set())
        for name in sorted(self.names | _OVERLOADS | ({"forward"} if len(place) > 1 else set())):
            owner = next((one for one in kind.__mro__ if name in vars(one)), None)
            if owner is None or is_trusted(owner.__module__) or owner is object:
                continue
            value = vars(owner)[name]
            known.add(name)
            if isinstance(value, staticmethod):
                value = value.__func__
                self.held.static.add(value)
            if isinstance(value, types.FunctionType):
                self.held.functions.setdefault(value, (*place, name))
                self.names |= mentioned([value.__code__])
            elif is_constant(value):
                self.held.constants[(*place, name)] = value
            else:
                raise Unfit(f"{kind.__name__}.{name} is a {type(value).__name__}")


def mentioned(codes: Iterable[types.CodeType]) -> set[str]:
    """The names of globals, attributes and methods in some code."""
    return {name for code in codes for inner in all_codes(code) for name in inner.co_names}


def _children(module: nn.Module) -> Iterator[tuple[str | int, Any]]:
    """Parameters, buffers and modules of a module with the step that leads to each."""
    numbered = isinstance(module, LISTS)
    for members in (module._parameters, module._buffers, module._modules):
        for name, value in members.items():
            yield (int(name) if numbered and name.isdigit() else name), value


def _twin(value: Any, place: Place, values: Mapping[Place, Any], twins: dict[int, Any]) -> Any:
    """The same with other tensors."""
    if isinstance(value, torch.Tensor):
        return values[place] if place in values else poison(value)
    if isinstance(value, nn.Module):
        if id(value) not in twins:
            twins[id(value)] = twin = object.__new__(type(value))
            numbered = isinstance(value, LISTS)
            state = dict(vars(value))
            for kind in ("_parameters", "_buffers", "_modules"):
                state[kind] = {
                    name: None if part is None else _twin(part, (*place, _step(name, numbered)), values, twins)
                    for name, part in state[kind].items()
                }
            for name, part in state.items():
                if (*place, name) in values:
                    state[name] = values[(*place, name)]
                elif name not in _INTERNAL and type(part) in (list, tuple) and not is_constant(part):
                    state[name] = _twin(part, (*place, name), values, twins)
            twin.__dict__.update(state)
        return twins[id(value)]
    if isinstance(value, list | tuple):
        parts = [_twin(part, (*place, i), values, twins) for i, part in enumerate(value)]
        return parts if isinstance(value, list) else tuple(parts)
    return values.get(place, hint(value) if isinstance(value, torch.SymInt) else value)


def _step(name: str, numbered: bool) -> str | int:
    return int(name) if numbered and name.isdigit() else name


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same sizes whose use shows: NaN, or numbers that index nothing."""
    sizes = [hint(size) for size in tensor.shape]
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        return torch.full((), torch.nan, dtype=tensor.dtype).expand(sizes)
    return torch.full((), _NO_INDEX, dtype=torch.int64).expand(sizes)


def _rows(tensor: torch.Tensor) -> int:
    return math.prod(hint(size) for size in tensor.shape[:-1])


def _is_library_function(value: Any) -> bool:
    return isinstance(value, types.FunctionType | types.BuiltinFunctionType) and is_trusted(value.__module__ or "torch")
