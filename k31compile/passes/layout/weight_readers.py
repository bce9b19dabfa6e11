"""Who reads a weight of a graph, and how: as the right matrix of a product, also transposed, or in another way."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from k31compile.graph.dataflow import ATEN
from k31compile.graph.sizes import is_tensor, numel_of, shape_of
from k31compile.graph.views import CASTS, COPIES, is_view

_WEIGHT_OF: dict[str, tuple[int, ...]] = {
    "aten.linear.default": (1,),
    "aten.mm.default": (1,),
    "aten.bmm.default": (1,),
    "aten.matmul.default": (1,),
    "aten.addmm.default": (2,),
    "aten.baddbmm.default": (2,),
    "aten._grouped_mm.default": (1,),
    "k31.grouped_experts.default": (3, 4, 5),
    "k31.skinny_linear.default": (1,),
    "npu.npu_grouped_matmul.default": (1,),
    "npu.npu_quant_matmul.default": (1,),
    "npu.npu_weight_quant_batchmatmul.default": (1,),
    "npu.npu_transpose_batchmatmul.default": (1,),
    "npu.npu_mm_all_reduce_base.default": (1,),
    "npu.npu_mla_prolog_v3.default": (1, 2, 4),
}
"""Operator -> positions of its arguments that are right matrices, or lists of them."""

_JOINS = {ATEN.cat.default, ATEN.stack.default, ATEN.constant_pad_nd.default, ATEN.pad.default}
_SAME = {ATEN.alias.default, ATEN.detach.default}
_LEADING = {
    ATEN.view.default, ATEN.reshape.default, ATEN._unsafe_view.default, ATEN.unsqueeze.default, ATEN.squeeze.dim,
    ATEN.squeeze.dims, ATEN.squeeze.default, ATEN.expand.default, ATEN.unflatten.int, ATEN.flatten.using_ints,
}  # fmt: skip


@dataclass(frozen=True)
class Other:
    """A reader that is no product: the node, and what it does with the weight, in words."""

    node: fx.Node
    what: str
    remedy: str


@dataclass
class Readers:
    """Everybody who reads one weight.

    Attributes:
        products: those that read it as their right matrix.
        views: views of its leading dimensions on the way to them.
        others: all other readers.
        behind: products whose right matrix is a part, a copy or a cast of it, or whose left matrix it is.

    """

    products: list[fx.Node] = field(default_factory=list)
    views: list[fx.Node] = field(default_factory=list)
    others: list[Other] = field(default_factory=list)
    behind: list[fx.Node] = field(default_factory=list)

    def add(self, more: "Readers") -> None:
        """Take the readers of another name of the same weight."""
        self.products += more.products
        self.views += more.views
        self.others += more.others
        self.behind += more.behind


def readers_of(weight: fx.Node) -> Readers:
    """Follow a weight through transposes and views to all who read it."""
    found = Readers()
    todo: list[tuple[fx.Node, list[fx.Node]]] = [(weight, [])]
    while todo:
        node, views = todo.pop()
        for user in node.users:
            if user.op == "output":
                continue
            if user.target in _SAME or swaps_last_two(user):
                todo.append((user, views))
            elif _keeps_matrices(user, node):
                todo.append((user, [*views, user]))
            elif _reads_as_weight(user, node):
                found.products.append(user)
                found.views += views
            else:
                found.others.append(_described(user, node))
                found.behind += [user] if _is_left_matrix(user, node) else _products_behind(user)
    return found


def _is_left_matrix(user: fx.Node, node: fx.Node) -> bool:
    name = str(user.target)
    multiplies = name == "aten.einsum.default" or (name.startswith("aten.") and name in _WEIGHT_OF)
    return multiplies and len(shape_of(node)) > 1


def _products_behind(node: fx.Node) -> list[fx.Node]:
    """The products that read a value made of a weight by moving, copying or casting alone."""
    found: list[fx.Node] = []
    todo, seen = [node], {node}
    while todo:
        made = todo.pop()
        if not (is_view(made) or made.target in CASTS | COPIES | _JOINS):
            continue
        for user in made.users:
            if user.op == "call_function" and _reads_as_weight(user, made):
                found.append(user)
            elif user not in seen:
                seen.add(user)
                todo.append(user)
    return found


def swaps_last_two(node: fx.Node) -> bool:
    """A transpose of the matrix, or of each matrix of a stack: products take it as a flag."""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or not is_tensor(source):
        return False
    rank = len(shape_of(source))
    if node.target in (ATEN.t.default, ATEN.numpy_T.default):
        return rank == 2
    if node.target is ATEN.mT.default:
        return True
    if node.target is ATEN.transpose.int:
        first, second = node.args[1], node.args[2]
        return isinstance(first, int) and isinstance(second, int) and {first % rank, second % rank} == _last_two(rank)
    if node.target is ATEN.permute.default:
        order: Any = node.args[1]
        return [dim % rank for dim in order] == [*range(rank - 2), rank - 1, rank - 2]
    return False


def _last_two(rank: int) -> set[int]:
    return {rank - 2, rank - 1}


def _keeps_matrices(user: fx.Node, node: fx.Node) -> bool:
    """A view that joins, splits, adds or repeats leading dimensions: each matrix stays whole."""
    if user.target not in _LEADING or not is_tensor(user):
        return False
    before, after = shape_of(node), shape_of(user)
    same_size = user.target is ATEN.expand.default or numel_of(user) == numel_of(node)
    return len(after) >= 2 and after[-2:] == before[-2:] and same_size


def _reads_as_weight(user: fx.Node, node: fx.Node) -> bool:
    if user.target is ATEN.einsum.default:
        return _is_right_matrix(user, node)
    places = _WEIGHT_OF.get(str(user.target), ())
    return bool(places) and _uses(user, node) == sum(_holds(argument, node) for argument in _arguments_at(user, places))


def _uses(user: fx.Node, node: fx.Node) -> int:
    return sum(_holds(argument, node) for argument in (*user.args, *user.kwargs.values()))


def _holds(argument: Any, node: fx.Node) -> int:
    if isinstance(argument, list | tuple):
        return sum(_holds(part, node) for part in argument)
    return int(argument is node)


def _arguments_at(user: fx.Node, places: Sequence[int]) -> Iterator[Any]:
    """The arguments at positions of the schema, given by position or by name."""
    names = [argument.name for argument in user.target._schema.arguments] if places else []  # type: ignore[union-attr]
    for place in places:
        if place < len(user.args):
            yield user.args[place]
        elif place < len(names):
            yield user.kwargs.get(names[place])


def _is_right_matrix(user: fx.Node, node: fx.Node) -> bool:
    """Whether an einsum contracts one of a weight's last two letters and hands on all others."""
    equation, operands = user.args[0], user.args[1]
    if not isinstance(equation, str) or not isinstance(operands, list | tuple) or _holds(operands, node) != 1:
        return False
    inputs, _, result = equation.replace(" ", "").partition("->")
    letters = inputs.split(",")[[operand is node for operand in operands].index(True)]
    contracted = set(letters) - set(result)
    return (
        len(letters) == len(set(letters)) >= 2
        and "." not in letters
        and len(operands) == 2
        and len(contracted) == 1
        and contracted < set(letters[-2:])
    )


def _described(user: fx.Node, node: fx.Node) -> Other:
    if user.target in CASTS:
        to = (
            str(user.meta["val"].dtype).removeprefix("torch.")
            if isinstance(user.meta.get("val"), torch.Tensor)
            else "?"
        )
        return Other(user, f"a cast to {to}", "keep it in the dtype in which the product reads it")
    if user.target in COPIES:
        return Other(user, "a copy", "leave contiguous() and clone() out: the product takes it as it is")
    if user.target in _JOINS:
        return Other(user, f"a copy by {user.target}", "keep a parameter that is joined or padded already")
    if is_view(user):
        return Other(user, "a view or a slice", "give each part a parameter of its own")
    if str(user.target) in _WEIGHT_OF or user.target is ATEN.einsum.default:
        return Other(user, f"{user.target} in another place than its right matrix", "write the product as x @ weight")
    if "embedding" in str(user.target) or str(user.target).startswith("aten.index"):
        return Other(user, f"{user.target}", "give the embedding and the product a parameter each")
    return Other(user, f"{user.target}", "give that reader a copy of its own, made once")
