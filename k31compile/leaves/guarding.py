"""Guards on what a leaf reads from outside: Dynamo did not look into it, so it would not see a helper replaced."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import AttrSource, DictGetItemSource

from k31compile.leaves.globals import is_constant
from k31compile.leaves.source import Source


def install_guards(place: Any, source: Source) -> None:
    """Guard code, defaults, helpers and constants of a function; `place` is how Dynamo reaches it."""
    _guard_function(place, source.functions[0])
    guard_reads(lambda name: DictGetItemSource(AttrSource(place, "__globals__"), name), source)


def guard_reads(global_of: Callable[[str], Any], source: Source) -> None:
    """Guard what a function reads from outside; `global_of` is how Dynamo reaches a global of its module."""
    places: dict[int, Any] = {}
    for read in source.reads:
        name = read.path[0]
        here: Any = global_of(name)
        if read.owner:
            here = DictGetItemSource(AttrSource(places[read.owner], "__globals__"), name)
        for attribute in read.path[1:]:
            here = AttrSource(here, attribute)
        if isinstance(read.value, types.FunctionType) and read.value in source.functions:
            position = source.functions.index(read.value)
            # A helper is reached through a function that stands before it, or that was reached already.
            if position and position not in places:
                places[position] = here
            _guard_function(here, read.value)
        elif is_constant(read.value):
            install_guard(here.make_guard(GuardBuilder.CONSTANT_MATCH))
        else:
            install_guard(here.make_guard(GuardBuilder.ID_MATCH))


def _guard_function(place: Any, function: types.FunctionType) -> None:
    install_guard(place.make_guard(GuardBuilder.CLOSURE_MATCH))
    install_guard(AttrSource(place, "__defaults__").make_guard(GuardBuilder.CONSTANT_MATCH))
    keywords = AttrSource(place, "__kwdefaults__")
    if function.__kwdefaults__ is None:
        install_guard(keywords.make_guard(GuardBuilder.CONSTANT_MATCH))
        return
    install_guard(keywords.make_guard(GuardBuilder.ID_MATCH))
    for name in function.__kwdefaults__:
        install_guard(DictGetItemSource(keywords, name).make_guard(GuardBuilder.CONSTANT_MATCH))
