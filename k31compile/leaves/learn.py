"""Learn from a graph: a function that a fused region came out of is a candidate from the next compile on."""

from __future__ import annotations

import types
from collections.abc import Iterator

from torch import fx

from k31compile.graph.source import frames_of
from k31compile.leaves.bytecode import Unfit
from k31compile.leaves.form import OPERATORS
from k31compile.leaves.hook import Session
from k31compile.leaves.known import KNOWN
from k31compile.leaves.source import examine

_FEWEST_PARAMETERS = 5


def learn(module: fx.GraphModule, session: Session) -> list[str]:
    """Note the functions that fused regions of a rewritten graph came out of; their names.

    Nothing is believed of them: the next compile that meets one calls it. What is noted is that this is worth while.
    """
    learned: dict[str, None] = {}
    if session.options.cache is False:
        return []
    for function in _functions_behind(module, session):
        try:
            source = examine(function)
        except Unfit:
            continue
        if any(helper in session.candidates for helper in source.functions):
            continue  # the region came out of the leaf that it calls
        KNOWN.of(source, stored=True)
        if not KNOWN.has_file(source):
            KNOWN.keep(source)
            learned[function.__qualname__] = None
    return list(learned)


def _functions_behind(module: fx.GraphModule, session: Session) -> Iterator[types.FunctionType]:
    places = {frame for node in _regions(module) for frame in frames_of(node)}
    for function in session.functions:
        code = function.__code__
        few = code.co_argcount + code.co_kwonlyargcount < _FEWEST_PARAMETERS
        if few or function in session.candidates or code.co_varnames[0] in ("self", "cls"):
            continue
        last = max((line for *_, line in code.co_lines() if line), default=code.co_firstlineno)
        lines = [line for file, line, name in places if (file, name) == (code.co_filename, code.co_name)]
        if any(code.co_firstlineno <= line <= last for line in lines):
            yield function


def _regions(module: fx.GraphModule) -> Iterator[fx.Node]:
    for child in module.modules():
        if isinstance(child, fx.GraphModule):
            for node in child.graph.nodes:
                if str(node.target).startswith(tuple(f"k31.{name}." for name in OPERATORS)):
                    yield node
