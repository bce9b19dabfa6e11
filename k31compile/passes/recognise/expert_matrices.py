"""Which matrices are whose: one stack [E, a, b] for all experts, or E matrices [a, b] of a Python list.

The matrices of a list are ordered by the experts' numbers where the graph compares with them, else as they are used;
both are proposals, which a confirmation checks for every expert.
"""

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import fx

from k31compile.graph.constants import COMPARISONS
from k31compile.graph.dataflow import Dataflow
from k31compile.graph.sizes import is_float, is_integer, shape_of
from k31compile.graph.views import CASTS, behind_views_and_casts, is_view
from k31compile.passes.recognise.expert_ends import is_far_above

# A stack alone, or each expert's matrix in the order of the experts.
Matrices = tuple[fx.Node, ...]

_PARTS = (2, 3)


def shape_of_all(matrices: Matrices) -> tuple[int, ...]:
    """[E, a, b] of a stack or of a list."""
    shape = shape_of(matrices[0])
    return shape if len(shape) == 3 else (len(matrices), *shape)


def single_matrices(flow: Dataflow) -> set[fx.Node]:
    """Tensors of the caller with the rank of one expert's matrix."""

    def find() -> set[fx.Node]:
        return {node for node in flow.nodes if node.op == "placeholder" and is_float(node) and len(shape_of(node)) == 2}

    return flow.remember("single matrices", find)


def shared_factors(flow: Dataflow) -> set[fx.Node]:
    """What products take beside two or more single matrices: the tokens that several experts read."""
    singles = single_matrices(flow)

    def find() -> set[fx.Node]:
        partners: dict[fx.Node, set[fx.Node]] = {}
        for node in flow.nodes:
            inputs = flow.inputs[node] if node.op == "call_function" else []
            for factor in inputs:
                beside = {behind_views_and_casts(other) for other in inputs if other is not factor} & singles
                for one in _with_sources(factor) if beside else ():
                    partners.setdefault(one, set()).update(beside)
        return {node for node, beside in partners.items() if len(beside) > 1}

    return flow.remember("shared factors", find)


def _with_sources(node: fx.Node) -> Iterator[fx.Node]:
    """The node and what it is a view or a cast of."""
    yield node
    while (is_view(node) or node.target in CASTS) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
        yield node


def is_single_matrix(flow: Dataflow, anchor: fx.Node, node: fx.Node) -> bool:
    """Whether the node may be one expert's matrix: neither the tokens nor the weights of the choices."""
    return node in single_matrices(flow) and node not in shared_factors(flow) and shape_of(node) != shape_of(anchor)


def body_above(
    flow: Dataflow, anchor: fx.Node, out: fx.Node, inside: Collection[fx.Node], weights: Collection[fx.Node]
) -> tuple[set[fx.Node], list[fx.Node]]:
    """What lies between tokens, choices and `out` where each expert is written out, and the matrices in it."""
    shared, single, pairs = shared_factors(flow), single_matrices(flow), shape_of(anchor)

    def is_leaf(node: fx.Node) -> bool:
        if node is anchor or node in weights or node in single or is_far_above(flow, anchor, node):
            return True
        if node in inside or not is_float(node):
            return False
        shape = shape_of(node)
        return shape == pairs or (node in shared and shape[:-1] == pairs[:-1])

    reached = flow.ancestors([out], stop=is_leaf)
    body = {node for node in reached if not is_leaf(node)} - flow.constants
    found = (node for node in reached if is_single_matrix(flow, anchor, node) and node not in weights)
    return body, flow.in_order(found)


def comparisons_with(anchor: fx.Node, nodes: Collection[fx.Node]) -> dict[fx.Node, float]:
    """Comparisons of the experts with plain numbers, each with its number."""
    found = {}
    for node in nodes:
        if getattr(node.target, "__name__", "").partition(".")[0] not in COMPARISONS or len(node.args) != 2:
            continue
        tensor, number = node.args
        if isinstance(tensor, fx.Node) and type(number) in (int, float) and is_made_of(tensor, anchor):
            found[node] = number
    return found  # type: ignore[return-value]


def has_arithmetic(anchor: fx.Node, nodes: Collection[fx.Node]) -> bool:
    """Whether other integers are made of the experts' numbers one by one."""
    return any(
        is_integer(node) and is_elementwise(node) and any(is_made_of(source, anchor) for source in node.all_input_nodes)
        for node in nodes
    )


