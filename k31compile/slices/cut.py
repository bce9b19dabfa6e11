"""Cut a function around its loop over data: the same, with a question before each statement that may begin a slice.

The question is a call of a function that answers None, so that whoever runs the code runs what its author wrote. Only
while Dynamo traces for us is the call answered otherwise: with what the slice computes.
"""

from __future__ import annotations
import __future__

import ast
import dis
import functools
import inspect
import itertools
import textwrap
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from k31compile.leaves.bytecode import all_codes, code_text
from k31compile.leaves.globals import line_of
from k31compile.slices.syntax import (
    asks_the_data,
    has_loop,
    has_private_names,
    loop_depth,
    masks_in,
    may_move,
    names_assigned_for_sure,
    names_captured,
    names_changed,
    names_needed,
    names_read,
    names_written,
    only_raises,
)

_MOST_STARTS = 16
# Over requests, tokens and heads: a rule of tokens written number by number, which no traced graph shows.
_DEEP, _FEWEST_PARAMETERS = 3, 5
_ANSWER, _FOLLOWING = "__k31_answer", "__k31_following"
_LOOPING = ("FOR_ITER", "JUMP_BACKWARD")
_FUTURES = sum({getattr(__future__, name).compiler_flag for name in __future__.all_feature_names})
_numbers = itertools.count()
_known: dict[tuple[types.CodeType, str, int], tuple[Cut | None, dict[str, Any]]] = {}


@dataclass(frozen=True)
class Slice:
    """Statements as a function of what they read; its parameters are the names, in order.

    `name` is that of the whole function, `where` the place of its loop; `whole` where the statements are all of it.
    """

    function: types.FunctionType
    parameters: tuple[str, ...]
    name: str
    where: str
    line: int
    whole: bool = False


@dataclass(frozen=True)
class Cut:
    """A function's code with the questions in it, and by the code of each question what it asks about."""

    code: types.CodeType
    slices: dict[types.CodeType, Slice]


def cut_code(function: types.FunctionType) -> Cut | None:
    """The function cut around its loop over data, or in front of loops inside loops inside loops.

    None where there is none, or where it cannot be cut safely.
    """
    code = function.__code__
    key = (code, code.co_filename, id(function.__globals__))
    if key not in _known:
        definition = _definition_of(function) if _may_loop_over_data(code) else None
        # What is kept with it keeps the globals alive, so that their identity stays theirs.
        cut = None
        if definition is not None:
            has_deep_loops = loop_depth(definition) >= _DEEP and code.co_argcount >= _FEWEST_PARAMETERS
            cutter = _Cutter(function, definition)
            cut = cutter.cut() or (cutter.ask_first() if has_deep_loops else None)
        _known[key] = (cut, function.__globals__)
    return _known[key][0]


def _may_loop_over_data(code: types.CodeType) -> bool:
    loops = any(one.opname.startswith(_LOOPING) for inner in all_codes(code) for one in dis.get_instructions(inner))
    return loops and not code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR)


