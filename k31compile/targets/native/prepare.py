"""What AOTInductor cannot do, taken out of a graph and put into a plan of plain data.

It takes tensors alone, so sizes that are inputs are read from tensors. It gives back new tensors alone, so an output
that is a view of an input, or the input itself, is made again from what the caller gave.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from k31compile.errors import NativeError
from k31compile.graph.sizes import expression_of, input_values
from k31compile.graph.views import is_view
from k31compile.targets.frozen_sums import mix_where_sums_lie
from k31compile.targets.state_writes import update_states_in_place

ATEN = torch.ops.aten

Plan = dict[str, Any]

_TENSORS = (torch.Tensor, torch.nn.Parameter, FakeTensor)
_MAY_COPY = {ATEN.to.dtype, ATEN.to.device, ATEN.to.dtype_layout, ATEN.expand_as.default}


def prepare(module: fx.GraphModule, example_inputs: Sequence[Any]) -> tuple[fx.GraphModule, list[Any], Plan]:
    """A copy of a graph for the library, its inputs as fake tensors, and the plan of a call.

    The plan's `tensors` says which inputs the library takes; `outputs` says of each output of the graph whether it is
    the library's (`{"library": i}`), an input after some steps (`{"input": i, "steps": [...]}`) or a constant
    (`{"value": x}`).

    Raises:
        NativeError: an input or output that this cannot express.
    """
    values = input_values(module, example_inputs)
    graph = fx.Graph()
    returned = graph.graph_copy(module.graph, {})
    graph.output(returned)
    copy = fx.GraphModule(module, graph)
    mix_where_sums_lie(copy)
    update_states_in_place(copy)
    placeholders = graph.find_nodes(op="placeholder")
    outputs = _plan_outputs(graph, placeholders)
    _read_sizes_from_tensors(graph, placeholders, values)
    tensors = [i for i, value in enumerate(values) if isinstance(value, torch.Tensor)]
    for i in tensors:
        _check_tensor(placeholders[i], values[i])
    for i in sorted(set(range(len(values))) - set(tensors)):
        graph.erase_node(placeholders[i])
    graph.lint()
    copy.recompile()
    return copy, [values[i] for i in tensors], {"tensors": tensors, "outputs": outputs}


def _check_tensor(node: fx.Node, value: torch.Tensor) -> None:
    if type(value) not in _TENSORS:
        raise NativeError(f"input {node.name} is a {type(value).__name__}")
    if value.layout is not torch.strided:
        raise NativeError(f"input {node.name} has layout {str(value.layout).removeprefix('torch.')}")
    if value.device.type != "cpu":
        raise NativeError(f"input {node.name} is on {value.device}")


def _read_sizes_from_tensors(graph: fx.Graph, placeholders: Sequence[fx.Node], values: Sequence[Any]) -> None:
    """Give the readers of each input that is a size the same size of a tensor."""
    begin = next((node for node in graph.nodes if node.op != "placeholder"), None)
    for node, value in zip(placeholders, values, strict=True):
        if isinstance(value, torch.Tensor) or not node.users:
            continue
        if not isinstance(value, torch.SymInt):
            raise NativeError(f"input {node.name} is a {type(value).__name__}")
        assert begin is not None
        with graph.inserting_before(begin):
            tensor, dim = _where_it_stands(value, placeholders, values, node.name)
            size = graph.call_function(ATEN.sym_size.int, (tensor, dim))
        size.meta["val"] = value
        node.replace_all_uses_with(size)


def _where_it_stands(
    size: torch.SymInt, placeholders: Sequence[fx.Node], values: Sequence[Any], name: str
) -> tuple[fx.Node, int]:
    wanted = expression_of(size)
    for node, value in zip(placeholders, values, strict=True):
        sizes: Sequence[Any] = value.shape if isinstance(value, torch.Tensor) else ()
        for dim, other in enumerate(sizes):
            if isinstance(other, torch.SymInt) and expression_of(other) == wanted:
                return node, dim
    raise NativeError(f"the size {name} is an input and no tensor has it")


def _plan_outputs(graph: fx.Graph, placeholders: Sequence[fx.Node]) -> list[Plan]:
    """Leave to the library's output what only it can give; the plan of every output."""
    output = graph.output_node()
    returned: Any = output.args[0]
    if not isinstance(returned, list | tuple):
        raise NativeError("the graph gives one value, not a list")
    given: dict[fx.Node, int] = {}
    plan: list[Plan] = []
    for value in returned:
        if not isinstance(value, fx.Node):
            plan.append(_constant(value))
            continue
        if not isinstance(value.meta.get("val"), torch.Tensor):
            raise NativeError(f"output {value.name} is a {type(value.meta.get('val')).__name__}, no tensor")
        plan.append(_from_input(value, placeholders) or {"library": given.setdefault(value, len(given))})
    output.args = (tuple(given),)
    return plan


def _constant(value: Any) -> Plan:
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    raise NativeError(f"an output is a {type(value).__name__}")


def _from_input(node: fx.Node, placeholders: Sequence[fx.Node]) -> Plan | None:
    """How an output that shares memory with an input is made from it; None where it does not."""
    chain: list[fx.Node] = []
    while node.op == "call_function" and (is_view(node) or node.target in _MAY_COPY):
        if not isinstance(node.args[0], fx.Node):
            return None
        chain.insert(0, node)
        node = node.args[0]
    if node.target is ATEN.copy_.default:
        node = node.args[0]  # type: ignore[assignment]
    if node.op != "placeholder" or not _share_memory(node, chain):
        return None
    positions = {placeholder: i for i, placeholder in enumerate(placeholders)}
    steps = [_step(view, positions) for view in chain]
    return {"input": positions[node], "steps": steps}


def _share_memory(base: fx.Node, chain: Sequence[fx.Node]) -> bool:
    """Whether a chain of views gives memory of its base, and not a copy somewhere on its way."""
    given = value = base.meta["val"]
    for node in chain:
        args, kwargs = fx.map_arg((node.args[1:], dict(node.kwargs)), lambda n: n.meta["val"])
        with given.fake_mode:
            value = node.target(value, *args, **kwargs)  # type: ignore[operator]
    return isinstance(value, torch.Tensor) and value.untyped_storage()._cdata == given.untyped_storage()._cdata


def _step(node: fx.Node, positions: dict[fx.Node, int]) -> list[Any]:
    """A view as [operator, other arguments]: plain values, or `{"size": i}` for an input that is a size."""
    if node.kwargs:
        raise NativeError(f"output {node.name} is a view of an input, made with keywords")
    return [_operator_name(node), [_argument(value, node, positions) for value in node.args[1:]]]


def _operator_name(node: fx.Node) -> str:
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target)
    return "getitem"


def _argument(value: Any, node: fx.Node, positions: dict[fx.Node, int]) -> Any:
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, list | tuple):
        return [_argument(item, node, positions) for item in value]
    if isinstance(value, fx.Node) and value in positions:
        return {"size": positions[value]}
    raise NativeError(f"output {node.name} is a view of an input, made with a {type(value).__name__}")
