"""Sums of products in a graph, whatever their spelling, and how deep they lie above a node."""

from collections.abc import Callable, Iterable

from torch import fx

from k31compile.graph.dataflow import ATEN, Dataflow
from k31compile.graph.sizes import is_tensor, numel_of, shape_of

_PRODUCTS = {
    ATEN.matmul.default,
    ATEN.mm.default,
    ATEN.bmm.default,
    ATEN.baddbmm.default,
    ATEN.addmm.default,
    ATEN.einsum.default,
    ATEN.linear.default,
    ATEN.mv.default,
    ATEN.dot.default,
    ATEN.inner.default,
    ATEN.tensordot.default,
    ATEN.scaled_dot_product_attention.default,
}
_SUMS = {ATEN.sum.dim_IntList, ATEN.sum.default}
_TIMES = {ATEN.mul.Tensor}


def is_contraction(node: fx.Node) -> bool:
    """Whether the node is a sum of products: a matrix product in any spelling, or `sum(a * b)`."""
    if node.target in _PRODUCTS:
        return True
    return node.target in _SUMS and isinstance(node.args[0], fx.Node) and _is_product(node.args[0])


def _is_product(node: fx.Node) -> bool:
    factors = [a for a in node.args if isinstance(a, fx.Node) and is_tensor(a)]
    return node.target in _TIMES and len(factors) == 2


def operands(node: fx.Node) -> list[fx.Node]:
    """The tensor operands of a contraction."""
    if node.target in _SUMS and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    if node.target is ATEN.einsum.default:
        return [a for a in node.args[1] if isinstance(a, fx.Node)]  # type: ignore[union-attr]
    return [a for a in node.args if isinstance(a, fx.Node) and is_tensor(a)]


def contracted_sizes(node: fx.Node) -> list[int]:
    """The sizes that a contraction may sum over."""
    if node.target is ATEN.einsum.default:
        inputs, _, output = str(node.args[0]).replace(" ", "").partition("->")
        letters = dict(
            pair
            for names, operand in zip(inputs.split(","), operands(node), strict=True)
            if "." not in names
            for pair in zip(names, shape_of(operand), strict=True)
        )
        return [size for letter, size in letters.items() if letter not in output]
    if node.target in _SUMS:
        source, dims = operands_source(node), node.args[1] if len(node.args) > 1 else None
        shape = shape_of(source)
        return [shape[d] for d in dims] if isinstance(dims, list | tuple) else [numel_of(source)]
    first = operands(node)[:1]
    return [shape_of(first[0])[-1]] if first and shape_of(first[0]) else []


def operands_source(node: fx.Node) -> fx.Node:
    """The product that a sum of products sums."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source


def contractions_at_depth(
    flow: Dataflow, start: fx.Node, depth: int, inside: Callable[[fx.Node], bool] = lambda _: True
) -> set[fx.Node]:
    """The contractions above `start` with `depth - 1` other contractions between on their nearest path."""
    level, found = {start}, set[fx.Node]()
    seen: set[fx.Node] = set()
    for _ in range(depth):
        found = nearest_contractions(flow, level, inside) - seen
        seen |= found
        level = {source for node in found for source in operands(node)}
        if not found:
            break
    return found


def nearest_contractions(
    flow: Dataflow, starts: Iterable[fx.Node], inside: Callable[[fx.Node], bool] = lambda _: True, limit: int = 400
) -> set[fx.Node]:
    """The contractions met first on every way up from `starts`, which may be contractions themselves."""
    found: set[fx.Node] = set()
    seen: set[fx.Node] = set()
    front = list(starts)
    while front and len(seen) < limit:
        following: list[fx.Node] = []
        for node in front:
            if node in seen or node in flow.constants or not inside(node):
                continue
            seen.add(node)
            if is_contraction(node):
                found.add(node)
            else:
                following.extend(flow.inputs[node])
        front = following
    return found
