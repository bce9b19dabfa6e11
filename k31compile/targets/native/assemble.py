"""The program of a graph that calls built regions: their calls in order, and libraries of what stands between them."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from k31compile.errors import NativeError
from k31compile.kernels.programs import BuiltLibrary, Call, Program, Shape, View
from k31compile.targets.native.build import build_native
from k31compile.targets.native.load import LIBRARY
from k31compile.targets.native.prepare import prepare

CALL = torch.ops.k31.call_region.default
CALL_IN_PLACE = torch.ops.k31.call_region_.default
_CALLS = (CALL, CALL_IN_PLACE)


def assemble(
    module: fx.GraphModule, inputs: Sequence[torch.Tensor], regions: Mapping[str, BuiltLibrary], folder: Path
) -> Program:
    """The program of a graph whose inputs are tensors and whose outputs are new ones; libraries go into a folder.

    Raises:
        NativeError: something between two calls is nothing that a library can be built of.
    """
    return _Assembler(module, inputs, regions, folder).program


class _Assembler:
    def __init__(
        self, module: fx.GraphModule, inputs: Sequence[torch.Tensor], regions: Mapping[str, BuiltLibrary], folder: Path
    ) -> None:
        placeholders = module.graph.find_nodes(op="placeholder")
        self.module, self.folder = module, folder
        self.values: dict[fx.Node, Any] = dict(zip(placeholders, inputs, strict=True))
        self.places: dict[fx.Node, int] = {node: i for i, node in enumerate(placeholders)}
        self.count = len(placeholders)
        self.program = Program(self.count, list(regions.values()))
        self.numbers = {name: i for i, name in enumerate(regions)}
        between: list[fx.Node] = []
        for node in module.graph.nodes:
            if node.target in _CALLS:
                self._add_stretch(between)
                self._add_call(node)
                between = []
            elif node.op in ("call_function", "get_attr") and node not in self.places:
                between.append(node)
        self._add_stretch(between)
        returned: Any = module.graph.output_node().args[0]
        self.program.outputs = [self.places[node] for node in returned]

    def _new(self, node: fx.Node | None = None) -> int:
        self.count += 1
        if node is not None:
            self.places[node] = self.count - 1
        return self.count - 1

    def _value(self, node: fx.Node) -> Any:
        return self.values[node] if node in self.values else node.meta["val"]

    def _add_call(self, call: fx.Node) -> None:
        number = self.numbers[str(call.args[0])]
        library = self.program.libraries[number]
        parts: Any = call.args[1:]
        if call.target is CALL_IN_PLACE:
            written, read = (iter(part) for part in parts)
            operands = [next(written if i in library.written else read) for i in range(len(library.inputs))]
        else:
            (operands,) = parts
        made = [self._new() for _ in library.outputs]
        for user in call.users:
            if user.target is not operator.getitem:
                raise NativeError("what a nested region gives is used as one value")
            self.places[user] = made[user.args[1]]  # type: ignore[index]
        self.program.steps.append(Call(number, [self.places[node] for node in operands], made))

    def _add_stretch(self, nodes: Sequence[fx.Node]) -> None:
        """What stands between two calls: one library, but for views of what was there before."""
        inside = set(nodes)
        outputs = [node for node in nodes if any(user not in inside for user in node.users)]
        if not outputs and not any(_writes(node) for node in nodes):
            return
        sources = dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source not in inside)
        graph = fx.Graph()
        copied: dict[fx.Node, Any] = {}
        for source in sources:
            if source not in self.places:
                raise NativeError(f"{source.name} is no tensor")
            copied[source] = graph.placeholder(source.name)
            copied[source].meta = {**source.meta, "val": self._value(source)}
        for node in nodes:
            copied[node] = graph.node_copy(node, copied.__getitem__)
        graph.output(tuple(copied[node] for node in outputs))
        stretch = fx.GraphModule(self.module, graph)
        self._add_built(stretch, list(sources), outputs)

    def _add_built(self, stretch: fx.GraphModule, sources: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> None:
        given = [self._value(source) for source in sources]
        written = tuple(i for i, node in enumerate(stretch.graph.find_nodes(op="placeholder")) if _is_written(node))
        plan = prepare(stretch, given)[2]
        made: dict[int, tuple[int, Shape]] = {}
        for node, output in zip(outputs, plan["outputs"], strict=True):
            if "library" in output:
                if output["library"] not in made:
                    made[output["library"]] = self._new(), Shape.of(node.meta["val"])
                self.places[node] = made[output["library"]][0]
        if made or written:
            folder = self.folder / f"stretch{len(self.program.libraries)}"
            folder.mkdir()
            build_native(stretch, given, folder)
            shapes = tuple(Shape.of(given[i]) for i in plan["tensors"])
            ends = [made[i] for i in range(len(made))]
            self.program.libraries.append(
                BuiltLibrary(folder / LIBRARY, shapes, written, tuple(shape for _, shape in ends))
            )
            reads = [self.places[sources[i]] for i in plan["tensors"]]
            self.program.steps.append(Call(len(self.program.libraries) - 1, reads, [place for place, _ in ends]))
        for node, output in zip(outputs, plan["outputs"], strict=True):
            if "input" in output:
                base = sources[output["input"]]
                begin, value = self._value(base).storage_offset(), node.meta["val"]
                shape = Shape.of(value)
                self.program.steps.append(
                    View(self.places[base], self._new(node), shape, value.storage_offset() - begin)
                )
            elif "value" in output:
                raise NativeError(f"{node.name} is no tensor")


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _is_written(placeholder: fx.Node) -> bool:
    """Whether an operator writes an input; one that writes a view of it is not told apart, and looked for."""
    return any(_writes(user) for user in placeholder.users)
