"""Which tensors of a slice may be which operand of the routed experts, by type and shape."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from k31compile.graph.sizes import hint
from k31compile.leaves.form import leaf_nodes
from k31compile.passes.recognise.experts_reading import assignments
from k31compile.slices.call import SliceCall
from k31compile.slices.form import Matrices
from k31compile.slices.held import Place

_MOST_PARTS = 3


@dataclass(frozen=True)
class Rows:
    """Tokens [.., L], their experts and weights [.., k]; `spread` where the weights are [.., E], of every expert."""

    x: Place
    experts: Place
    weights: Place
    spread: bool = False


@dataclass(frozen=True)
class Roles:
    """One way to read the places as operands."""

    rows: Rows
    gate: Matrices
    up: Matrices
    down: Matrices

    @property
    def projections(self) -> tuple[Matrices, Matrices, Matrices]:
        """Gate, up and down."""
        return self.gate, self.up, self.down


def roles_of(call: SliceCall) -> Iterator[Roles]:
    """Every way to read the tensors of a call by type and shape."""
    for rows, sources in itertools.product(_rows_of(call), _sources_of(call)):
        if rows.spread and hint(call.held.tensors[rows.weights].shape[-1]) != count_of(call, sources[0]):
            continue
        tokens = (rows.x, rows.experts, rows.weights)
        nodes = _flat_nodes(call, tokens, sources)
        nodes[rows.weights].meta["val"] = nodes[rows.experts].meta["val"].to(torch.float32)
        back = {node: place for place, node in nodes.items()}
        listed = [tuple(nodes[place] for place in source) for source in sources]
        for width in _widths_of_results(call, sources):
            result = leaf_nodes({"out": 2})["out"]
            result.meta["val"] = torch.empty((1, width), device="meta")
            given = [nodes[rows.x], nodes[rows.weights]]
            for read in assignments(given, nodes[rows.experts], listed, result, start=None):
                if read.x is nodes[rows.x]:
                    parts = (read.gate, read.up, read.down)
                    yield Roles(
                        rows, *(Matrices(tuple(back[n] for n in p.source), p.transposed, p.half) for p in parts)
                    )


def has_rows(call: SliceCall) -> bool:
    """Whether tokens, their experts and weights are among the tensors."""
    return next(_rows_of(call), None) is not None


def _flat_nodes(
    call: SliceCall, tokens: Sequence[Place], sources: Sequence[tuple[Place, ...]]
) -> Mapping[Place, fx.Node]:
    """A node for each place, tokens in one dimension."""
    places = [*tokens, *(place for source in sources for place in source)]
    nodes = leaf_nodes({f"t{i}": 2 for i in range(len(places))})
    for place, node in zip(places, nodes.values(), strict=True):
        shape = _sizes(call.held.tensors[place])
        flat = (math.prod(shape[:-1]), shape[-1]) if place in tokens else shape
        node.meta["val"] = torch.empty(flat, dtype=call.held.tensors[place].dtype, device="meta")
    return dict(zip(places, nodes.values(), strict=True))


def _widths_of_results(call: SliceCall, sources: Sequence[tuple[Place, ...]]) -> dict[int, None]:
    return dict.fromkeys(size for source in sources for size in _sizes(call.held.tensors[source[0]])[-2:])


def _rows_of(call: SliceCall) -> Iterator[Rows]:
    """Every way to tell the tensors apart that are given for each token."""
    tensors = call.token_tensors()
    for experts, index in tensors.items():
        if index.is_floating_point() or index.dtype == torch.bool or index.dim() not in (2, 3):
            continue
        for weights, x in itertools.permutations(tensors, 2):
            if not tensors[weights].is_floating_point() or not tensors[x].is_floating_point():
                continue
            if tensors[x].dim() not in (2, 3) or _tokens(tensors[x]) != _tokens(index):
                continue
            if _sizes(tensors[weights]) == _sizes(index):
                yield Rows(x, experts, weights)
            elif _sizes(tensors[weights])[:-1] == _sizes(index)[:-1] and experts in call.distinct:
                yield Rows(x, experts, weights, spread=True)


def count_of(call: SliceCall, source: tuple[Place, ...]) -> int:
    """How many experts a stack, or a list of matrices, is for."""
    return len(source) if len(source) > 1 else hint(call.held.tensors[source[0]].shape[0])


def _sources_of(call: SliceCall) -> Iterator[list[tuple[Place, ...]]]:
    """Every set of two or three stacks, or lists of matrices, for equally many experts; those of one owner first."""
    given = call.token_tensors()
    sources: dict[tuple[Place, int], list[tuple[Place, ...]]] = {}
    lists: dict[tuple[Place, Place], dict[int, Place]] = {}
    for place, tensor in call.held.tensors.items():
        if tensor.is_floating_point() and tensor.dim() == 3 and (place not in given or _is_weight(call, place)):
            sources.setdefault((place[:-1], hint(tensor.shape[0])), []).append((place,))
        for i, step in enumerate(place):
            if isinstance(step, int) and tensor.is_floating_point() and tensor.dim() == 2:
                lists.setdefault((place[:i], place[i + 1 :]), {})[step] = place
    for (owner, _), members in lists.items():
        count = len(members)
        alike = len({_sizes(call.held.tensors[place]) for place in members.values()}) == 1
        if count > 1 and alike and sorted(members) == list(range(count)):
            sources.setdefault((owner if len(owner) > 1 else (), count), []).append(
                tuple(members[i] for i in range(count))
            )
    for found in sources.values():
        if len(found) in (2, _MOST_PARTS):
            yield found
    whole: dict[int, list[tuple[Place, ...]]] = {}
    for (_, count), found in sources.items():
        whole.setdefault(count, []).extend(found)
    for found in whole.values():
        if len(found) in (2, _MOST_PARTS) and found not in sources.values():
            yield found


def _is_weight(call: SliceCall, place: Place) -> bool:
    """Whether a stack that is given by itself is none of the tokens [B, T, L]."""
    tensor = call.held.tensors[place]
    rows = {_tokens(other) for p, other in call.token_tensors().items() if not other.is_floating_point()}
    return _tokens(tensor) not in rows


def _sizes(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(hint(size) for size in tensor.shape)


def _tokens(tensor: torch.Tensor) -> int:
    count = 1
    for size in tensor.shape[:-1]:
        count *= hint(size)
    return count
