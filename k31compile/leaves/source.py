"""What a function is, beyond its name: bytecode, constants, and all that it reads, its helpers' included.

A function is fit to be a leaf when nothing but its arguments decides what it returns. Whatever it reads from outside is
part of its identity and is guarded while a compiled graph lives.
"""

from __future__ import annotations

import hashlib
import types
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from k31compile.leaves.bytecode import (
    IMPURE,
    RANDOM,
    SITUATION,
    Unfit,
    all_codes,
    code_text,
    global_paths,
    instructions,
    numbers_of,
)
from k31compile.leaves.globals import is_added_method, is_constant, is_trusted, look_up, place_of


@dataclass(frozen=True)
class Read:
    """One value that a function reads from outside; `owner` is the position in `Source.functions` of who reads it.

    `path` begins with the name of the global; what it led to is a helper, a module or a constant.
    """

    owner: int
    path: tuple[str, ...]
    value: Any


@dataclass(frozen=True)
class Source:
    """A function with its helpers: equal digests compute the same.

    Attributes:
        functions: the function itself, then its helpers in the order of their first use.
        reads: what they read from outside, for guards.
        digest: a hash over all of it; line numbers, paths and names of files are not in it.
        integers: the whole numbers in the code and the defaults, at which behaviour may change.
        floats: its other numbers.
        names: every name that the code mentions.
        is_opaque: whether it calls what the digest does not tell: an operator that is neither torch's nor ours, or a
            function or method that somebody put into torch.

    """

    functions: tuple[types.FunctionType, ...]
    reads: tuple[Read, ...]
    digest: str
    integers: frozenset[int]
    floats: tuple[float, ...]
    names: frozenset[str]
    is_opaque: bool = False


def examine(function: Any) -> Source:
    """What a function and its helpers are and read.

    Raises:
        Unfit: something other than its arguments may decide what it returns, or it changes something; the text says
            what, where the code says so.
    """
    if not isinstance(function, types.FunctionType):
        raise Unfit(f"it is a {type(function).__name__}, not a Python function")
    functions, reads, texts = [function], list[Read](), list[str]()
    position, is_opaque = 0, False
    while position < len(functions):
        current = functions[position]
        _refuse_what_shows(current)
        texts.append(_own_text(current))
        for path in sorted(set(_paths(current))):
            found = look_up(current, path)
            if found is None:
                continue
            if isinstance(found.value, types.FunctionType) and found.kind == "helper":
                if found.value not in functions:
                    functions.append(found.value)
                texts.append(f"{'.'.join(path)}=helper {functions.index(found.value)}")
            else:
                texts.append(f"{'.'.join(path)}={found.text}")
            is_opaque |= found.is_opaque
            reads.append(Read(position, found.path, found.value))
        position += 1
    codes = [code for one in functions for code in all_codes(one.__code__)]
    outside = [read.value for read in reads if is_constant(read.value)]
    numbers = list(numbers_of(codes, [*outside, *(value for one in functions for value in defaults_of(one).values())]))
    return Source(
        tuple(functions),
        tuple(reads),
        hashlib.sha256("\x1f".join(texts).encode()).hexdigest(),
        frozenset(number for number in numbers if isinstance(number, int)),
        tuple(number for number in numbers if isinstance(number, float)),
        frozenset(name for code in codes for name in (*code.co_names, *code.co_varnames)),
        is_opaque or any(is_added_method(name) for code in codes for name in code.co_names),
    )


def defaults_of(function: types.FunctionType) -> dict[str, Any]:
    """The defaults of a function by parameter."""
    code, values = function.__code__, function.__defaults__ or ()
    positional = code.co_varnames[: code.co_argcount]
    by_position = zip(positional[len(positional) - len(values) :], values, strict=True)
    return {**dict(by_position), **(function.__kwdefaults__ or {})}


def _paths(function: types.FunctionType) -> Iterable[tuple[str, ...]]:
    for code in all_codes(function.__code__):
        yield from global_paths(code)


def _own_text(function: types.FunctionType) -> str:
    defaults = sorted((name, repr(value)) for name, value in defaults_of(function).items())
    return f"{code_text(function.__code__)}|{defaults}"


def _refuse_what_shows(function: types.FunctionType) -> None:
    """Raise Unfit for what the bytecode alone tells."""
    where = place_of(function)
    code = function.__code__
    if code.co_freevars:
        raise Unfit(f"{where} reads {code.co_freevars[0]}, a variable of the function around it")
    if code.co_flags & (0x20 | 0x80 | 0x200):  # generator, coroutine, asynchronous generator
        raise Unfit(f"{where} is a generator or a coroutine")
    for name, value in defaults_of(function).items():
        if not is_constant(value):
            raise Unfit(f"the default of {name} in {where} is a {type(value).__name__}, which may change")
    for inner in all_codes(code):
        for instruction in instructions(inner):
            if instruction.opname == "IMPORT_NAME" and is_trusted(instruction.argval):
                continue
            if instruction.opname in IMPURE:
                raise Unfit(f"{where} {IMPURE[instruction.opname]} {instruction.argval}")
        for names, deed in ((RANDOM, "draws random numbers with"), (SITUATION, "asks how it is called, with")):
            found = [name for name in inner.co_names if name in names]
            if found:
                raise Unfit(f"{where} {deed} {found[0]}")
