"""Reading bytecode: the globals that it names, what in it changes the world, and a text of it without line numbers."""

from __future__ import annotations

import dis
import types
from collections.abc import Iterable, Iterator
from typing import Any


class Unfit(Exception):
    """A function, or a call of one, that cannot be a leaf; the text is a reason for a user."""


IMPURE = {
    "STORE_GLOBAL": "writes the global",
    "DELETE_GLOBAL": "deletes the global",
    "STORE_ATTR": "sets the attribute",
    "DELETE_ATTR": "deletes the attribute",
    "IMPORT_NAME": "imports, while it runs,",
}
"""Instructions that reach outside of a function, and how a reason says it."""

RANDOM = frozenset(
    [
        "bernoulli",
        "bernoulli_",
        "cauchy_",
        "exponential_",
        "geometric_",
        "log_normal_",
        "manual_seed",
        "multinomial",
        "normal",
        "normal_",
        "poisson",
        "rand",
        "rand_like",
        "randint",
        "randint_like",
        "randn",
        "randn_like",
        "random_",
        "randperm",
        "rrelu",
        "seed",
        "uniform_",
    ]
)
# Not is_exporting: an export never comes here, so that its answer is the same in a confirmation and in a compile.
SITUATION = frozenset(
    [
        "are_deterministic_algorithms_enabled",
        "backends",
        "device_count",
        "get_autocast_dtype",
        "get_default_device",
        "get_default_dtype",
        "get_deterministic_debug_mode",
        "get_float32_matmul_precision",
        "get_num_interop_threads",
        "get_num_threads",
        "is_anomaly_enabled",
        "is_autocast_enabled",
        "is_available",
        "is_compiling",
        "is_deterministic_algorithms_warn_only_enabled",
        "is_dynamo_compiling",
        "is_grad_enabled",
        "is_inference_mode_enabled",
        "is_scripting",
        "is_torchdynamo_compiling",
        "is_tracing",
        "set_default_dtype",
        "set_grad_enabled",
    ]
)


def all_codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A code object and those inside it: lambdas, comprehensions, inner functions."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from all_codes(constant)


def instructions(code: types.CodeType) -> Iterator[dis.Instruction]:
    """The instructions of one code object."""
    return dis.get_instructions(code)


def global_paths(code: types.CodeType) -> Iterator[tuple[str, ...]]:
    """Each global that the code reads, with the attributes read of it at once: ("torch", "linalg", "inv")."""
    path: tuple[str, ...] = ()
    for instruction in instructions(code):
        if path and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            path = (*path, instruction.argval)
            continue
        if path:
            yield path
        path = (instruction.argval,) if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME") else ()
    if path:
        yield path


def code_text(code: types.CodeType) -> str:
    """All of a code object that decides what it does: no line, path or name of its own."""
    constants = [code_text(c) if isinstance(c, types.CodeType) else _constant_text(c) for c in code.co_consts]
    arguments = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    return f"{arguments}{names}{constants}{code.co_code.hex()}{code.co_exceptiontable.hex()}"


def _constant_text(value: Any) -> str:
    if isinstance(value, frozenset):
        return f"frozenset({sorted(map(repr, value))})"
    if isinstance(value, tuple):
        return f"({','.join(map(_constant_text, value))})"
    return repr(value)


def numbers_of(codes: Iterable[types.CodeType], more: Iterable[Any]) -> Iterator[int | float]:
    """The numbers among the constants of some code, and among more values."""
    todo = [*more, *(constant for code in codes for constant in code.co_consts)]
    while todo:
        value = todo.pop()
        if isinstance(value, tuple):
            todo.extend(value)
        elif type(value) in (int, float):
            yield value
