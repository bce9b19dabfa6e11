"""Put a replacement into the graph: traced, with metas, in topological order, strides as they were."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.experimental.proxy_tensor import make_fx

from k31compile.graph.sizes import hint, value_of
from k31compile.graph.trace import current_fake_mode

_ORIGIN = ("stack_trace", "nn_module_stack")


@dataclass(frozen=True)
class Replacement:
    """A program that will stand for some outputs, traced and not yet in the graph."""

    leaves: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    program: fx.GraphModule


def replace_outputs(
    module: fx.GraphModule,
    leaves: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
    build: Callable[..., tuple[torch.Tensor, ...]],
) -> list[fx.Node]:
    """Replace `outputs` by `build(*leaves)` and return the nodes that were put in.

    Every new node has `meta["val"]` from the fake run of `build`, and the origin of the first output. The new values
    have the shape, dtype and strides of the old ones: a later `view` was decided on those strides.

    Raises:
        ValueError: the replacement gives other shapes, dtypes or devices.
    """
    return insert_replacements(module, [trace_replacement(leaves, outputs, build)])


def trace_replacement(
    leaves: Sequence[fx.Node], outputs: Sequence[fx.Node], build: Callable[..., tuple[torch.Tensor, ...]]
) -> Replacement:
    """Trace `build` on the fake values of `leaves`; the graph stays as it is.

    Raises:
        ValueError: the replacement gives other shapes, dtypes or devices.
    """
    return Replacement(tuple(leaves), tuple(outputs), _trace(build, leaves, outputs))


def insert_replacements(module: fx.GraphModule, replacements: Sequence[Replacement]) -> list[fx.Node]:
    """Put traced replacements in, sort and sweep once for all of them; return the nodes that were put in.

    Raises:
        ValueError: together they would make a cycle.
    """
    graph = module.graph
    became: dict[fx.Node, fx.Node] = {}
    inserted: list[fx.Node] = []
    for one in replacements:
        leaves = [became.get(leaf, leaf) for leaf in one.leaves]
        new, results = _copy_in(module, one, leaves)
        inside = set(new)
        for old, result in zip(one.outputs, results, strict=True):
            old.replace_all_uses_with(result, delete_user_cb=lambda user: user not in inside)  # noqa: B023
            became[old] = result
        # torch takes scaled_dot_product_attention for random, and what is random is never swept
        for old in one.outputs:
            if not old.users:
                graph.erase_node(old)
        inserted.extend(new)
    sort_topologically(graph)
    graph.eliminate_dead_code()
    return [node for node in inserted if not node._erased]


def _copy_in(
    module: fx.GraphModule, replacement: Replacement, leaves: Sequence[fx.Node]
) -> tuple[list[fx.Node], list[fx.Node]]:
    """The nodes of a replacement in front of its first output, and those that give the results."""
    graph, origin = module.graph, replacement.outputs[0].meta
    mapping: dict[fx.Node, fx.Node] = {}
    inserted: list[fx.Node] = []
    results: list[fx.Node] = []
    with graph.inserting_before(replacement.outputs[0]):
        for node in replacement.program.graph.nodes:
            if node.op == "placeholder":
                mapping[node] = leaves[len(mapping)]
            elif node.op == "output":
                results = [mapping[result] for result in node.args[0]]
            else:
                copy = graph.node_copy(node, mapping.__getitem__)
                if node.op == "get_attr":
                    copy.target = _carry_attribute(replacement.program, module, node)
                copy.meta.update({key: origin[key] for key in _ORIGIN if key in origin})
                mapping[node] = copy
                inserted.append(copy)
    return inserted, results


def _trace(
    build: Callable[..., tuple[torch.Tensor, ...]], leaves: Sequence[fx.Node], outputs: Sequence[fx.Node]
) -> fx.GraphModule:
    expected = [value_of(output) for output in outputs]

    def run(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results = build(*values)
        for result, old in zip(results, expected, strict=True):
            _require_same(result, old)
        return tuple(_with_strides_of(r, e) for r, e in zip(results, expected, strict=True))

    values = [value_of(leaf) for leaf in leaves]
    fake_mode = next((v.fake_mode for v in values if hasattr(v, "fake_mode")), None) or current_fake_mode()
    with fake_mode, enable_python_dispatcher(), torch.no_grad():
        traced = make_fx(run, pre_dispatch=True, tracing_mode="real", _allow_non_fake_inputs=True)(*values)
    traced.graph.eliminate_dead_code()
    return traced


def _with_strides_of(result: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """The result as `expected` lies in memory; of one with gaps in it, a slice, with its dimensions in that order.

    What is computed of it by element lies in the order of its dimensions, gaps or not.
    """
    order = _from_the_outermost(expected)
    lies_alike = same_strides(result, expected) if is_dense(expected) else _from_the_outermost(result) == order
    if lies_alike:
        return result
    if order == sorted(order):
        return result.clone(memory_format=torch.contiguous_format)
    inverse = [order.index(d) for d in range(expected.dim())]
    return result.permute(order).clone(memory_format=torch.contiguous_format).permute(inverse)


def _from_the_outermost(tensor: torch.Tensor) -> list[int]:
    """The dimensions by falling strides; those of size one, whose stride says nothing, first."""
    return sorted(range(tensor.dim()), key=lambda d: (hint(tensor.shape[d]) != 1, -_hint_stride(tensor, d)))


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor fills its memory without gaps or overlap, its dimensions in any order."""
    expected = 1
    for dim in sorted(range(tensor.dim()), key=lambda d: _hint_stride(tensor, d)):
        if hint(tensor.shape[dim]) != 1:
            if _hint_stride(tensor, dim) != expected:
                return False
            expected *= hint(tensor.shape[dim])
    return True


