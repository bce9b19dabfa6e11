"""Leaves while Dynamo traces for the backend k31, and for nobody else.

torch's own registration, `allow_in_graph`, holds for the whole process, and its callbacks at the start of a compile do
not say for whom it is. So the function of Dynamo that compiles one frame is wrapped: it is told the backend. Around a
frame of ours the candidates are registered; around anybody else's, one inside ours too, they are not.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._dynamo import convert_frame, trace_rules
from torch._dynamo.variables import UserFunctionVariable
from torch._dynamo.variables.builder import wrap_fx_proxy
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch._subclasses.fake_tensor import FakeTensor

from k31compile.leaves.bytecode import Unfit
from k31compile.leaves.call import Call
from k31compile.leaves.candidates import Candidate, candidates_of
from k31compile.leaves.globals import line_of
from k31compile.leaves.guarding import guard_reads, install_guards
from k31compile.leaves.leaf import Leaf
from k31compile.leaves.reach import reachable
from k31compile.leaves.recall import form_of
from k31compile.leaves.situation import refuse_situation
from k31compile.leaves.source import examine
from k31compile.loops import node_budget
from k31compile.notes import telling_for
from k31compile.options import Options
from k31compile.report import Refusal
from k31compile.skipped import tell_of_skipped
from k31compile.slices.cut import Slice
from k31compile.slices.form import OPERATOR as SLICED
from k31compile.slices.hook import Cuts, answering
from k31compile.slices.reach import Reach

Handler = Callable[..., Any]


@dataclass
class Session:
    """One frame being compiled for us: its candidates, what became of them, and all functions it may call."""

    options: Options
    candidates: Mapping[types.FunctionType, Candidate]
    functions: list[types.FunctionType]
    cuts: Cuts
    refused: dict[str, Refusal] = field(default_factory=dict)

    def refuse(self, candidate: Candidate, reason: str) -> None:
        """Note why a candidate is no leaf; one that only a graph made a candidate was never expected to be one."""
        if candidate.why == "learned":
            return
        where = line_of(candidate.function)
        name = candidate.operator or "leaf"
        hint = "it was traced like any other code; the recognised rule is in docs/recognition.md, Functions"
        self.refused[where] = Refusal(
            name, f"{candidate.function.__qualname__} is not kept as a leaf: {reason}", where, hint
        )

    def refusals(self) -> list[Refusal]:
        """What was not kept whole, functions and loops over data, each with its reason."""
        hint = "it runs as it was written; the recognised loops are in docs/recognition.md, Loops over data"
        loops = [
            Refusal(SLICED, f"the loop over data is not replaced: {reason}", where, hint)
            for where, reason in self.cuts.reasons.items()
        ]
        return [*self.refused.values(), *loops]


_active: list[Session | None] = [None]
_frames = 0


def count_frames() -> int:
    """How many frames Dynamo has begun to compile in this process, for whomever."""
    return _frames


def current() -> Session | None:
    """The session of the frame that is being compiled for us, if any."""
    return _active[-1]


def install(is_ours: Callable[[Any], Mapping[str, Any] | None]) -> None:
    """Wrap Dynamo's compile of a frame, once a process; `is_ours` gives the options of a compiler of ours, or None."""
    plain = convert_frame._compile
    if hasattr(plain, "k31_plain"):
        return
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def compile_frame(*args: Any, **kwargs: Any) -> Any:
        global _frames
        _frames += 1
        frame = signature.bind(*args, **kwargs).arguments
        session = _begin(frame, is_ours(frame["compiler_fn"]))
        if session is None:
            with _session(session):
                return plain(*args, **kwargs)
        frame["code"] = session.cuts.code(frame["code"])
        with (
            _session(session),
            telling_for(frame["compiler_fn"]),
            answering(session.cuts, _answer_whole),
            node_budget(session.options.node_budget),
            tell_of_skipped(frame["code"], lambda: session.cuts.reasons),
        ):
            return plain(**frame)

    compile_frame.k31_plain = plain  # type: ignore[attr-defined]
    convert_frame._compile = compile_frame


def _begin(frame: Mapping[str, Any], options: Mapping[str, Any] | None) -> Session | None:
    if options is None:
        return None
    try:
        chosen = Options.from_mapping(options)
    except Exception:
        return None  # the backend says what is wrong with them
    functions = list(reachable(frame["code"], frame["globals"], frame["locals"], frame["closure"] or ()))
    own = types.FunctionType(frame["code"], frame["globals"], closure=frame["closure"] or None)
    cuts = Cuts.of([own, *functions], with_experts=chosen.fuses(SLICED))
    return Session(chosen, candidates_of(functions, chosen.cache is not False), functions, cuts)


