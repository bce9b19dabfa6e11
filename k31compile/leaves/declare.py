"""`k31compile.equivalent(fn, name)`: a function that a user declares an operator, confirmed before it is believed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from k31compile.errors import EquivalenceError, UsageError
from k31compile.leaves.bytecode import Unfit
from k31compile.leaves.call import Call
from k31compile.leaves.candidates import declare
from k31compile.leaves.confirm import Denied, confirm_call
from k31compile.leaves.form import OPERATORS
from k31compile.leaves.globals import line_of
from k31compile.leaves.hypotheses import USUAL_NAMES
from k31compile.leaves.source import Source, examine

_SIZES = {"b": 2, "t": 23, "h": 3, "k": 7, "v": 11}
_PRESETS: tuple[tuple[tuple[str, ...], Any], ...] = (
    (("scale", "sm_scale", "scaling"), _SIZES["k"] ** -0.5),
    (("chunk_size", "chunk", "block_size", "bt"), 16),
    (("output_final_state", "return_state", "return_final_state", "output_state"), True),
)


def equivalent(fn: Callable[..., Any], name: str) -> None:
    """Declare that a function computes an operator; from then on its calls are that operator for backend "k31".

    The function is called on samples before it is believed, now and again for the sizes of each model. Its parameters
    may be called and ordered in any way; heads and tokens may stand in either order.

    Args:
        fn: a Python function of q, k, v, a gate, beta and perhaps a state; it must depend on nothing else.
        name: kda_chunk, kda_recurrent, gated_delta_chunk or gated_delta_recurrent.

    Raises:
        UsageError: a name that cannot be declared.
        EquivalenceError: the function computes something else, with the difference and the sample that showed it; or it
            changes its arguments, reads what may change, or draws random numbers.

    """
    if name not in OPERATORS:
        raise UsageError(f"a function cannot be declared as {name!r}", hint=f"declarable: {', '.join(OPERATORS)}")
    title, where = getattr(fn, "__qualname__", repr(fn)), line_of(fn)
    try:
        source = examine(fn)
        _confirm_any(source, name)
    except (Unfit, Denied) as refusal:
        raise EquivalenceError(f"{title} is not {name}: {refusal}", where=where) from None
    declare(source.functions[0], name)


def _confirm_any(source: Source, name: str) -> None:
    """Confirm the function in one of the usual layouts; raise the reason of the one that came furthest."""
    furthest: Denied | None = None
    for call in _calls(source, name):
        try:
            form = confirm_call(call, source, name.endswith("chunk"))
        except Denied as denied:
            furthest = max(furthest or denied, denied, key=lambda d: d.trials)
            continue
        if form.operator != name:
            raise Denied(f"it is {form.operator}")
        return
    raise furthest or Denied("its parameters cannot be told apart as q, k, v, gate, beta and state")


def _calls(source: Source, name: str) -> Iterator[Call]:
    """Calls with the operator's tensors in the usual layouts: tokens before heads, heads before tokens, one token."""
    roles, constants = _bound(source)
    for layout in ("bth", "bht", "bh"):
        shapes = {
            "query": f"{layout}k",
            "key": f"{layout}k",
            "value": f"{layout}v",
            "gate": layout if name.startswith("gated_delta") else f"{layout}k",
            "beta": layout,
            "state": "bhkv",
        }
        for state in ("bhkv", "bhvk"):
            tensors = {
                parameter: torch.empty([_SIZES[x] for x in (state if role == "state" else shapes[role])])
                for role, parameter in roles.items()
            }
            yield Call.of(source.functions[0], (), {**tensors, **constants})
            if "state" not in roles:
                break


def _bound(source: Source) -> tuple[dict[str, str], dict[str, Any]]:
    """Which parameter holds which operand, by usual names and else by order; constants for those that need one."""
    parameters = inspect.signature(source.functions[0]).parameters
    constants = {name: value for name in parameters for names, value in _PRESETS if name.lower() in names}
    free = [name for name in parameters if name not in constants]
    roles: dict[str, str] = {}
    for role, names in USUAL_NAMES.items():
        found = [name for name in free if name.lower() in names]
        if found:
            roles[role] = found[0]
            free.remove(found[0])
    free = [name for name in free if _needs_a_value(parameters, name)]
    for role in [role for role in USUAL_NAMES if role not in roles and role != "state"] + ["state"]:
        if role not in roles and free:
            roles[role] = free.pop(0)
    if free:
        raise Denied(f"nothing is known to give for its parameter {free[0]}; a default would do")
    return roles, constants


def _needs_a_value(parameters: Mapping[str, inspect.Parameter], name: str) -> bool:
    parameter = parameters[name]
    return parameter.default is parameter.empty and parameter.kind not in (
        parameter.VAR_KEYWORD,
        parameter.VAR_POSITIONAL,
    )
