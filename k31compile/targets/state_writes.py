"""Let an operator that carries a state write the next one where the last one lies.

The passes' graph is functional: an operator gives a new state, which is copied into the input that holds the old one,
or put into the rows of a pool that the old one was gathered from. The in-place form reads and writes the state once.

Before:

    before = aten.index(pool, [rows])
    output, new = k31.kda_recurrent(..., before)
    aten.copy_(pool, aten.index_put(pool, [rows], new))

After:

    output = k31.kda_recurrent_(..., pool, rows=rows)

Left as it is where anybody else wants the new state, where the old one is read afterwards, or where the two lie in
memory in different orders.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import getitem
from typing import Any

import torch
from torch import fx

import k31compile.kernels  # noqa: F401  (registers the operators)
from k31compile.graph.dataflow import ATEN, Dataflow
from k31compile.graph.sizes import expression_of, is_integer, value_of
from k31compile.graph.views import may_alias

K31 = torch.ops.k31


@dataclass(frozen=True)
class _Form:
    """An in-place form: which argument and which result of the functional operator are the state."""

    target: Any
    state: int
    result: int


_FORMS = {
    K31.kda_recurrent.default: _Form(K31.kda_recurrent_.default, 5, 1),
    K31.mega_kda.default: _Form(K31.mega_kda_.default, 7, 2),
}


@dataclass(frozen=True)
class _Update:
    """A state's way: from `pool` (its `rows`, if any) into `call`, and by `written` back into it."""

    call: fx.Node
    form: _Form
    pool: fx.Node
    rows: fx.Node | None
    written: list[fx.Node]


def update_states_in_place(module: fx.GraphModule) -> int:
    """Put in-place forms where a state is read from an input and its successor written to it; return how many."""
    graph = module.graph
    flow = Dataflow(graph)
    updates = [
        update
        for target, form in _FORMS.items()
        for call in graph.find_nodes(op="call_function", target=target)
        if (update := _find(flow, call, form)) is not None
    ]
    for update in updates:
        _write_in_place(graph, update)
    module.recompile()
    return len(updates)


def _find(flow: Dataflow, call: fx.Node, form: _Form) -> _Update | None:
    """How a call's state comes from an input and goes back to it; None where that is not all that happens to it."""
    state = call.args[form.state] if len(call.args) > form.state else None
    new = [user for user in call.users if user.target is getitem and user.args[1] == form.result]
    if not isinstance(state, fx.Node) or len(new) != 1:
        return None
    read, written = _rearranged(state), list(_users_of_one(new[0]))
    source, copy = read[0], written[-1]
    pool = copy.args[0]
    if copy.target is not ATEN.copy_.default or not isinstance(pool, fx.Node) or pool.op != "placeholder":
        return None
    put = written[-2] if written[-2].target is ATEN.index_put.default else None
    rows = _rows_of(pool, source, put)
    if (rows is None) != (source is pool and put is None):
        return None
    stored = written[: -1 if put is None else -2]
    is_stored = put is None or put.args[2] is stored[-1]
    if copy.args[1] is not written[-2] or not is_stored:
        return None
    if not _is_same_in_memory(pool, state, rows) or not _keeps_order(read) or not _keeps_order(stored):
        return None
    is_whole = _sizes(stored[-1], from_first_wide=True) == _sizes(state, from_first_wide=True)
    is_whole = is_whole and value_of(new[0]).dtype == value_of(pool).dtype
    return _Update(call, form, pool, rows, written) if is_whole and _is_dead(flow, pool, call, written) else None


def _users_of_one(node: fx.Node) -> Iterator[fx.Node]:
    """A value and what is made of it, step by step, as long as nobody else uses it; up to a copy into an input."""
    yield node
    while len(node.users) == 1 and node.target is not ATEN.copy_.default:
        node = next(iter(node.users))
        yield node


def _rows_of(pool: fx.Node, source: fx.Node, put: fx.Node | None) -> fx.Node | None:
    """The rows of a pool that states are gathered from and put back into; None where these are not the same."""
    if put is None or source.target is not ATEN.index.Tensor or source.args[0] is not pool or put.args[0] is not pool:
        return None
    gathered, indices = source.args[1], put.args[1]
    if len(put.args) != 3 or put.kwargs or not isinstance(indices, list | tuple) or len(indices) != 1:
        return None
    (rows,) = indices
    if list(gathered) != [rows] or not isinstance(rows, fx.Node):  # type: ignore[arg-type]
        return None
    if value_of(rows).dim() != 1 or not is_integer(rows):
        return None
    return rows


