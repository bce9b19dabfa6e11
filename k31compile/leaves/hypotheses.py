"""What a call may be: every way to give its tensors the roles of the delta rule, the likely ones first.

Names of parameters only decide what is tried first. What is believed is decided by calling.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from k31compile.graph.layout import Layout
from k31compile.graph.sizes import hint
from k31compile.leaves.bytecode import Unfit
from k31compile.leaves.call import Call
from k31compile.leaves.form import ROLES, Form, Operand, Result
from k31compile.leaves.source import Source
from k31compile.passes.recognise.delta_reading import LN2, plain_layouts

USUAL_NAMES = {
    "query": ("q", "query", "queries", "qs"),
    "key": ("k", "key", "keys", "ks"),
    "value": ("v", "value", "values", "vs"),
    "gate": ("g", "gate", "gates", "decay", "log_decay", "log_g", "gk", "a", "alpha", "log_alpha"),
    "beta": ("beta", "betas", "b", "write", "lr"),
    "state": ("state", "initial_state", "init_state", "s", "s0", "h", "h0", "h_0", "recurrent_state", "memory"),
}
_MOST_ROLES, _MOST_FORMS = 48, 96
_USUAL_EPS = (1e-6, 1e-5, 1e-12)
_ONES = (10007, 10009, 10037)
_UNKNOWN = Result(0, 4, "bthv", (0, 1, 2, 3), "float32", (0, 1, 2, 3))


def in_chunks(source: Source) -> bool:
    """Whether the code takes running sums, as every chunk form does and no step does."""
    return any("cumsum" in name or "cumprod" in name for name in source.names)


def roles_of(names: Sequence[str]) -> list[dict[str, str]]:
    """Role -> parameter, in the order in which to try them: usual names first, then the order of the parameters.

    Raises:
        Unfit: the rule has five operands or, with a state, six.
    """
    if len(names) not in (5, 6):
        raise Unfit(f"it takes {len(names)} tensors, where the delta rule has five or, with a state, six")
    roles = ROLES[: len(names)]

    def unusual(order: Sequence[str]) -> int:
        return sum(name.lower() not in USUAL_NAMES[role] for role, name in zip(roles, order, strict=True))

    ordered = sorted(itertools.permutations(names), key=unusual)
    return [dict(zip(roles, order, strict=True)) for order in ordered[:_MOST_ROLES]]


def forms_of(call: Call, source: Source, chunked: bool | None = None) -> Iterator[Form]:
    """Forms with their inputs' layouts, at most some dozens; what is returned is not looked at yet.

    `chunked` says which operator is asked for; None leaves it to the code.
    """
    kind = "chunk" if (in_chunks(source) if chunked is None else chunked) else "recurrent"
    shapes = {name: tuple(hint(size) for size in tensor.shape) for name, tensor in call.tensors.items()}
    found = (
        _form(f"{family}_{kind}", roles, layouts, shapes)
        for roles in roles_of(list(call.tensors))
        for family, gate in (("kda", "bthk"), ("gated_delta", "bth"))
        for layouts in _layouts(roles, shapes, gate)
    )
    yield from itertools.islice(found, _MOST_FORMS)


def _layouts(roles: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]], gate: str) -> Iterator[dict[str, Layout]]:
    """Layouts of all operands whose sizes agree."""
    shape = _told_apart({role: shapes[name] for role, name in roles.items()})
    for value in plain_layouts(shape["value"], "bthv", {}):
        known = {letter: value.size(letter, shape["value"]) for letter in "bthv"}
        for query in _vectors(shape["query"], known):
            wanted = {**known, "k": query.size("k", shape["query"])}
            if "n" in query.letters:
                wanted["n"] = query.size("n", shape["query"])
            others = [
                plain_layouts(shape["key"], query.letters, wanted),
                plain_layouts(shape["gate"], gate, wanted),
                plain_layouts(shape["beta"], "bth", wanted),
            ]
            if "state" in shape:
                others.append(plain_layouts(shape["state"], "bhkv", wanted))
            for found in itertools.product(*others):
                key, gates, beta, *state = found
                yield dict(zip(ROLES, (query, key, value, gates, beta, *state), strict=False))


def _told_apart(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Shapes with a number for each dimension of size one that all operands share: one sequence, token or head."""
    told = {role: list(shape) for role, shape in shapes.items()}
    rows = [role for role in shapes if role != "state"]
    heads = None
    for axis, number in enumerate(_ONES):
        if all(len(shapes[role]) > axis and shapes[role][axis] == 1 for role in rows):
            heads = number if axis else heads
            for role in rows:
                told[role][axis] = number
            if axis == 0 and "state" in shapes and shapes["state"][0] == 1:
                told["state"][0] = number
    # Heads stand behind tokens more often than in front, and the state has no tokens.
    for axis in range(1, len(told.get("state", ()))):
        if told["state"][axis] == 1 and heads is not None:
            told["state"][axis] = heads
    return {role: tuple(shape) for role, shape in told.items()}


def _vectors(shape: tuple[int, ...], known: Mapping[str, int]) -> list[Layout]:
    """Layouts of q and k: with the heads of v, or with a number of heads that divides it."""
    tokens = {letter: known[letter] for letter in "bth"}
    plain = list(plain_layouts(shape, "bthk", tokens))
    fewer = plain_layouts(shape, "btnk", {letter: known[letter] for letter in "bt"})
    grouped = [one for one in fewer if 1 <= one.size("n", shape) < known["h"]]
    return plain or [one for one in grouped if known["h"] % one.size("n", shape) == 0]


def _form(
    operator: str, roles: Mapping[str, str], layouts: Mapping[str, Layout], shapes: Mapping[str, tuple[int, ...]]
) -> Form:
    told = _told_apart({role: shapes[name] for role, name in roles.items()})
    heads = layouts["value"].size("h", told["value"])

    def operand(role: str) -> Operand:
        layout, shape = layouts[role], told[role]
        repeat = heads // layout.size("n", shape) if "n" in layout.letters else 1
        return Operand(roles[role], len(shape), layout.letters, layout.dims, repeat=repeat)

    operands = {role: operand(role) for role in roles}
    k, v = layouts["query"].size("k", told["query"]), layouts["value"].size("v", told["value"])
    return Form(operator, operands, _UNKNOWN, None, "tensor", 1, 1.0, 0.0, k, v)


def exponents(source: Source) -> tuple[float, ...]:
    """The units in which a function may count its gates."""
    return (1.0, LN2) if "exp2" in source.names or any("pow" in name for name in source.names) else (1.0,)


def eps_of(source: Source) -> list[float]:
    """What may stand under the root of a norm: the small numbers in the code, then the usual ones."""
    small = [x for x in source.floats if 0 < x < 1e-2 and math.isfinite(x)]
    return list(dict.fromkeys([*small, *_USUAL_EPS]))
