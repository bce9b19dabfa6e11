"""Equal layers: where one region was found, the leaves of its equals follow from a walk beside it, without a cut."""

from collections.abc import Sequence
from typing import Any

from torch import fx

from k31compile.graph.dataflow import Dataflow
from k31compile.graph.region import Region


def find_equal_region(flow: Dataflow, known: Region, outputs: Sequence[fx.Node]) -> Region | None:
    """The region above `outputs` that computes what `known` computes, node by node; None where there is none.

    The walk only finds the leaves; that the two are equal, sizes and constants included, the hashes say.
    """
    leaves = _walk(flow, known, outputs)
    if leaves is None:
        return None
    try:
        region = Region.between(flow, leaves, outputs)
    except ValueError:
        return None
    return region if region.canonical_hash == known.canonical_hash else None


def _walk(flow: Dataflow, known: Region, outputs: Sequence[fx.Node]) -> list[fx.Node] | None:
    """The counterparts of the known leaves, from the outputs upwards through equal operators."""
    if len(outputs) != len(known.outputs):
        return None
    inner, leaves = set(known.nodes), set(known.leaves)
    counterpart: dict[fx.Node, fx.Node] = {}
    todo = list(zip(known.outputs, outputs, strict=True))
    while todo:
        old, new = todo.pop()
        if old in counterpart:
            if counterpart[old] is not new:
                return None
            continue
        if old not in inner and old not in leaves:
            continue  # it lends a shape, which the hash compares
        counterpart[old] = new
        if old in leaves:
            continue
        if new not in flow.position or old.op != new.op or (old.target != new.target and old.op == "call_function"):
            return None
        if not _pair((old.args, old.kwargs), (new.args, new.kwargs), todo):
            return None
    return [counterpart[leaf] for leaf in known.leaves] if leaves <= counterpart.keys() else None


def _pair(old: Any, new: Any, pairs: list[tuple[fx.Node, fx.Node]]) -> bool:
    """Whether two arguments have one structure; the nodes in them are put into `pairs`."""
    if isinstance(old, fx.Node):
        if isinstance(new, fx.Node):
            pairs.append((old, new))
            return True
        return False
    if isinstance(old, list | tuple):
        same = isinstance(new, list | tuple) and len(old) == len(new)
        return same and all(_pair(a, b, pairs) for a, b in zip(old, new, strict=True))
    if isinstance(old, dict):
        return old.keys() == new.keys() and all(_pair(old[key], new[key], pairs) for key in old)
    return type(old) is type(new) and bool(old == new)
