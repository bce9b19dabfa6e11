"""Which functions of a frame are worth a confirmation: those of a shipped name, learned ones, declared ones."""

from __future__ import annotations

import types
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

from k31compile.leaves.bytecode import Unfit
from k31compile.leaves.known import KNOWN
from k31compile.leaves.source import Source, examine

SHIPPED = frozenset(
    [
        "chunk_gated_delta_rule",
        "chunk_gated_delta_rule_ref",
        "chunk_kda",
        "chunk_kda_ref",
        "chunk_kimi_delta_attention",
        "fused_recurrent_gated_delta_rule",
        "fused_recurrent_kda",
        "gated_delta_chunk",
        "gated_delta_recurrent",
        "kda_chunk",
        "kda_recurrent",
        "naive_chunk_gated_delta_rule",
        "naive_chunk_kda",
        "naive_recurrent_gated_delta_rule",
        "naive_recurrent_kda",
        "recurrent_gated_delta_rule",
        "recurrent_gated_delta_rule_ref",
        "recurrent_kda",
        "recurrent_kda_ref",
        "recurrent_kimi_delta_attention",
        "torch_chunk_gated_delta_rule",
        "torch_chunk_kda",
        "torch_recurrent_gated_delta_rule",
        "torch_recurrent_kda",
    ]
)
"""Names that published code gives to the delta rule. A name makes a candidate and nothing more."""

_DECLARED: weakref.WeakKeyDictionary[types.FunctionType, str] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Candidate:
    """A function that may become a leaf.

    `why` is shipped, learned, declared or nested loops; `operator` what a declaration said.
    """

    function: types.FunctionType
    why: str
    source: Source | None
    unfit: str = ""
    operator: str = ""


def declare(function: types.FunctionType, operator: str) -> None:
    """Make a function a candidate in this process, whatever its name."""
    _DECLARED[function] = operator


def candidates_of(functions: Iterable[types.FunctionType], stored: bool) -> dict[types.FunctionType, Candidate]:
    """The candidates among some functions."""
    learned = KNOWN.names() if stored else set()
    found: dict[types.FunctionType, Candidate] = {}
    for function in functions:
        name = function.__code__.co_name
        if function in _DECLARED or name in SHIPPED or name in learned:
            candidate = _candidate(function, name)
            if candidate is not None:
                found[function] = candidate
    return found


def _candidate(function: types.FunctionType, name: str) -> Candidate | None:
    operator = _DECLARED.get(function, "")
    expected = "declared" if operator else "shipped" if name in SHIPPED else ""
    try:
        source = examine(function)
    except Unfit as unfit:
        return Candidate(function, expected, None, str(unfit)) if expected else None
    if expected:
        return Candidate(function, expected, source, operator=operator)
    return Candidate(function, "learned", source) if KNOWN.has_file(source) else None