@contextmanager
def _session(session: Session | None) -> Iterator[None]:
    """Register this session's candidates, those of the session around it withdrawn, and put everything back."""
    around = _active[-1]
    if around is None and session is None:
        yield
        return
    _withdraw(around)
    _register(session)
    _active.append(session)
    try:
        yield
    finally:
        _active.pop()
        _withdraw(session)
        _register(around)


def _register(session: Session | None) -> None:
    for function in session.candidates if session else ():
        # What is allowed already is the user's own choice.
        if not trace_rules.is_callable_allowed(function) and not trace_rules.is_callable_disallowed(function):
            trace_rules._allowed_callable_ids.add(id(function))
            TorchInGraphFunctionVariable._get_handlers()[function] = _call


def _withdraw(session: Session | None) -> None:
    handlers = TorchInGraphFunctionVariable._get_handlers()
    for function in session.candidates if session else ():
        if handlers.get(function) is _call:
            del handlers[function]
            trace_rules._allowed_callable_ids.remove(id(function))


def _call(variable: Any, tx: Any, /, *args: Any, **kwargs: Any) -> Any:
    """What Dynamo does at a call of a candidate: one node where the call is confirmed, else what it would do anyway."""
    session = current()
    candidate = session.candidates[variable.value] if session else None
    if session and candidate and variable.source is not None:
        try:
            leaf, seen = _leaf_for(session, candidate, args, kwargs)
            assert candidate.source is not None
            install_guards(variable.source, candidate.source)
            return _put_leaf(tx, leaf, seen)
        except Unfit as unfit:
            session.refuse(candidate, str(unfit))
    return _inlined(variable, tx, args, kwargs)


@dataclass
class _Seen:
    call: Call
    proxies: dict[str, Any]


def _seen(candidate: Candidate, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Seen:
    """A call as Dynamo sees it, its tensors as fake ones."""
    if candidate.unfit or candidate.source is None:
        raise Unfit(candidate.unfit)
    proxies: list[tuple[torch.Tensor, Any]] = []

    def value(argument: Any) -> Any:
        argument = argument.realize()
        if argument.is_python_constant():
            return argument.as_python_constant()
        if not argument.is_tensor():
            raise Unfit(
                f"an argument is a {type(argument).__name__.removesuffix('Variable')}, neither tensor nor constant"
            )
        proxy = argument.as_proxy()
        example = proxy.node.meta["example_value"]
        if not isinstance(example, FakeTensor):
            raise Unfit(f"an argument is a {type(example).__name__}")
        proxies.append((example, proxy))
        return example

    call = Call.of(candidate.function, [value(a) for a in args], {name: value(a) for name, a in kwargs.items()})
    refuse_situation(call.tensors.values())
    by_identity = {id(example): proxy for example, proxy in proxies}
    return _Seen(call, {name: by_identity[id(tensor)] for name, tensor in call.tensors.items()})


def _leaf_for(
    session: Session, candidate: Candidate, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Leaf, _Seen]:
    """The confirmed leaf of a call that is wanted; raises Unfit where there is none."""
    seen = _seen(candidate, args, kwargs)
    form, remembered = form_of(candidate, seen.call, stored=session.options.cache is not False)
    if not session.options.fuses(form.operator):
        raise Unfit(f"{form.operator} is left out by options['fuse']")
    return Leaf(seen.call, form, candidate, remembered), seen


def _put_leaf(tx: Any, leaf: Leaf, seen: _Seen) -> Any:
    proxies = tuple(seen.proxies[name] for name in seen.call.tensors)
    return wrap_fx_proxy(tx=tx, proxy=tx.output.create_proxy("call_function", leaf.target(), proxies, {}))


def _answer_whole(one: Slice, tx: Any, arguments: Mapping[str, Any]) -> Any:
    """One node for a function of many loops, where it is confirmed, whatever its name; else None."""
    session = current()
    if session is None or one.function in session.candidates:
        return None
    try:
        source = examine(one.function)
        leaf, seen = _leaf_for(session, Candidate(one.function, "nested loops", source), (), arguments)
        guard_reads(Reach(tx, arguments).global_named, source)
        return _put_leaf(tx, leaf, seen)
    except Unfit:
        return None


def _inlined(variable: Any, tx: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Trace into the function, by the rule that Dynamo has for it without us."""
    function = variable.value
    session = current()
    with _session(None):
        kind: Any = trace_rules.lookup(function) or UserFunctionVariable
        if variable.source is None:
            plain = UserFunctionVariable(function)
        else:
            plain = kind.create_with_source(function, source=variable.source)
    assert current() is session
    return plain.call_function(tx, list(args), kwargs)
