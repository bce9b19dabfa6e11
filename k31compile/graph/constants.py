"""The plain numbers in a region's arithmetic: a confirmation at smaller sizes must still reach beyond each of them.

A window of 64 keys cannot be told from no window by samples of 40 keys.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from torch import fx

from k31compile.graph.dataflow import ATEN
from k31compile.graph.region import attribute_of

# Their numbers are dimensions, sizes and counts of elements, which the leaves' own sizes decide.
_OF_SHAPE = {
    ATEN.view.default,
    ATEN.reshape.default,
    ATEN._unsafe_view.default,
    ATEN.expand.default,
    ATEN.permute.default,
    ATEN.transpose.int,
    ATEN.unsqueeze.default,
    ATEN.squeeze.dim,
    ATEN.squeeze.dims,
    ATEN.select.int,
    ATEN.split.Tensor,
    ATEN.split_with_sizes.default,
    ATEN.unbind.int,
    ATEN.unflatten.int,
    ATEN.flatten.using_ints,
    ATEN.cat.default,
    ATEN.stack.default,
    ATEN.full.default,
    ATEN.zeros.default,
    ATEN.ones.default,
    ATEN.empty.memory_format,
    ATEN.new_full.default,
    ATEN.new_zeros.default,
    ATEN.new_ones.default,
    ATEN.new_empty.default,
    ATEN.eye.default,
    ATEN.sum.dim_IntList,
    ATEN.mean.dim,
    ATEN.amax.default,
    ATEN.softmax.int,
    ATEN._softmax.default,
    ATEN.topk.default,
    ATEN.sort.default,
    ATEN.sort.stable,
    ATEN.argsort.default,
    ATEN.argsort.stable,
    ATEN.gather.default,
    ATEN.scatter.value,
    ATEN.scatter.src,
    ATEN.take_along_dim.default,
    ATEN.index_select.default,
    ATEN.layer_norm.default,
    ATEN.repeat.default,
}
_MOST = 1 << 31

# Operators whose numbers bound something, by name.
COMPARISONS = ("le", "lt", "ge", "gt", "eq", "ne")


def largest_constant(nodes: Sequence[fx.Node], lengths: Sequence[int]) -> int:
    """The largest plain integer in the arithmetic of `nodes`; `lengths` and their differences do not count."""
    known = {abs(a - b + shift) for a in (*lengths, 0) for b in (*lengths, 0) for shift in (-1, 0, 1)}
    found = (number for node in nodes for number in _numbers(node) if number not in known)
    return max(found, default=0)


def _numbers(node: fx.Node) -> Iterator[int]:
    if node.op == "get_attr":
        tensor = attribute_of(node)
        if tensor.numel() <= 8:
            yield from _plain(tensor.reshape(-1).tolist(), with_floats=True)
    elif node.op == "call_function" and node.target not in _OF_SHAPE:
        name = getattr(node.target, "__name__", "").partition(".")[0]
        yield from _plain([*node.args, *node.kwargs.values()], with_floats=name in COMPARISONS)


def _plain(argument: Any, with_floats: bool) -> Iterator[int]:
    """Integers, and where they bound something also floats; a float elsewhere is a factor or what a mask fills in."""
    if isinstance(argument, list | tuple):
        for part in argument:
            yield from _plain(part, with_floats)
    elif isinstance(argument, bool) or not isinstance(argument, int | float):
        return
    elif (with_floats or isinstance(argument, int)) and math.isfinite(argument) and abs(argument) < _MOST:
        yield math.ceil(abs(argument))


def plain_floats(nodes: Sequence[fx.Node]) -> list[float]:
    """The plain numbers in the arithmetic of `nodes`, small constant tensors too, each once."""
    found: dict[float, None] = {}
    for node in nodes:
        if node.op == "get_attr":
            tensor = attribute_of(node)
            values = tensor.reshape(-1).tolist() if tensor.numel() <= 8 else []
        elif node.op == "call_function" and node.target not in _OF_SHAPE:
            values = [*node.args, *node.kwargs.values()]
        else:
            continue
        found.update((float(value), None) for value in values if type(value) in (int, float) and math.isfinite(value))
    return list(found)
