"""Slices while Dynamo traces for the backend k31: functions with a loop over data are traced as they were cut.

Their questions (see `cut`) are answered here, with the operator where the slice is confirmed, else with None, and then
Dynamo meets what the author wrote.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._dynamo.variables import ConstantVariable, NestedUserFunctionVariable, UserFunctionVariable
from torch._dynamo.variables.builder import wrap_fx_proxy

from k31compile.leaves.bytecode import Unfit
from k31compile.leaves.confirm import Denied
from k31compile.leaves.situation import refuse_situation
from k31compile.slices.call import SliceCall
from k31compile.slices.confirm import NoExperts, confirm_slice
from k31compile.slices.counting import check_numbers
from k31compile.slices.cut import Cut, Slice, cut_code
from k31compile.slices.form import Form
from k31compile.slices.held import Held
from k31compile.slices.leaf import SliceLeaf
from k31compile.slices.reach import Reach, are_distinct, value_of

AnswerWhole = Callable[[Slice, Any, Mapping[str, Any]], Any]

_confirmed: dict[str, Form] = {}
_denied: dict[str, Denied] = {}


@dataclass
class Cuts:
    """The functions of one frame with a loop over data, by their code, and why loops of theirs were not replaced."""

    by_code: Mapping[types.CodeType, Cut]
    refusals: dict[str, Unfit | Denied] = field(default_factory=dict)

    @property
    def reasons(self) -> dict[str, str]:
        """Why loops were not replaced, by where they are."""
        return {where: str(refusal) for where, refusal in self.refusals.items()}

    @staticmethod
    def of(functions: Iterable[types.FunctionType], with_experts: bool) -> Cuts:
        """The cuts of those functions that can be cut; of experts' loops only where they are asked for."""
        cuts = {function.__code__: cut_code(function) for function in functions}
        found = {code: cut for code, cut in cuts.items() if cut is not None}
        wanted = {code for code, cut in found.items() if with_experts or all(one.whole for one in cut.slices.values())}
        return Cuts({code: cut for code, cut in found.items() if code in wanted})

    def code(self, code: types.CodeType) -> types.CodeType:
        """What to trace for some code."""
        cut = self.by_code.get(code)
        return code if cut is None else cut.code

    def question(self, code: types.CodeType) -> Slice | None:
        """The slice that a question asks about."""
        found = (cut.slices[code] for cut in self.by_code.values() if code in cut.slices)
        return next(found, None)


@contextmanager
def answering(cuts: Cuts, answer_whole: AnswerWhole) -> Iterator[None]:
    """Trace functions as they were cut, and answer their questions, while Dynamo traces inside the block.

    `answer_whole` answers for a function that is asked about as a whole: what it computes, or None.
    """
    if not cuts.by_code:
        yield
        return
    plain_code = UserFunctionVariable.get_code

    def get_code(self: Any) -> types.CodeType:
        return cuts.code(plain_code(self))

    def call_function(self: Any, tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        one = cuts.question(self.get_code())
        if one is None:
            return plain_call(self, tx, args, kwargs)
        arguments = dict(zip(one.parameters, args, strict=True))
        if one.whole:
            return answer_whole(one, tx, arguments) or ConstantVariable.create(None)
        return _answer(cuts, one, tx, arguments)

    own_call = NestedUserFunctionVariable.__dict__.get("call_function")
    plain_call = NestedUserFunctionVariable.call_function
    UserFunctionVariable.get_code = get_code  # type: ignore[method-assign]
    NestedUserFunctionVariable.call_function = call_function  # type: ignore[method-assign]
    try:
        yield
    finally:
        UserFunctionVariable.get_code = plain_code  # type: ignore[method-assign]
        if own_call is None:
            del NestedUserFunctionVariable.call_function
        else:
            NestedUserFunctionVariable.call_function = own_call  # type: ignore[method-assign]


def _answer(cuts: Cuts, one: Slice, tx: Any, arguments: Mapping[str, Any]) -> Any:
    try:
        call = _seen(one, arguments)
        form = _form_of(call)
        answer = _put(one, tx, call, form, arguments)
        cuts.refusals.pop(one.where, None)
        return answer
    except NoExperts:
        return ConstantVariable.create(None)
    except (Unfit, Denied) as refusal:
        known = cuts.refusals.get(one.where)
        if not isinstance(known, Denied) or _depth(refusal) > known.trials:
            cuts.refusals[one.where] = refusal
        return ConstantVariable.create(None)


def _depth(refusal: Unfit | Denied) -> int:
    """How much was found to agree before a refusal: of the slices around one loop the one that came furthest says most.

    Of equals the first does: those after it hold more of what is around the loop.
    """
    return refusal.trials if isinstance(refusal, Denied) else -2


def _seen(one: Slice, arguments: Mapping[str, Any]) -> SliceCall:
    values = {name: value_of(variable, name) for name, variable in arguments.items()}
    held = Held.of(values, one.function.__code__)
    refuse_situation(held.tensors.values())
    if any(0 in tensor.shape for tensor in held.tensors.values()):
        raise Unfit("it is called with no tokens")
    distinct = frozenset(
        (name,)
        for name, value in values.items()
        if isinstance(value, torch.Tensor) and are_distinct(arguments[name].realize().as_proxy().node)
    )
    return SliceCall(one, held, distinct)


def _form_of(call: SliceCall) -> Form:
    key = call.key()
    if key in _denied:
        raise Denied(str(_denied[key]), _denied[key].trials)
    if key not in _confirmed:
        try:
            _confirmed[key] = confirm_slice(call)
        except Denied as denial:
            _denied[key] = denial
            raise
    return _confirmed[key]


def _put(one: Slice, tx: Any, call: SliceCall, form: Form, arguments: Mapping[str, Any]) -> Any:
    tensors = call.held.tensors
    lead = tuple(tensors[form.x].shape[:-1])
    if not form.fits(lead):
        raise Unfit(f"it was confirmed for tokens {form.only} alone, and this call has {lead}")
    check_numbers(call, form.counted, tensors[form.x])
    reach = Reach(tx, arguments)
    reach.guard(call)
    leaf = SliceLeaf(one.name, one.where, call.key(), form)
    proxies = tuple(reach.at(place).as_proxy() for place in form.places)
    return wrap_fx_proxy(tx=tx, proxy=tx.output.create_proxy("call_function", leaf.target(), proxies, {}))