def is_elementwise(node: fx.Node) -> bool:
    """Whether the node computes element by element; a cast does not."""
    operator = node.target
    known = isinstance(operator, torch._ops.OpOverload) and operator not in CASTS
    return known and torch.Tag.pointwise in operator.tags  # type: ignore[union-attr]


def is_made_of(node: fx.Node, anchor: fx.Node) -> bool:
    """Whether the node is a view or a cast of the anchor."""
    return anchor in _with_sources(node)


def below_comparisons(flow: Dataflow, anchor: fx.Node, inside: Collection[fx.Node]) -> dict[fx.Node, float]:
    """Each node made from comparisons, with the number of the one that stands last in the graph."""
    numbers = comparisons_with(anchor, inside)
    latest: dict[fx.Node, fx.Node] = {}
    for node in flow.in_order(inside):
        sources = [latest[source] for source in flow.inputs[node] if source in latest]
        if node in numbers:
            latest[node] = node
        elif sources:
            latest[node] = max(sources, key=flow.position.__getitem__)
    return {node: numbers[comparison] for node, comparison in latest.items()}


def orders_of(
    flow: Dataflow,
    anchor: fx.Node,
    inside: Collection[fx.Node],
    body: Collection[fx.Node],
    matrices: Sequence[fx.Node],
) -> list[tuple[Matrices, ...]]:
    """Every way to order the matrices of lists: for each projection those of experts 0, 1, ...

    One matrix may be that of several experts, where the experts' numbers tell them apart.
    """
    used = sorted(matrices, key=lambda node: min(map(flow.position.__getitem__, flow.users[node]), default=-1))
    ways = [_by_number(flow, used, below_comparisons(flow, anchor, inside), body), *_by_use(used)]
    found = dict.fromkeys(tuple(zip(*experts, strict=True)) for experts in ways if _are_alike(experts))
    return list(found)


def _by_use(used: Sequence[fx.Node]) -> Iterator[list[list[fx.Node]]]:
    """The matrices of each expert as they come in the graph: expert after expert, or one projection after the other."""
    groups: dict[tuple[int, ...], list[fx.Node]] = {}
    for matrix in used:
        groups.setdefault(shape_of(matrix), []).append(matrix)
    for parts, alternate in itertools.product(_PARTS, (True, False)):
        count = len(used) // parts
        if count < 1 or len(used) % parts or any(len(group) % count for group in groups.values()):
            continue
        lists: list[list[fx.Node]] = []
        for group in groups.values():
            each = len(group) // count
            lists += [group[i::each] if alternate else group[i * count : (i + 1) * count] for i in range(each)]
        yield [list(matrices) for matrices in zip(*lists, strict=True)]


def _by_number(
    flow: Dataflow, used: Sequence[fx.Node], numbers: Mapping[fx.Node, float], body: Collection[fx.Node]
) -> list[list[fx.Node]]:
    """The matrices of each expert: those that meet the comparison with its number first; nothing where one has none."""
    owned: dict[float, list[tuple[int, fx.Node]]] = {}
    for matrix in used:
        found = {(flow.position[user], n) for user in flow.users[matrix] for n in _met(flow, user, numbers, body)}
        if not found:
            return []
        for position, number in found:
            owned.setdefault(number, []).append((position, matrix))
    if sorted(owned) != list(range(len(owned))):
        return []
    return [[matrix for _, matrix in sorted(owned[number], key=lambda pair: pair[0])] for number in sorted(owned)]


def _met(
    flow: Dataflow, start: fx.Node, numbers: Mapping[fx.Node, float], body: Collection[fx.Node]
) -> Iterator[float]:
    """The numbers of the comparisons that the node's value meets first, on any way through the body."""
    inside = flow.descendants([start], stop=lambda node: node in numbers or node not in body)
    return (numbers[node] for node in inside if node in numbers and node in body)


def _are_alike(experts: Sequence[Sequence[fx.Node]]) -> bool:
    """Whether there are several experts, each with two or three matrices of the same shapes."""
    shapes = {tuple(shape_of(matrix) for matrix in matrices) for matrices in experts}
    return len(experts) > 1 and len(shapes) == 1 and len(experts[0]) in _PARTS


def are_only_compared(anchor: fx.Node, nodes: Collection[fx.Node]) -> bool:
    """Whether all that reads the experts compares them with plain numbers."""
    compared = comparisons_with(anchor, nodes)
    for node in nodes:
        moves = is_view(node) or node.target in CASTS
        reads = any(is_made_of(source, anchor) for source in node.all_input_nodes)
        if reads and node not in compared and not (moves and is_made_of(node, anchor)):
            return False
    return True
