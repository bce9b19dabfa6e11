"""A graph of nested regions without Python inside: each body one library, and a program that calls them in order.

Inductor calls the bodies of `invoke_subgraph` from Python alone ("not implemented for cpp wrapper"). Here a body is
built once, what stands between its calls is built like a body, and the calls are plain data: their number costs no
compiler.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from k31compile.errors import NativeError
from k31compile.graph.trace import trace_functional
from k31compile.graph.views import may_alias
from k31compile.kernels.programs import BuiltLibrary, Program, Shape, tell_region
from k31compile.targets.native.assemble import CALL, CALL_IN_PLACE, assemble
from k31compile.targets.native.build import build_native
from k31compile.targets.native.load import LIBRARY
from k31compile.targets.native.prepare import Plan, prepare

ATEN = torch.ops.aten
_NESTED = torch.ops.higher_order.invoke_subgraph


@dataclass(frozen=True)
class Body:
    """A built body: its name, which operands it takes, and each of its outputs as the library's or a constant."""

    name: str
    library: BuiltLibrary
    tensors: Sequence[int]
    outputs: Sequence[Plan]


def build_program(module: fx.GraphModule, example_inputs: Sequence[Any], folder: Path) -> tuple[Program, Plan]:
    """Build each nested body of a graph, and what stands between them, into a folder; the graph stays as it was.

    Of a plan see `prepare`: it says which inputs the program takes, and what the graph's outputs are of the program's.
    Every node of the graph has `meta["val"]`, and bodies are functional with copies at the end.

    Raises:
        NativeError: something in it is nothing that a program can hold.
        TraceError: the graph around the bodies cannot be traced.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    outer = fx.GraphModule(module, graph)
    bodies: dict[str, Body] = {}
    for call in graph.find_nodes(op="call_function", target=_NESTED):
        held: Any = call.args[0]
        name = str(held.target)
        if name not in bodies:
            bodies[name] = _build(name, getattr(module, name), call, folder)
        _call_operator(call, bodies[name])
    for held in graph.find_nodes(op="get_attr"):
        # Nothing more is dropped: as Dynamo has it, what writes in place may look as if nobody used it.
        if not held.users:
            graph.erase_node(held)
    outer.recompile()
    traced = trace_functional(outer, example_inputs)
    for call in traced.graph.find_nodes(op="call_function", target=CALL):
        _write_in_place(call, bodies[str(call.args[0])].library)
    traced.graph.lint()
    traced.recompile()
    around, inputs, plan = prepare(traced, example_inputs)
    libraries = {body.name: body.library for body in bodies.values()}
    return assemble(around, inputs, libraries, folder), plan


def _build(name: str, body: fx.GraphModule, call: fx.Node, folder: Path) -> Body:
    operands: list[Any] = [
        operand.meta["val"] if isinstance(operand, fx.Node) else operand for operand in call.args[2:]
    ]
    written = [place for place, node in enumerate(body.graph.find_nodes(op="placeholder")) if _is_written(node)]
    returned: Any = body.graph.output_node().args[0]
    folder = folder / name
    folder.mkdir()
    plan = build_native(body, operands, folder)
    tensors: Sequence[int] = plan["tensors"]
    if any("input" in output for output in plan["outputs"]):
        raise NativeError("a nested region gives back what it was given")
    places = [output.get("library") for output in plan["outputs"]]
    count = len(set(places) - {None})
    if places.count(None) + count != len(places):
        raise NativeError("a nested region gives one tensor twice")
    library = BuiltLibrary(
        folder / LIBRARY,
        tuple(Shape.of(operands[i]) for i in tensors),
        tuple(tensors.index(place) for place in written),
        tuple(Shape.of(made.meta["val"]) for made in (returned[places.index(place)] for place in range(count))),
    )
    tell_region(name, library.outputs, library.written)
    return Body(name, library, tensors, plan["outputs"])


def _is_written(node: fx.Node) -> bool:
    return any(user.target is ATEN.copy_.default and user.args[0] is node for user in node.users)


def _call_operator(call: fx.Node, body: Body) -> None:
    """Put the operator in the place of a nested call, in values: what it writes it gives back, and a copy follows."""
    graph, library = call.graph, body.library
    operands: list[Any] = [call.args[2 + place] for place in body.tensors]
    written = [operands[place] for place in library.written]
    if any(operands.count(operand) > 1 for operand in written):
        raise NativeError("a nested region is given one tensor twice and writes it")
    for operand, shape in zip(operands, library.inputs, strict=True):
        given = Shape.of(operand.meta["val"])
        if (given.sizes, given.dtype) != (shape.sizes, shape.dtype):
            raise NativeError("a nested region is called with tensors of two shapes")
    with graph.inserting_before(call):
        outputs = graph.call_function(CALL, (body.name, operands))
        for i, operand in enumerate(written, start=len(library.outputs)):
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


def _write_in_place(call: fx.Node, library: BuiltLibrary) -> None:
    """Let a region write the graph's own inputs: what it would give back is from there on what lies in them.

    Calls are asked in their order, so that a second one that writes the same finds the input as its operand.
    """
    if not library.written:
        return
    graph, inputs = call.graph, list(call.args[1])  # type: ignore[arg-type]
    results = {node.args[1]: node for node in call.users}
    for place in library.written:
        operand = inputs[place]
        if operand.op != "placeholder":
            raise NativeError("a nested region writes into a part of a tensor")
        if Shape.of(operand.meta["val"]) != library.inputs[place]:
            raise NativeError("a nested region writes into tensors that lie in different ways")
        if _is_read_late(operand, call):
            raise NativeError("a nested region writes into what is read as it was before")
    written = [inputs[place] for place in library.written]
    read = [operand for place, operand in enumerate(inputs) if place not in library.written]
    with graph.inserting_before(call):
        made = graph.call_function(CALL_IN_PLACE, (call.args[0], written, read))
    made.meta = {**call.meta, "val": call.meta["val"][: len(library.outputs)]}
    for i, operand in enumerate(written, start=len(library.outputs)):
        if i in results:
            _stand_for(results[i], operand)
    for result in list(call.users):
        result.args = (made, result.args[1])
    graph.erase_node(call)


def _stand_for(result: fx.Node, operand: fx.Node) -> None:
    """Let an input that was written stand for the value that it was written with, and for copies of that into it."""
    for user in list(result.users):
        if user.target in (ATEN.copy.default, ATEN.copy_.default) and user.args == (operand, result):
            user.replace_all_uses_with(operand)
            user.graph.erase_node(user)
    result.replace_all_uses_with(operand)
    result.graph.erase_node(result)


def _is_read_late(operand: fx.Node, call: fx.Node) -> bool:
    """Whether anybody looks at an input as it is before a call, be it by a view, once the call has begun to write it.

    Copies into it do not look: they have its shape, and the values of another.
    """
    position = {node: i for i, node in enumerate(call.graph.nodes)}
    aliases, todo = set[fx.Node](), [operand]
    while todo:
        alias = todo.pop()
        aliases.add(alias)
        todo += [
            user for user in alias.users if not _copies_into(user, alias) and may_alias(user) and user not in aliases
        ]
    if any(source in aliases and source is not operand for source in call.all_input_nodes):
        return True
    late = ((user, alias) for alias in aliases for user in alias.users if position[user] > position[call])
    return any(not _copies_into(user, alias) for user, alias in late)


def _copies_into(node: fx.Node, base: fx.Node) -> bool:
    return node.target in (ATEN.copy.default, ATEN.copy_.default) and node.args[0] is base and node.args[1] is not base
