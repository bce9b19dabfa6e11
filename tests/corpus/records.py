"""What is written down about each program of the corpus, and the decorators that do it.

A program names its arguments and its results by the names of `operands` and `definitions`, each with a layout after
the last underscore where it is not the usual one: `q_bhtd`, `state_vk`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Program:
    """A plain function of tensors, the operator that it is (or is not), and how to call and to judge it.

    `options` go to the operator's definition; `updates` maps an argument that is written in place to the result
    that it holds afterwards; `lengths` are the numbers of tokens T to run it at.
    """

    fn: Callable
    operator: str
    arguments: tuple[str, ...]
    results: tuple[str, ...]
    phase: str
    lengths: tuple[int, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    updates: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self):
        return self.fn.__name__

    @property
    def peculiar(self):
        """The line that says what is peculiar about it."""
        return (self.fn.__doc__ or "").strip()


@dataclass(frozen=True)
class Spelling(Program):
    """The operator in somebody's words: `counts` of the operators that it should become.

    `half`: it also takes bfloat16 streams. `ordered`: it lists the best expert first. `breaks`: Dynamo cannot take it
    as one graph, because its shapes or its branches depend on the data.
    """

    counts: Mapping[str, int] = field(default_factory=dict)
    half: bool = False
    ordered: bool = True
    breaks: bool = False


@dataclass(frozen=True)
class NearMiss(Program):
    """Almost the operator: on the operands named here the operator would compute something else.

    `right`: the results that it would get right all the same. `served_by` says from which other operands, or with
    what behind it, the operator could rightly serve the whole.
    """

    right: tuple[str, ...] = ()
    served_by: str = ""

    @property
    def excluded(self):
        """The operator can serve nothing of it (a window of past inputs is a slice, no work): it must not appear."""
        return not self.served_by and all(name.startswith("conv_state") for name in self.right)


SPELLINGS: dict[str, Spelling] = {}
NEAR_MISSES: dict[str, NearMiss] = {}


def speller(operator, **usual):
    """The decorator for spellings of one operator, with what most of them share."""

    def spelling(**more):
        facts = {"counts": {operator: 1}} | usual | more
        return lambda fn: _keep(SPELLINGS, Spelling(fn, operator, **_read(facts)))

    return spelling


def misser(operator, **usual):
    """The decorator for near misses of one operator, with what most of them share."""

    def near_miss(**more):
        return lambda fn: _keep(NEAR_MISSES, NearMiss(fn, operator, **_read(usual | more)))

    return near_miss


def _read(facts):
    return facts | {key: tuple(facts[key].split()) for key in ("arguments", "results", "right") if key in facts}


def _keep(table, program):
    if program.name in SPELLINGS or program.name in NEAR_MISSES:
        raise ValueError(f"two programs of the corpus are named {program.name!r}")
    table[program.name] = program
    return program.fn
