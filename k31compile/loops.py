"""A Python loop that Dynamo unrolls without end is stopped: past a node budget it runs as Python, the rest is compiled.

Dynamo has no bound of its own: a loop over 100,000 tokens is traced until memory ends. Counted are the graph nodes
that each frame makes, itself and by its calls, and how often its instructions went backwards; a loop over a model's
layers goes round too seldom to be meant.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType
from typing import Any

from torch._dynamo.exc import unimplemented
from torch._dynamo.output_graph import SubgraphTracer

from k31compile.notes import tell

MOST_LAYERS = 128
"""A loop that goes round no more often than this may be one over layers, and may be as large as it likes."""

_stopped: dict[tuple[CodeType, int], str] = {}


@dataclass
class _Frame:
    """What one frame has made so far."""

    nodes: int = 0
    rounds: int = 0
    pointer: int = -1


@contextmanager
def node_budget(count: int) -> Iterator[None]:
    """Let no unrolled loop make more than `count` nodes while Dynamo traces inside the block."""
    plain = SubgraphTracer.create_node
    frames: dict[Any, _Frame] = {}

    def create_node(self: SubgraphTracer, *args: Any, **kwargs: Any) -> Any:
        node = plain(self, *args, **kwargs)
        if node.op.startswith("call"):
            _count(self.output_graph.current_tx, frames, count)
        return node

    SubgraphTracer.create_node = create_node  # type: ignore[method-assign]
    try:
        yield
    finally:
        SubgraphTracer.create_node = plain  # type: ignore[method-assign]


def _count(translator: Any, frames: dict[Any, _Frame], budget: int) -> None:
    innermost = True
    while translator is not None and translator.instruction_pointer is not None:
        frame = frames.setdefault(translator, _Frame())
        frame.nodes += 1
        pointer = translator.instruction_pointer
        # A call that makes many nodes stands at one place; only in the innermost frame is that place a round.
        frame.rounds += pointer < frame.pointer or (innermost and pointer == frame.pointer)
        frame.pointer = pointer
        if frame.nodes > budget and frame.rounds > MOST_LAYERS:
            _stop(translator, budget)
        translator, innermost = translator.parent, False


def _stop(translator: Any, budget: int) -> None:
    code: CodeType = translator.f_code
    key = (code, budget)
    if key not in _stopped:
        where = f"{code.co_filename}:{_line_of_loop(translator)}"
        _stopped[key] = (
            f"the loop at {where} in {code.co_qualname} makes more than {budget} graph nodes when it is unrolled, so "
            "it runs as Python and what it calls is compiled by itself: write it over chunks or for the whole "
            "sequence, keep it in a function of its own, or raise option node_budget"
        )
        tell(_stopped[key])
    unimplemented(
        gb_type="k31: unrolled loop past the node budget",
        context=code.co_qualname,
        explanation=_stopped[key],
        hints=[],
    )


def _line_of_loop(translator: Any) -> int:
    """The line of the innermost `for` or `while` around the present instruction."""
    instructions, pointer = translator.instructions, translator.instruction_pointer
    offsets = {id(instruction): i for i, instruction in enumerate(instructions)}
    for i in range(min(pointer, len(instructions)) - 1, -1, -1):
        one = instructions[i]
        if one.opname == "FOR_ITER" and offsets.get(id(one.target), -1) >= pointer:
            return int(one.positions.lineno if one.positions else translator.lineno)
    for one in instructions[pointer:]:
        if "JUMP_BACKWARD" in one.opname and offsets.get(id(one.target), pointer) <= pointer:
            return int(one.target.positions.lineno if one.target.positions else translator.lineno)
    return int(translator.lineno)
