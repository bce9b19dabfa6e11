"""A graph of nested regions without Python inside: each body one library, and the graph around them another.

Inductor calls the bodies of `invoke_subgraph` from Python alone ("not implemented for cpp wrapper"). Here a body is built
once, and its calls become calls of an operator, so that the graph around them is built like any other.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx

from k31compile.errors import NativeError
from k31compile.graph.trace import trace_functional
from k31compile.graph.views import may_alias
from k31compile.kernels.regions import OpenRegion, RegionShapes, Shape
from k31compile.targets.native.build import build_native
from k31compile.targets.native.load import EXTERNS, LIBRARY

ATEN = torch.ops.aten
CALL = torch.ops.k31.call_region.default
CALL_IN_PLACE = torch.ops.k31.call_region_.default
_NESTED = torch.ops.higher_order.invoke_subgraph


@dataclass
class Body:
    """A built body: its region, which operands it takes, and each of its outputs as the region's or a constant."""

    region: OpenRegion
    tensors: Sequence[int]
    outputs: Sequence[dict[str, Any]]


@dataclass
class Regions:
    """A graph whose nested calls are calls of built regions; these are open as long as `open` is held."""

    graph: fx.GraphModule
    open: list[OpenRegion] = field(default_factory=list)


def build_regions(module: fx.GraphModule, example_inputs: Sequence[Any], folder: Path) -> Regions:
    """Build each nested body of a graph into a folder and trace the graph around them; the graph stays as it was.

    Every node of the graph has `meta["val"]`, and bodies are functional with copies at the end.

    Raises:
        NativeError: a body, or how it is called, is nothing that a library can be called with.
        TraceError: what is made of the graph cannot be traced.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    outer = fx.GraphModule(module, graph)
    bodies: dict[str, Body] = {}
    for call in graph.find_nodes(op="call_function", target=_NESTED):
        name = str(call.args[0].target)  # type: ignore[union-attr]
        if name not in bodies:
            bodies[name] = _build(getattr(module, name), call, folder / f"region{len(bodies)}")
        _call_operator(call, bodies[name])
    graph.eliminate_dead_code()
    outer.recompile()
    traced = trace_functional(outer, example_inputs)
    for call in traced.graph.find_nodes(op="call_function", target=CALL):
        _write_in_place(call, _region_named(str(call.args[0]), bodies).shapes)
    traced.graph.eliminate_dead_code()
    traced.graph.lint()
    traced.recompile()
    return Regions(traced, [body.region for body in bodies.values()])


def held_open(compiled: Callable[..., Any], regions: Regions) -> Callable[..., Any]:
    """What was compiled, holding the regions that it calls."""

    def call(*inputs: Any, _held: Sequence[OpenRegion] = regions.open) -> Any:
        return compiled(*inputs)

    return call


def _region_named(name: str, bodies: dict[str, Body]) -> OpenRegion:
    return next(body.region for body in bodies.values() if body.region.name == name)


def _build(body: fx.GraphModule, call: fx.Node, folder: Path) -> Body:
    operands = [operand.meta["val"] if isinstance(operand, fx.Node) else operand for operand in call.args[2:]]
    placeholders = body.graph.find_nodes(op="placeholder")
    written = [place for place, node in enumerate(placeholders) if _is_written(node)]
    returned: Any = body.graph.output_node().args[0]
    folder.mkdir()
    plan = build_native(body, operands, folder)
    tensors: Sequence[int] = plan["tensors"]
    if any("input" in output for output in plan["outputs"]):
        raise NativeError("a nested region gives back what it was given")
    places = [output["library"] for output in plan["outputs"] if "library" in output]
    if len(set(places)) != len(places):
        raise NativeError("a nested region gives one tensor twice")
    made = [node.meta["val"] for node in returned if isinstance(node, fx.Node)]
    shapes = RegionShapes(
        tuple(_shape(operands[i]) for i in tensors),
        tuple(_shape(made[places.index(place)]) for place in range(len(places))),
        tuple(tensors.index(place) for place in written),
    )
    digest = hashlib.sha256(repr(shapes).encode())
    for name in (LIBRARY, EXTERNS):
        digest.update((folder / name).read_bytes())
    return Body(OpenRegion(digest.hexdigest(), folder / LIBRARY, shapes), tensors, plan["outputs"])


def _is_written(node: fx.Node) -> bool:
    return any(user.target is ATEN.copy_.default and user.args[0] is node for user in node.users)


def _shape(value: torch.Tensor) -> Shape:
    numbers = (*value.shape, *value.stride())
    if not all(isinstance(number, int) for number in numbers):
        raise NativeError("a nested region has a dynamic size")
    return Shape(tuple(value.shape), tuple(value.stride()), value.dtype)


def _call_operator(call: fx.Node, body: Body) -> None:
    """Put the operator in the place of a nested call, in values: what it writes it gives back, and a copy follows."""
    graph, region = call.graph, body.region
    operands: list[Any] = [call.args[2 + place] for place in body.tensors]
    written = [operands[place] for place in region.shapes.written]
    if any(operands.count(operand) > 1 for operand in written):
        raise NativeError("a nested region is given one tensor twice and writes it")
    for operand, shape in zip(operands, region.shapes.inputs, strict=True):
        if _shape(operand.meta["val"]).sizes != shape.sizes or operand.meta["val"].dtype != shape.dtype:
            raise NativeError("a nested region is called with tensors of two shapes")
    with graph.inserting_before(call):
        outputs = graph.call_function(CALL, (region.name, operands))
        for i, operand in enumerate(written, start=len(region.shapes.outputs)):
            value = graph.call_function(operator.getitem, (outputs, i))
            graph.call_function(ATEN.copy_.default, (operand, value))
        for taken in list(call.users):
            if taken.target is not operator.getitem:
                raise NativeError("what a nested region gives is used as one value")
            output = body.outputs[taken.args[1]]  # type: ignore[index]
            if "value" in output:
                taken.replace_all_uses_with(output["value"])
            else:
                made = graph.call_function(operator.getitem, (outputs, output["library"]))
                made.meta = dict(taken.meta)
                taken.replace_all_uses_with(made)
            graph.erase_node(taken)
    graph.erase_node(call)


def _write_in_place(call: fx.Node, shapes: RegionShapes) -> None:
    """Let a region write the graph's own inputs, whose last copies then go; all that is written has to be one."""
    if not shapes.written:
        return
    graph, inputs = call.graph, list(call.args[1])  # type: ignore[arg-type]
    results = {node.args[1]: node for node in call.users}
    copies: list[fx.Node] = []
    for i, place in enumerate(shapes.written, start=len(shapes.outputs)):
        operand = inputs[place]
        copy = _last_copy(results[i])
        if copy is None or copy.args[0] is not operand or operand.op != "placeholder":
            raise NativeError("a nested region writes into a part of a tensor, or one tensor is written twice")
        if _shape(operand.meta["val"]) != shapes.inputs[place]:
            raise NativeError("a nested region writes into tensors that lie in different ways")
        if _is_read_late(operand, call, copy):
            raise NativeError("a tensor is read as it was before a nested region wrote into it")
        copies.append(copy)
    written = [inputs[place] for place in shapes.written]
    read = [operand for place, operand in enumerate(inputs) if place not in shapes.written]
    with graph.inserting_before(call):
        made = graph.call_function(CALL_IN_PLACE, (call.args[0], written, read))
    made.meta = {**call.meta, "val": call.meta["val"][: len(shapes.outputs)]}
    for copy in copies:
        copy.replace_all_uses_with(copy.args[0])  # type: ignore[arg-type]
        graph.erase_node(copy)
    graph.eliminate_dead_code()
    for result in list(call.users):
        result.args = (made, result.args[1])
    graph.erase_node(call)


def _last_copy(result: fx.Node) -> fx.Node | None:
    """The copy of a result to an input that nothing else is done with; as tracing has it, by way of `copy`."""
    while len(result.users) == 1:
        (user,) = result.users
        if user.target is ATEN.copy_.default:
            return user if user.args[1] is result else None
        if user.target is not ATEN.copy.default or user.args[1] is not result:
            return None
        result = user
    return None


def _is_read_late(operand: fx.Node, call: fx.Node, copy: fx.Node) -> bool:
    """Whether anybody looks at an input, be it by a view, once the call has begun to write it; `copy` is its last."""
    position = {node: i for i, node in enumerate(call.graph.nodes)}
    aliases, todo = set[fx.Node](), [operand]
    while todo:
        alias = todo.pop()
        aliases.add(alias)
        todo += [user for user in alias.users if user is not copy and may_alias(user) and user not in aliases]
    if any(source in aliases and source is not operand for source in call.all_input_nodes):
        return True
    late = (user for alias in aliases for user in alias.users if position[user] > position[call])
    return any(user is not copy and user.target is not ATEN.copy.default for user in late)