def _definition_of(function: types.FunctionType) -> ast.FunctionDef | None:
    """The function's syntax, at its lines in the file; None where the source is not what was compiled."""
    code = function.__code__
    try:
        lines, first = inspect.getsourcelines(code)
        (definition,) = ast.parse(textwrap.dedent("".join(lines))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    if not isinstance(definition, ast.FunctionDef) or has_private_names(definition):
        return None
    definition.decorator_list = []
    ast.increment_lineno(definition, first - 1)
    same = _compiled(function, definition)
    return definition if same is not None and code_text(same) == code_text(code) else None


def _compiled(function: types.FunctionType, definition: ast.FunctionDef) -> types.CodeType | None:
    """The code of a definition in the place of a function."""
    code = function.__code__
    # What a method call compiles to depends on which names a module imports.
    bare = ast.Module([*_imports(code), definition], [])
    flags = code.co_flags & _FUTURES
    whole = compile(ast.fix_missing_locations(bare), code.co_filename, "exec", flags=flags, dont_inherit=True)
    found = [one for one in whole.co_consts if isinstance(one, types.CodeType) and one.co_name == definition.name]
    return found[-1] if found else None


def _imports(code: types.CodeType) -> list[ast.stmt]:
    """The imports of the file that a function stands in, those inside of functions and classes left out."""
    return list(_imports_of(code.co_filename, "".join(inspect.findsource(code)[0])))


@functools.lru_cache(maxsize=16)
def _imports_of(_: str, text: str) -> tuple[ast.stmt, ...]:
    found: list[ast.stmt] = []
    todo: list[ast.AST] = [ast.parse(text)]
    while todo:
        for node in ast.iter_child_nodes(todo.pop()):
            if isinstance(node, ast.Import | ast.ImportFrom) and getattr(node, "module", "") != "__future__":
                found.append(node)
            elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                todo.append(node)
    return tuple(found)


class _Cutter:
    """One function being cut."""

    def __init__(self, function: types.FunctionType, definition: ast.FunctionDef) -> None:
        self.function, self.definition = function, definition
        arguments = definition.args
        named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        self.parameters = {one.arg for one in [*named, arguments.vararg, arguments.kwarg] if one}
        self.locals = self.parameters | names_written([definition])
        self.slices: dict[str, Slice] = {}

    def cut(self) -> Cut | None:
        block, known, needed = _block_with_data(self.definition.body, set(self.parameters), set())
        extent = _extent(block)
        if extent is None:
            return None
        self.line = next(one.lineno for one in block[slice(*extent)] + block[extent[1] :] if has_loop(one))
        changed = self._with_questions(block, *extent, known, needed)
        if not self.slices:
            return None
        block[:] = changed
        return self._compiled_cut()

    def ask_first(self) -> Cut | None:
        """The function with one question in front, about all of it."""
        arguments = self.definition.args
        if arguments.vararg or arguments.kwarg or not all(may_move(one, last=True) for one in self.definition.body):
            return None
        named = [one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        name, place = f"__k31_slice_{next(_numbers)}", self.definition.body[0]
        where = f"{line_of(self.function)}"
        self.slices = {name: Slice(self.function, tuple(named), self.function.__qualname__, where, place.lineno, True)}
        given = ", ".join(named)
        self.definition.body[:0] = _parse(
            f"def {name}({given}):\n    return None\n"
            f"{_ANSWER} = {name}({given})\n"
            f"if {_ANSWER} is not None:\n    return {_ANSWER}",
            place,
        )
        return self._compiled_cut()

    def _compiled_cut(self) -> Cut | None:
        code = _compiled(self.function, self.definition)
        plain = self.function.__code__
        if code is None or (code.co_freevars, code.co_cellvars) != (plain.co_freevars, plain.co_cellvars):
            return None
        code = code.replace(co_qualname=plain.co_qualname)
        questions = {inner.co_name: inner for inner in all_codes(code) if inner.co_name in self.slices}
        return Cut(code, {questions[name]: one for name, one in self.slices.items()})

    def _with_questions(
        self, block: list[ast.stmt], first: int, last: int, known: set[str], needed: set[str]
    ) -> list[ast.stmt]:
        """The block with each statement up to the loop behind a question."""
        begin = max(0, first - _MOST_STARTS + 1)
        out: list[ast.stmt] = [*block[:begin]]
        known = known | names_assigned_for_sure(out)
        out += _parse(f"{_ANSWER} = {_FOLLOWING} = None", block[begin])
        ends = _ends(block, last)
        for i in range(begin, last + 1):
            if i <= first:
                for end in ends:
                    later = names_needed(block[end:]) | needed
                    out += self._question(block[i:end], later, known, follows=end > last + 1)
            out += _unless_known(_ANSWER, block[i])
            known = known | names_assigned_for_sure([block[i]])
        following = _unless_known(_FOLLOWING, block[last + 1]) if last + 2 in ends else block[last + 1 : last + 2]
        return [*out, *following, *block[last + 2 :]]

    def _question(self, inside: list[ast.stmt], needed: set[str], known: set[str], *, follows: bool) -> list[ast.stmt]:
        """Ask whether these statements may be replaced; nothing where they are no function of what they read."""
        returns = isinstance(inside[-1], ast.Return) and inside[-1].value is not None
        if not all(may_move(statement, last=returns) for statement in inside):
            return []
        read = sorted(names_read(inside) & self.locals)
        before = [name for name in read if name in known]
        unknown = set(read) - known - names_written(inside)
        captured = names_captured(self.definition, inside[0].lineno)
        made = sorted(names_written(inside) & (needed | captured))
        if unknown or names_changed(inside) & set(before) or len(made) != (0 if returns else 1):
            return []
        name = f"__k31_slice_{next(_numbers)}"
        arguments = ", ".join(before)
        self.slices[name] = Slice(
            self._function(name, before, inside, made),
            tuple(before),
            self.function.__qualname__,
            f"{line_of(self.function).rpartition(':')[0]}:{self.line}",
            inside[0].lineno,
        )
        also = f"{_FOLLOWING} = " if follows else ""
        then = f"return {_ANSWER}" if returns else f"{also}{made[0]} = {_ANSWER}"
        return _parse(
            f"if {_ANSWER} is None:\n"
            f"    def {name}({arguments}):\n        return None\n"
            f"    {_ANSWER} = {name}({arguments})\n"
            f"    if {_ANSWER} is not None:\n        {then}",
            inside[0],
        )

    def _function(
        self, name: str, parameters: Sequence[str], inside: Sequence[ast.stmt], made: Sequence[str]
    ) -> types.FunctionType:
        """The statements as a function in the globals of the whole."""
        (definition,) = _parse(f"def {name}({', '.join(parameters)}):\n    pass", inside[0])
        assert isinstance(definition, ast.FunctionDef)
        definition.body = [*inside, *(_parse(f"return {made[0]}", inside[-1]) if made else [])]
        code = _compiled(self.function, definition)
        assert code is not None
        return types.FunctionType(code, self.function.__globals__, self.function.__name__)


def _block_with_data(
    body: list[ast.stmt], known: set[str], needed: set[str]
) -> tuple[list[ast.stmt], set[str], set[str]]:
    """The innermost list of statements that has all of the loop, what is assigned before it and needed after it."""
    masks = masks_in(body)
    asking = [i for i, statement in enumerate(body) if asks_the_data(statement, masks)]
    if len(asking) == 1 and isinstance(body[asking[0]], ast.If | ast.With):
        inner = body[asking[0]]
        before, after = names_assigned_for_sure(body[: asking[0]]), names_needed(body[asking[0] + 1 :])
        lists = [part for part in (inner.body, getattr(inner, "orelse", [])) if part]  # type: ignore[attr-defined]
        holding = [part for part in lists if any(asks_the_data(one, masks) for one in part)]
        if len(holding) == 1:
            return _block_with_data(holding[0], known | before, needed | after)
    return body, known, needed


def _extent(block: Sequence[ast.stmt]) -> tuple[int, int] | None:
    """The first and the last statement that depend on the data where one of them loops; None where none does."""
    masks = masks_in(block)
    asking = [i for i, one in enumerate(block) if asks_the_data(one, masks) and not only_raises(one)]
    if not asking:
        return None
    first, last = asking[0], asking[-1]
    counted = names_written(block[first : last + 1])
    for i in range(last + 1, len(block)):
        depends = counted & names_needed([block[i]])
        if has_loop(block[i]) and depends:
            last = i
            counted |= names_written([block[i]])
        elif not depends:
            counted -= names_assigned_for_sure([block[i]])
    looping = any(has_loop(statement) for statement in block[first : last + 1])
    return (first, last) if looping else None


def _ends(block: Sequence[ast.stmt], last: int) -> list[int]:
    """Where a slice may end: after its loop, after an assignment that follows it, as a cast, or with the function."""
    ends = [last + 1]
    if last + 1 < len(block) and isinstance(block[last + 1], ast.Assign):
        ends.append(last + 2)
    if last + 1 < len(block) and isinstance(block[-1], ast.Return):
        ends.append(len(block))
    return ends


def _unless_known(name: str, statement: ast.stmt) -> list[ast.stmt]:
    """A statement that is left out where an answer stands for it."""
    guarded = _parse(f"if {name} is None:\n    pass", statement)
    assert isinstance(guarded[0], ast.If)
    guarded[0].body = [statement]
    return guarded


def _parse(text: str, place: ast.AST) -> list[ast.stmt]:
    """Statements of ours, told to stand where one of the author's stands."""
    body = ast.parse(text).body
    for statement in body:
        for part in ast.walk(statement):
            if isinstance(part, ast.stmt | ast.expr | ast.arg):
                ast.copy_location(part, place)
    return body