def _hint_stride(tensor: torch.Tensor, dim: int) -> int:
    return hint(tensor.stride(dim))


def same_strides(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors of one shape lie alike in memory; the stride of a dimension of size one says nothing."""
    wide = [d for d in range(right.dim()) if hint(right.shape[d]) != 1]
    return same_sizes([left.stride(d) for d in wide], [right.stride(d) for d in wide])


def same_sizes(left: Sequence[Any], right: Sequence[Any]) -> bool:
    """Whether two lists of sizes are the same numbers or the same expressions, without adding a guard."""

    def text(size: Any) -> str:
        return str(size.node.expr) if isinstance(size, torch.SymInt) else str(int(size))

    return [text(size) for size in left] == [text(size) for size in right]


def _require_same(new: Any, old: torch.Tensor) -> None:
    if new.dtype != old.dtype or new.device != old.device or not same_sizes(new.shape, old.shape):
        raise ValueError(f"the replacement gives {new.dtype} {tuple(new.shape)} for {old.dtype} {tuple(old.shape)}")


def _carry_attribute(source: fx.GraphModule, target: fx.GraphModule, node: fx.Node) -> str:
    name = f"_k31_{node.target}_{len(target.graph.nodes)}"
    setattr(target, name, getattr(source, str(node.target)))
    return name


def sort_topologically(graph: fx.Graph) -> None:
    """Order the nodes so that each stands after its inputs, keeping the present order where it is free.

    Raises:
        ValueError: a node depends on itself.
    """
    placed: set[fx.Node] = set()
    entered: set[fx.Node] = set()
    order: list[fx.Node] = []

    def place(root: fx.Node) -> None:
        stack = [root]
        while stack:
            node = stack[-1]
            waiting = [source for source in node.all_input_nodes if source not in placed]
            if node in placed:
                stack.pop()
            elif waiting:
                if node in entered:
                    raise ValueError(f"{node.name} would depend on itself")
                entered.add(node)
                stack.extend(waiting)
            else:
                stack.pop()
                placed.add(node)
                order.append(node)

    nodes = list(graph.nodes)
    for node in nodes:
        place(node)
    if order == nodes:
        return
    cursor = order[0]
    for node in order[1:]:
        cursor.append(node)
        cursor = node