def _is_same_in_memory(pool: fx.Node, state: fx.Node, rows: fx.Node | None) -> bool:
    """Whether an operator can take the pool for the state, or for a pool of such states."""
    first = 0 if rows is None else 1
    rank = value_of(state).dim()
    return (
        value_of(pool).dim() == rank
        and _sizes(pool)[first:] == _sizes(state)[first:]
        and str(value_of(pool).stride(-1)) == "1"
    )


def _sizes(node: fx.Node, from_first_wide: bool = False) -> list[str]:
    """Sizes as text, since comparing symbols would fix them; those of one at the beginning can be left out."""
    sizes = [str(expression_of(size)) if isinstance(size, torch.SymInt) else str(size) for size in value_of(node).shape]
    while from_first_wide and sizes and sizes[0] == "1":
        del sizes[0]
    return sizes


_RESHAPES = {
    ATEN.view.default,
    ATEN.reshape.default,
    ATEN._unsafe_view.default,
    ATEN.squeeze.dim,
    ATEN.squeeze.dims,
    ATEN.squeeze.default,
    ATEN.unsqueeze.default,
    ATEN.flatten.using_ints,
    ATEN.unflatten.int,
    ATEN.clone.default,
    ATEN.contiguous.default,
    ATEN.alias.default,
    ATEN.detach.default,
}
_MOVES = {ATEN.permute.default, ATEN.transpose.int}


def _rearranged(node: fx.Node) -> list[fx.Node]:
    """What a value was before its elements were rearranged, all of them, and the steps since."""
    chain = [node]
    while chain[0].target in _RESHAPES | _MOVES and isinstance(chain[0].args[0], fx.Node):
        chain.insert(0, chain[0].args[0])
    return chain


def _keeps_order(chain: Sequence[fx.Node]) -> bool:
    """Whether the elements at the end of a chain of rearrangements stand as at its beginning, but for sizes of one."""
    labels: list[int | None] = [None if size == "1" else i for i, size in enumerate(_sizes(chain[0]))]
    first = [label for label in labels if label is not None]
    for before, node in pairwise(chain):
        if node.target is ATEN.permute.default:
            labels = [labels[dim] for dim in node.args[1]]  # type: ignore[index, union-attr]
        elif node.target is ATEN.transpose.int:
            one, other = node.args[1:]
            labels[one], labels[other] = labels[other], labels[one]  # type: ignore[index]
        elif node.target in _RESHAPES and _wide(before) == _wide(node):
            kept = iter([label for label in labels if label is not None])
            labels = [None if size == "1" else next(kept) for size in _sizes(node)]
        elif node.target is not ATEN.copy.default or node.args[1] is not before or _sizes(node) != _sizes(before):
            return False
    return [label for label in labels if label is not None] == first


def _wide(node: fx.Node) -> list[str]:
    return [size for size in _sizes(node) if size != "1"]


def _is_dead(flow: Dataflow, pool: fx.Node, call: fx.Node, written: Sequence[fx.Node]) -> bool:
    """Whether nobody but the writes looks at a pool from the call on, be it through a view that was made before."""
    aliases, todo = set[fx.Node](), [pool]
    while todo:
        alias = todo.pop()
        aliases.add(alias)
        todo += [user for user in flow.users[alias] if may_alias(user) and user not in aliases]
    here, state = flow.position[call], call.args[_FORMS[call.target].state]  # type: ignore[index]
    if any(operand in aliases and operand is not state for operand in call.all_input_nodes):
        return False
    return all(
        user is call or user in written or user.op == "output" or flow.position[user] < here
        for alias in aliases
        for user in alias.users
    )


def _write_in_place(graph: fx.Graph, update: _Update) -> None:
    call, form = update.call, update.form
    args = list(call.args)
    args[form.state] = update.pool
    kwargs = dict(call.kwargs) if update.rows is None else {**call.kwargs, "rows": update.rows}
    with graph.inserting_before(call):
        step = graph.call_function(form.target, tuple(args), kwargs)
    step.meta = dict(call.meta)
    others = [value for i, value in enumerate(value_of(call)) if i != form.result]
    step.meta["val"] = others[0] if len(others) == 1 else tuple(others)
    # What reads the updated input reads the input itself.
    update.written[-1].replace_all_uses_with(update.pool)
    for node in reversed(update.written):
        graph.erase_node(node)
    for result in list(call.users):
        if len(others) == 1:
            result.replace_all_uses_with(step)
            graph.erase_node(result)
        else:
            result.args = (step, result.args[1])
    read = _rearranged(call.args[form.state])  # type: ignore[arg-type]
    graph.erase_node(call)
    for node in reversed(read):
        if not node.users and node.op != "placeholder":
            graph.erase_node(node)
