"""Guards on what a leaf reads from outside: Dynamo did not look into it, so it would not see a helper replaced."""

from __future__ import annotations

import types
from typing import Any

from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import AttrSource, DictGetItemSource

from k31compile.leaves.globals import is_constant
from k31compile.leaves.source import Source


def install_guards(place: Any, source: Source) -> None:
    """Guard code, defaults, helpers and constants of a function; `place` is how Dynamo reaches it."""
    places: dict[int, Any] = {0: place}
    _guard_function(place, source.functions[0])
    for read in source.reads:
        here: Any = DictGetItemSource(AttrSource(places[read.owner], "__globals__"), read.path[0])
        for attribute in read.path[1:]:
            here = AttrSource(here, attribute)
        if isinstance(read.value, types.FunctionType) and read.value in source.functions:
            position = source.functions.index(read.value)
            # A helper is reached through a function that stands before it, or that was reached already.
            if position not in places:
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
