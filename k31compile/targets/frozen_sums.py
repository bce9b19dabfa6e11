"""Let each step of attention over depth mix the frozen sums where they lie, with no mixture kept for it in float32.

A mixture is written once and read once for each token and step; that is more than a few frozen sums are, and 4 bytes
for each number of each step in memory. Nor does the bank have to be joined to one tensor.

Before:

    bank = aten.cat([first, second], 1)
    maximum, total, mixture = k31.attn_res_prepare(bank, queries)
    k31.attn_res_update(..., mixture[:, i], ...)

After:

    maximum, total, weights = k31.attn_res_prepare(first, queries, more=[second], mix=False)
    k31.attn_res_update(..., maximum, total, weights, ..., bank=[first, second], slot=i)

A small bank is joined as before: a view of each part for each step would cost more.

Left as it is where anything else reads the mixture, where there are many frozen sums, and where the kernels do not
serve: the reference would join the bank again in each step.
"""

from __future__ import annotations

import operator
from math import prod
from typing import Any

import torch
from torch import fx

import k31compile.kernels  # noqa: F401  (registers the operators)
from k31compile.graph.dataflow import ATEN
from k31compile.graph.sizes import value_of
from k31compile.kernels.registry import provider_for
from k31compile.passes.recognise.depth_additions import UPDATE
from k31compile.passes.recognise.shared_depth import PREPARE, call
from k31compile.targets.linear_products import drop_unused

_MOST_BYTES = 16  # of a column of the bank: eight sums in bfloat16, four in float32
_WORTH_VIEWS = 1 << 20  # bytes of a bank below which joining it costs less than a view of each part for each step
_MIXTURE = 4  # its place among the arguments of an update
_VIEWS = {ATEN.narrow.default, ATEN.select.int, ATEN.slice.Tensor}


def mix_where_sums_lie(module: fx.GraphModule) -> int:
    """Change each preparation of a graph and of its nested bodies that allows it, in place; returns how many."""
    graphs = [child.graph for child in module.modules() if isinstance(child, fx.GraphModule)]
    found = [
        (graph, prepare, views)
        for graph in graphs
        for prepare in graph.find_nodes(op="call_function", target=PREPARE)
        if _is_small(prepare) and (views := _views_of_mixture(prepare))
    ]
    # The kernels are asked for last: the first to ask builds them.
    if not found or not provider_for("attn_res_update").provider.startswith("cpu-"):
        return 0
    for graph, prepare, views in found:
        _mix_later(graph, prepare, views)
    drop_unused(module)
    return len(found)


def _is_small(prepare: fx.Node) -> bool:
    bank = value_of(prepare.args[0])  # type: ignore[arg-type]
    blocks, given = bank.shape[1], prepare.kwargs
    if not isinstance(blocks, int) or given.get("more") is not None or given.get("mix", True) is not True:
        return False
    return _is_readable(bank) and blocks * bank.itemsize <= _MOST_BYTES


def _is_readable(bank: torch.Tensor) -> bool:
    """Whether the kernels read a bank where it lies, so that reading it in each step copies nothing."""
    is_known = bank.dtype in (torch.float32, torch.bfloat16) and bank.device.type == "cpu"
    return is_known and str(bank.stride(-1)) == "1"


def _views_of_mixture(prepare: fx.Node) -> list[fx.Node]:
    """The mixture and all views of it, in order; none where not each of them is a view or one update's mixture."""
    views = [user for user in prepare.users if user.target is operator.getitem and user.args[1] == 2]
    for view in views:
        for user in view.users:
            if user.target in _VIEWS and user.args[1:2] == (1,) and value_of(view).dim() == 3:
                views.append(user)
            elif not _mixes(user, view):
                return []
    return views


def _mixes(user: fx.Node, mixture: fx.Node) -> bool:
    """Whether a node is an update that reads a value as its mixture and as nothing else."""
    if user.target is not UPDATE or user.kwargs.get("bank") is not None:
        return False
    places = [i for i, value in enumerate(user.args) if value is mixture]
    return places == [_MIXTURE] and mixture not in user.kwargs.values()


def _mix_later(graph: fx.Graph, prepare: fx.Node, views: list[fx.Node]) -> None:
    bank, queries = prepare.args
    parts = _parts(bank)
    more = {"more": parts[1:]} if len(parts) > 1 else {}
    with graph.inserting_before(prepare):
        weighing = call(graph, prepare, PREPARE, (parts[0], queries), {**prepare.kwargs, **more, "mix": False})
    narrow: dict[fx.Node, fx.Node] = {}
    for item in list(prepare.users):
        with graph.inserting_before(item):
            narrow[item] = call(graph, item, operator.getitem, (weighing, item.args[1]))
        if item.args[1] != 2:
            item.replace_all_uses_with(narrow[item])
    for view in views:
        if view.target in _VIEWS:
            with graph.inserting_before(view):
                narrow[view] = call(graph, view, view.target, (narrow[view.args[0]], *view.args[1:]))  # type: ignore[index]
        for update in [user for user in view.users if user.target is UPDATE]:
            update.update_arg(_MIXTURE, narrow[view])
            update.update_kwarg("bank", parts)
            _name_slot(update)


def _name_slot(update: fx.Node) -> None:
    """Give an update what was prepared for all queries and say which is meant, in the place of a view of each."""
    (maximum, slot), *others = (_slot_of(value) for value in update.args[2:5])
    if update.kwargs.get("slot") is not None or slot is None or any(other != slot for _, other in others):
        return
    prepared = [maximum, *(item for item, _ in others)]
    if len({item.args[0] for item in prepared}) == 1:
        update.args = (*update.args[:2], *prepared, *update.args[5:])
        update.update_kwarg("slot", slot)


def _slot_of(value: Any) -> tuple[Any, int | None]:
    """A result of a preparation and the query whose part of it a value is; None where it is nothing of the kind."""
    slot = 0
    while value.target in _VIEWS and value.args[1:2] == (1,):
        start, step = value.args[2], value.args[4:]
        if not isinstance(start, int) or start < 0 or step not in ((), (1,)):
            return value, None
        slot, value = slot + start, value.args[0]
    return value, slot if value.target is operator.getitem else None


def _parts(bank: Any) -> list[fx.Node]:
    """The banks that were joined for preparations alone, where they are large; else the bank itself."""
    if bank.target is not ATEN.cat.default or bank.args[1:] != (1,) or any(u.target is not PREPARE for u in bank.users):
        return [bank]
    whole, parts = value_of(bank), list(bank.args[0])
    sizes = [size for size in whole.shape if isinstance(size, int)]
    if len(sizes) == whole.dim() and prod(sizes) * whole.itemsize < _WORTH_VIEWS:
        return [bank]
    return parts if all(_is_readable(value_of(part)) for part in parts) else [bank]
