"""Where a sum of experts ends, what it starts from, and what in it no operator has."""

from collections.abc import Collection, Iterator, Sequence

from torch import fx

from k31compile.graph.confirm import Mismatch
from k31compile.graph.dataflow import ATEN, Dataflow
from k31compile.graph.sizes import is_float, is_integer, numel_of, shape_of
from k31compile.graph.views import CASTS, behind_views_and_casts, is_view

_MOST_EXITS = 4
_WINDOW = 800
_MOST_ROWS = 256
_ADDITIONS = {
    ATEN.add.Tensor,
    ATEN.sub.Tensor,
    ATEN.index_add.default,
    ATEN.scatter_add.default,
    ATEN.index_put.default,
}


def is_pairs(flow: Dataflow, node: fx.Node) -> bool:
    """Whether the node may name the experts of each token: integers [N, k], or [B, T, k] as they were first."""
    if not is_integer(node) or node in flow.constants or len(shape_of(node)) not in (2, 3):
        return False
    return len(shape_of(node)) == 2 or _is_first(flow, node)


def _is_first(flow: Dataflow, node: fx.Node) -> bool:
    """Whether no smaller integers, nor rows of another length, were made into these: one-hot rows are no choices."""
    smaller = (is_integer(source) and numel_of(source) < numel_of(node) for source in flow.inputs[node])
    source = integers_behind(node)
    while source is not None:
        if shape_of(source)[-1:] != shape_of(node)[-1:]:
            return False
        source = integers_behind(source)
    return not any(smaller)


def integers_behind(node: fx.Node) -> fx.Node | None:
    """The integers that a view or a cast was made from, where they are the same and all of them."""
    if not (is_view(node) or node.target in CASTS) or not node.args:
        return None
    source = node.args[0]
    same = isinstance(source, fx.Node) and is_integer(source) and numel_of(source) == numel_of(node)
    return source if same and isinstance(source, fx.Node) else None


def is_row(anchor: fx.Node, node: fx.Node) -> bool:
    """Whether the node has a row of floats for each token that the anchor names experts of."""
    return is_float(node) and shape_of(node)[:-1] == shape_of(anchor)[:-1] != ()


def nearest_exits(flow: Dataflow, anchor: fx.Node) -> list[fx.Node]:
    """Rows of floats, one for each token, that everything made from the experts goes through, the nearest first."""
    found = []
    for node in flow.post_dominators(anchor):
        if is_row(anchor, node):
            found.append(node)
        if len(found) == _MOST_EXITS:
            break
    return found


def rows_below(flow: Dataflow, anchor: fx.Node) -> list[fx.Node]:
    """Rows below the experts within a window, the last first: where one router has several sets of experts.

    Rows behind another choice are another layer's, and their number is no router's business.
    """
    near: set[fx.Node] = {anchor}
    front = [anchor]
    while front and len(near) < _WINDOW:
        front = [user for node in front for user in flow.users[node] if user not in near]
        near.update(front)
    chosen = {node for node in near & other_choices(flow) if shape_of(node) != shape_of(anchor)}
    near -= flow.descendants(chosen, stop=lambda node: node not in near)
    rows = [node for node in near if is_row(anchor, node) and node in flow.live and shape_of(node) != shape_of(anchor)]
    return flow.in_order(rows)[::-1] if len(rows) <= _MOST_ROWS else []


def is_far_above(flow: Dataflow, anchor: fx.Node, node: fx.Node) -> bool:
    """Whether the node was computed so long before the choice that a search for matrices need not go past it."""
    return node.op == "call_function" and flow.position[node] < flow.position[anchor] - _WINDOW


def other_choices(flow: Dataflow) -> set[fx.Node]:
    """Softmaxes, and choices of the best: no expert's product holds one."""
    targets = {ATEN.softmax.int, ATEN._softmax.default, ATEN.topk.default, ATEN.scaled_dot_product_attention.default}
    return flow.remember("other choices", lambda: {node for node in flow.nodes if node.target in targets})


def is_addition(node: fx.Node) -> bool:
    """Whether the node adds rows to rows."""
    return node.target in _ADDITIONS


def starts_of(flow: Dataflow, out: fx.Node, inside: Collection[fx.Node]) -> tuple[fx.Node, ...]:
    """What the experts' rows are added to that is not made of them: a shared expert, the tokens themselves."""
    shape = shape_of(out)
    found = (
        source
        for node in flow.in_order(inside)
        if is_addition(node) and shape_of(node) == shape
        for source in flow.inputs[node]
        if source not in inside and source not in flow.constants and is_float(source) and shape_of(source) == shape
    )
    return tuple(dict.fromkeys(found))


def refuse_biases(flow: Dataflow, body: Collection[fx.Node], matrices: Sequence[fx.Node], count: int) -> None:
    """Raise Mismatch where the experts have vectors of their own."""
    sizes = {size for matrix in matrices for size in shape_of(matrix)}
    for bias in _vectors(flow, body, count):
        if shape_of(bias)[-1] in sizes:
            raise Mismatch(
                f"its experts have vectors of their own, as biases are ({bias.name} {list(shape_of(bias))}); "
                "the operator's have none"
            )


def _vectors(flow: Dataflow, body: Collection[fx.Node], count: int) -> Iterator[fx.Node]:
    """Tensors of the caller that hold one vector, or one for each expert, and are read by some nodes."""
    read = {behind_views_and_casts(source) for reader in body for source in flow.inputs[reader]}
    for node in flow.in_order(read):
        shape = shape_of(node)
        is_own = node.op == "placeholder" and is_float(node) and node not in flow.constants
        if is_own and (len(shape) == 1 or (len(shape) == 2 and shape[0] == count)):
            yield node
